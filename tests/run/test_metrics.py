"""The lines of a run's metrics."""

import errno
import os

import pytest

from gva.run.board import Board
from gva.run.files import FolderError
from gva.run.metrics import KEPT, METRICS, keep, read_metrics, record
from train.runs import run_here


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    (tmp_path / METRICS).write_text('{"kind": "step", "step": 1}\n{"kind": "step", "st')
    assert read_metrics(tmp_path) == [{"kind": "step", "step": 1}]


@pytest.mark.parametrize(
    "damage", [b"\x00" * 20, b'{"kind": "step", "st', b"[1]", b'{"step": 2}', b"\xff\xfe", b"[" * 9999]
)
def test_a_damaged_line_costs_that_line_and_says_so(tmp_path, damage):
    lines = [b'{"kind": "step", "step": %d}' % step for step in range(1, 14)]
    lines[2] = damage
    (tmp_path / METRICS).write_bytes(b"\n".join(lines) + b"\n")
    with pytest.warns(UserWarning, match=r"metrics.jsonl: line 3 is damaged and left out"):
        found = read_metrics(tmp_path)
    assert [line["step"] for line in found] == [1, 2, *range(4, 14)]


def test_kept_metrics_that_are_damaged_are_told(tmp_path):
    keep(tmp_path, [{"kind": "step", "step": 1}])
    (tmp_path / KEPT).write_bytes((tmp_path / KEPT).read_bytes()[:40])
    with pytest.raises(FolderError, match=r"metrics.jsonl.xz: damaged .*copy it again"):
        read_metrics(tmp_path)


def test_nothing_is_written_through_a_link(tmp_path, data):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (run, elsewhere):
        folder.mkdir()
    (elsewhere / "file").write_text("precious")
    (run / METRICS).symlink_to(elsewhere / "file")
    run_here(data, run, steps=4)
    (run / "model").rename(run / "old")
    (run / "model").symlink_to(elsewhere)
    with pytest.raises(FolderError, match=r"model: a link to .*elsewhere, outside of the folder"):
        run_here(data, run, steps=4)
    assert [(path.name, path.read_text()) for path in elsewhere.iterdir()] == [("file", "precious")]


def test_a_line_is_recorded_in_place_of_the_one_of_its_kind_and_step(tmp_path):
    for kind, number in (("tasks", 1), ("decode", 2), ("tasks", 3)):
        record(tmp_path, {"kind": kind, "step": 8, "number": number})
    assert [line["number"] for line in read_metrics(tmp_path)] == [2, 3]


def test_a_full_disk_under_the_metrics_is_told(tmp_path, data, monkeypatch):
    real = os.fsync

    def full(descriptor):
        if (tmp_path / "checkpoints" / "step-00000010").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr("gva.run.metrics.os.fsync", full)
    with pytest.raises(OSError, match=r"metrics.jsonl: could not be written .*No space left.*same command again"):
        run_here(data, tmp_path, "checkpoint_every=5", steps=30)


def test_tensorboard_shows_the_same_numbers_once_and_its_file_is_written_at_once(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first in (1, 3):  # gone on with after step 2
        board = Board(tmp_path, first)
        board.write([{"kind": "step", "step": step, "loss": 10.0 * first + step} for step in range(first, first + 4)])
        board.write([{"kind": "eval", "step": first, "valid_loss": 2.0, "by_position": [1.0], "fine": True}])
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert found.Tags()["scalars"] == ["step/loss", "eval/valid_loss"]
    told = [(point.step, point.value) for point in found.Scalars("step/loss")]
    assert told == [(1, 11.0), (2, 12.0), (3, 33.0), (4, 34.0), (5, 35.0), (6, 36.0)]


def test_a_full_disk_under_tensorboard_is_told_as_under_the_metrics(tmp_path, data, monkeypatch):
    def full(self, lines):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Board, "write", full)
    with pytest.raises(OSError, match=r"could not be written .*No space left.*same command again"):
        run_here(data, tmp_path, steps=4)
