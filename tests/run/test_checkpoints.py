"""Checkpoints of a run: the last ones, whole ones, and what is said where one cannot be written or read."""

import errno
import json

import pytest

from gva.run.checkpoints import CheckpointError, Checkpoints
from gva.run.ranks import process_group
from train.runs import command, finish, run_here


def test_only_the_last_checkpoints_are_kept(tmp_path, data):
    run_here(data, tmp_path, "checkpoint_every=3", "keep_checkpoints=2", steps=12)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000009", "step-00000012"]


def test_a_full_disk_names_the_checkpoint_that_is_left(tmp_path, data, monkeypatch):
    import torch.distributed.checkpoint.filesystem as filesystem

    real = filesystem.FileSystemWriter.write_data

    def full(self, plan, planner):
        if "00000010" in str(self.path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, plan, planner)

    monkeypatch.setattr(filesystem.FileSystemWriter, "write_data", full)
    with pytest.raises(CheckpointError, match=r"step-00000010: could not be written .*No space left.*step 5 is whole"):
        run_here(data, tmp_path, "checkpoint_every=5", steps=20)
    with process_group("cpu") as ranks:
        assert Checkpoints(tmp_path / "checkpoints", ranks, keep=2).steps() == [5]


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path, data):
    run = command(data, tmp_path, "--steps", "8", "checkpoint_every=4")
    finish(run)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["kind"] != "done"]
    (tmp_path / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    newest = sorted((tmp_path / "checkpoints").iterdir())[-1]
    (newest / ".metadata").write_bytes(b"")
    told = finish(run, expect=2)
    assert f"{newest.name}: cannot be read" in told
    assert "remove it to go on from the one before" in told
