"""The lines of a run's metrics."""

import errno
import os

import pytest

from gva.run.metrics import METRICS, read_metrics, record
from train.runs import run_here


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    (tmp_path / METRICS).write_text('{"kind": "step", "step": 1}\n{"kind": "step", "st')
    assert read_metrics(tmp_path) == [{"kind": "step", "step": 1}]


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
