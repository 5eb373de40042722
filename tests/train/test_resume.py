"""Killed at any moment and started again, a run ends with the very losses and weights of one never killed."""

import random
import shutil
import signal

import pytest
from safetensors.torch import load_file

from gva.run.metrics import read_metrics
from train.runs import command, finish, kill_when


def losses(out):
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in read_metrics(out, "step")]


def evaluations(out):
    return [line for line in read_metrics(out) if line["kind"] == "eval"]


def same_weights(a, b):
    x, y = (load_file(folder / "model" / "model.safetensors") for folder in (a, b))
    return x.keys() == y.keys() and all(x[name].equal(y[name]) for name in x)


@pytest.mark.parametrize(("ranks", "parallel"), [(1, "ddp"), (2, "ddp"), (2, "fsdp")])
def test_kills_at_random_moments_change_nothing(tmp_path, data, ranks, parallel):
    """Checkpoints so dense that evaluations fall on the same steps and kills into their writing."""
    whole, torn, rng = tmp_path / "whole", tmp_path / "torn", random.Random(ranks)
    words = ["--steps", "90", "checkpoint_every=4", f"parallel={parallel}"]
    finish(command(data, whole, *words), ranks=ranks)
    folder, run = torn / "checkpoints", command(data, torn, *words)
    reached = [0]

    def later():
        return any(int(path.name[5:13]) > reached[0] + 8 for path in folder.glob("step-*"))

    def writing():
        return later() and any(folder.glob("*.unfinished"))

    landed = 0
    for condition, delay in ((later, rng.uniform(0, 0.3)), (writing, 0), (writing, 0)):
        landed += kill_when(run, condition, delay, ranks=ranks) and any(folder.glob("*.unfinished"))
        reached[0] = max([int(path.name[5:]) for path in folder.glob("step-*[0-9]")], default=0)
    assert landed >= 1, "no kill fell into the writing of a checkpoint"
    assert reached[0] < 90, "it was over before it could be killed"
    finish(run, ranks=ranks)
    assert losses(torn) == losses(whole)
    assert evaluations(torn) == evaluations(whole)
    assert same_weights(torn, whole)
    assert not list(folder.glob("*.unfinished"))


@pytest.mark.gpu
def test_killed_on_a_gpu_it_goes_on_at_the_same_step_data_and_rate(tmp_path, data):
    """Compiled, in bf16: arithmetic may differ in the last bits, the course of the run may not."""
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    words = ["--steps", "60", "checkpoint_every=10", "precision=bf16", "compile=true", "document_mask=true"]
    finish(command(data, whole, *words, device="cuda"))
    run = command(data, torn, *words, device="cuda")
    assert kill_when(run, lambda: any((torn / "checkpoints").glob("step-00000020")))
    finish(run)
    ours, theirs = losses(torn), losses(whole)
    assert [(step, rate) for step, _, _, rate in ours] == [(step, rate) for step, _, _, rate in theirs]
    assert [loss for _, loss, _, _ in ours] == pytest.approx([loss for _, loss, _, _ in theirs], rel=2e-3)
    tokens = [[line["tokens"] for line in read_metrics(folder, "step")] for folder in (torn, whole)]
    assert tokens[0] == tokens[1]


def test_a_run_goes_on_with_other_ranks(tmp_path, data):
    """One process, two repeated, two sharded, one again: each reads what the one before wrote."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    words = ["--steps", "40", "checkpoint_every=2", "eval_every=2"]
    finish(command(data, whole, *words))
    for ranks, parallel, until in ((1, "ddp", 8), (2, "ddp", 16), (2, "fsdp", 24)):

        def reached(until=until):
            return any(int(path.name[5:]) >= until for path in (moved / "checkpoints").glob("step-*[0-9]"))

        assert kill_when(command(data, moved, *words, f"parallel={parallel}"), reached, ranks=ranks)
    finish(command(data, moved, *words))
    steps = [[line[:2] for line in losses(folder)] for folder in (moved, whole)]
    assert [step for step, _ in steps[0]] == list(range(1, 41))
    assert [loss for _, loss in steps[0]] == pytest.approx([loss for _, loss in steps[1]], rel=1e-4)


def test_asked_to_stop_it_writes_a_checkpoint_and_goes_on_later(tmp_path, data):
    finish(command(data, tmp_path / "whole", "--steps", "60"))
    out = tmp_path / "stopped"
    run = command(data, out, "--steps", "60", "checkpoint_every=1000")
    started = lambda: bool(read_metrics(out, "step"))  # noqa: E731
    assert kill_when(run, started, delay=0, sent=signal.SIGTERM)
    (checkpoint,) = (out / "checkpoints").glob("step-*[0-9]")
    assert 0 < int(checkpoint.name[5:]) < 60
    finish(run)
    assert losses(out) == losses(tmp_path / "whole")


def test_a_finished_run_is_left_alone(tmp_path, data):
    run = command(data, tmp_path, "--steps", "4")
    finish(run)
    before = (tmp_path / "metrics.jsonl").read_text()
    finish(run)
    assert (tmp_path / "metrics.jsonl").read_text() == before
    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "model")
    finish(run)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights, "a lost export is made again"
