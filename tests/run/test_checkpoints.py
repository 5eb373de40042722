"""Checkpoints of a run: the last ones, whole ones, and what is said where one cannot be written or read."""

import errno
import json
import random
import shutil

import pytest
import torch

from gva.run.checkpoints import CheckpointError, Checkpoints
from gva.run.metrics import NonFiniteLoss
from gva.run.ranks import process_group
from gva.train import loop
from train.runs import command, finish, run_here


def test_only_the_last_checkpoints_are_kept(tmp_path, data):
    run_here(data, tmp_path, "checkpoint_every=3", "keep_checkpoints=2", steps=12)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000009", "step-00000012"]


def test_an_old_one_that_a_kill_kept_goes_when_the_run_goes_on(tmp_path, data, two_steps):
    """Even where nothing is left to train, so that no further one is written."""
    resumed(data, two_steps, tmp_path, lambda folder: (folder / "step-00000002").mkdir())
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000004", "step-00000008"]


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
        assert Checkpoints(tmp_path, {}, ranks, keep=2).steps() == [5]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory, data):
    """A run with its checkpoints of steps 4 and 8, whose export was lost."""
    out = tmp_path_factory.mktemp("two-steps")
    run_here(data, out, "checkpoint_every=4", steps=8)
    shutil.rmtree(out / "model")
    return out


def resumed(data, two_steps, out, change):
    shutil.copytree(two_steps, out, dirs_exist_ok=True)
    change(out / "checkpoints")
    run_here(data, out, "checkpoint_every=4", steps=8)


def test_a_flipped_bit_is_noticed_wherever_it_is_and_the_one_before_is_offered(tmp_path, data, two_steps, capfd):
    rng = random.Random(0)

    def flip(folder):
        newest = folder / "step-00000008"
        file = rng.choice([path for path in newest.iterdir() if path.name != "checkpoint.json"])
        content = bytearray(file.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)

    told = r"step-00000008: cannot be read \(\S+ is not what was written\); remove it to go on .* of step 4"
    for number in range(12):
        with pytest.raises(CheckpointError, match=told):
            resumed(data, two_steps, tmp_path / str(number), flip)
    assert "Traceback" not in capfd.readouterr().err, "the library tells its own at length"
    resumed(data, two_steps, tmp_path / "removed", lambda folder: shutil.rmtree(folder / "step-00000008"))
    assert (tmp_path / "removed" / "model" / "model.safetensors").is_file()


def test_a_model_with_a_flipped_bit_is_exported_again_or_told(tmp_path, data, capfd):
    run_here(data, tmp_path, "checkpoint_every=4", steps=8)
    weights = tmp_path / "model" / "model.safetensors"
    written = weights.read_bytes()
    weights.write_bytes(written[:-9] + bytes([written[-9] ^ 1]) + written[-8:])
    run_here(data, tmp_path, "checkpoint_every=4", steps=8)
    assert weights.read_bytes() == written
    weights.write_bytes(written[:-9] + bytes([written[-9] ^ 1]) + written[-8:])
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(OSError, match="model: not whole, though its training is done, and there is no checkpoint"):
        run_here(data, tmp_path, "checkpoint_every=4", steps=8)


def test_a_checkpoint_of_another_run_or_step_is_refused(tmp_path, data, two_steps):
    other = tmp_path / "other"
    run_here(data, other, "checkpoint_every=4", "seed=1", steps=8)

    def exchanged(folder):
        shutil.rmtree(folder / "step-00000008")
        shutil.copytree(other / "checkpoints" / "step-00000008", folder / "step-00000008")

    with pytest.raises(CheckpointError, match=r"of another run: recipe.seed: 1 -> 0.*of step 4"):
        resumed(data, two_steps, tmp_path / "a", exchanged)
    with pytest.raises(CheckpointError, match=r"of another run: step: 8 -> 12"):
        resumed(data, two_steps, tmp_path / "b", lambda f: (f / "step-00000008").rename(f / "step-00000012"))
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is missing\); remove it to begin again"):
        resumed(data, two_steps, tmp_path / "c", lambda f: (
            shutil.rmtree(f / "step-00000008"), (f / "step-00000004" / "__0_0.distcp").unlink()
        ))  # fmt: skip


@pytest.mark.parametrize(
    "content",
    ["{}", "[]", '{"run": 1, "step": 8, "files": {"../x": ""}}', '{"files": 3}', '{"run": {}, "step": 8, "files": {}}'],
)
def test_a_record_that_is_none_is_refused(tmp_path, data, two_steps, content):
    with pytest.raises(CheckpointError, match="step-00000008: cannot be read"):
        resumed(data, two_steps, tmp_path, lambda f: (f / "step-00000008" / "checkpoint.json").write_text(content))


def test_one_of_an_earlier_version_is_read_and_it_is_said_that_nothing_was_checked(tmp_path, data, two_steps, capsys):
    resumed(data, two_steps, tmp_path / "checked", lambda folder: None)
    assert "unchecked" not in capsys.readouterr().err
    resumed(data, two_steps, tmp_path / "a", lambda folder: (folder / "step-00000008" / "checkpoint.json").unlink())
    assert "step-00000008: of an earlier version, without checkpoint.json: read unchecked\n" in capsys.readouterr().err
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("checked", "a")]
    assert weights[0] == weights[1]


def test_a_folder_of_checkpoints_that_leads_away_is_not_written_into(tmp_path, data):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "precious.unfinished").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(elsewhere)
    with pytest.raises(ValueError, match=r"checkpoints: a link to .*elsewhere, outside of the folder"):
        run_here(data, tmp_path / "run")
    assert (elsewhere / "precious.unfinished").is_dir()


def test_a_link_where_the_next_one_will_be_written_is_removed(tmp_path, data, two_steps):
    """And what is no checkpoint by its name is none."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def linked(folder):
        (folder / "step-00000012.unfinished").symlink_to(elsewhere)
        (folder / "step-x1").mkdir()
        (folder / "step-00000099").write_text("")

    out = shutil.copytree(two_steps, tmp_path / "run")
    linked(out / "checkpoints")
    with process_group("cpu") as ranks:
        left = Checkpoints(out, {}, ranks, keep=2)
        assert left.steps() == [4, 8]
        left.save(12, {"x": torch.zeros(3)})
        left.finish()
        assert left.steps() == [8, 12]
    assert not list(elsewhere.iterdir())


def test_no_checkpoint_has_weights_that_are_not_numbers(tmp_path, data, monkeypatch):
    """The last update before one is written may spoil them, when no loss has shown it yet."""
    real = loop.train_step

    def spoiled(run):
        scalars = real(run)
        if run.step == 7:
            next(run.model.parameters()).data[3, 5] = float("inf")
        return scalars

    monkeypatch.setattr(loop, "train_step", spoiled)
    with pytest.raises(
        NonFiniteLoss, match=r"weights that are not numbers after step 8: stopped.*step 4 is from before it"
    ):
        run_here(data, tmp_path, "checkpoint_every=4", "log_every=4", steps=12)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


def test_weights_that_are_not_numbers_are_not_exported(tmp_path, data, monkeypatch):
    """As an earlier version may have left them in its last checkpoint."""
    real = loop.export_model

    def spoiled(model, *rest):
        torch.nn.init.constant_(model.lm_head.weight, float("nan"))
        real(model, *rest)

    monkeypatch.setattr(loop, "export_model", spoiled)
    with pytest.raises(ArithmeticError, match="model: not written, because weights are not numbers"):
        run_here(data, tmp_path, steps=4)
    assert not (tmp_path / "model").exists()


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
