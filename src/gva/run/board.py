"""The numbers of a run for TensorBoard, in its own format of files."""

import os
import time
from pathlib import Path
from typing import Any

from gva.run.files import opened, subfolder

FOLDER = "tensorboard"


class Board:
    """A file of events from `step` on, in place of what earlier files have from there. Written at once, as our own file
    is: the writer that TensorBoard brings does it in a thread, whose failures are tracebacks."""

    def __init__(self, out: Path, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        path = subfolder(out, FOLDER) / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
        self._records = RecordWriter(opened(path, "xb"))
        self._put(step, file_version="brain.Event:2")
        self._put(step, session_log=SessionLog(status=SessionLog.START))

    def write(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            numbers = {f"{line['kind']}/{name}": value for name, value in line.items() if name != "step"}
            plain = {tag: value for tag, value in numbers.items() if type(value) in (int, float)}
            shown = [self._summary.Value(tag=tag, simple_value=value) for tag, value in plain.items()]
            self._put(line["step"], summary=self._summary(value=shown))
        self._records.flush()

    def close(self) -> None:
        self._records.close()

    def _put(self, step: int, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), step=step, **content).SerializeToString())


def open_board(out: Path, step: int) -> Board | None:
    """None where gva was installed without what it depends on: metrics.jsonl has the same numbers."""
    try:
        return Board(out, step)
    except ImportError:
        return None
