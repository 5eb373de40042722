"""The process that trains the seeds of one row, one after another: compilation is paid once.

Started by `gva.study.runner` as `python -m gva.study.child JOB`, JOB being a JSON object.
"""

import gc
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from gva.run.atomic import write_atomically
from gva.run.files import remove, subfolder
from gva.run.folder import CHECKPOINTS, MODEL

KEEPS = ".keeps-weights"  # in a run's folder until `discard_weights` has been there, which a kill may prevent
# What goes when a run is done; a model that a kill has left half of is exported again from what goes after it.
WEIGHTS = {"all": (), "model": (CHECKPOINTS,), "none": (MODEL, CHECKPOINTS)}


def main(job: dict[str, Any]) -> int:
    stop_with(job["parent"])
    from gva.data.source import open_data
    from gva.study.matrix import Row
    from gva.train.loop import Stopped, train

    data, folder = Path(job["data"]), Path(job["folder"])
    start, teacher = (Path(job[key]) if job.get(key) else None for key in ("from", "teacher"))
    row = Row(job["name"], job["variant"], tuple(job["seeds"]), job["overrides"], None, start, teacher)
    given = row.given()
    for seed in row.seeds:
        print(f"--- {row.name} seed {seed}", file=sys.stderr, flush=True)
        config, recipe = row.build(job["preset"], seed, open_data(data).vocab_size, given)
        out, first = subfolder(folder, f"seed-{seed}"), int(os.environ.get("RANK", "0")) == 0
        if first:
            write_atomically(out / KEEPS, "")
        try:
            train(config, recipe, data, out, given=given, device=job["device"], progress=False)
        except Stopped as stopped:
            print(stopped, file=sys.stderr)
            return 130
        if first:
            discard_weights(out, job["weights"])
        gc.collect()  # the last model must be gone from the device before the next one comes
    return 0


def discard_weights(out: Path, keep: str) -> None:
    """Remove what a finished run needs no more: nothing, its checkpoints, or the trained model too."""
    for name in WEIGHTS[keep]:
        shutil.rmtree(out / name, ignore_errors=True)
    remove(out / KEEPS)


def stop_with(parent: int) -> None:
    """When the comparison is killed without a word, its training stops too, with a checkpoint."""

    def watch() -> None:
        while _lives(parent):
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _lives(parent: int) -> bool:
    if "RANK" not in os.environ:
        return os.getppid() == parent
    try:  # torchrun stands between us and the comparison, and goes on without it
        os.kill(parent, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
