"""Killed at any moment and started again, a run ends with the very losses and weights of one never killed."""

import json
import random
import signal

import pytest
from safetensors.torch import load_file

from gva.train.metrics import read_metrics
from train.runs import command, finish, kill_when

STEPS = ["--steps", "120", "checkpoint_every=3"]  # so dense that most kills fall into the writing of one


def losses(out):
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in read_metrics(out, "step")]


def evaluations(out):
    return [line for line in read_metrics(out) if line["kind"] == "eval"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_kills_at_random_moments_change_nothing(tmp_path, data, ranks):
    words = STEPS if ranks == 1 else ["--steps", "60", "checkpoint_every=3", "parallel=ddp"]
    finish(command(data, tmp_path / "whole", *words, ranks=ranks))
    torn, rng, kills = tmp_path / "torn", random.Random(ranks), 0
    run = command(data, torn, *words, ranks=ranks)
    seen = 0
    for _ in range(3):
        folder = torn / "checkpoints"

        def progressed(seen=seen, folder=folder):
            return any(int(p.name.split("-")[1].split(".")[0]) > seen for p in folder.glob("step-*"))

        kills += kill_when(run, progressed, delay=rng.uniform(0, 0.4))
        whole = [int(p.name[5:]) for p in folder.glob("step-*[0-9]")]
        seen = max(whole, default=0)
    assert kills >= 2, "the runs were over before they could be killed"
    finish(run)
    assert losses(torn) == losses(tmp_path / "whole")
    assert evaluations(torn) == evaluations(tmp_path / "whole")
    a, b = (load_file(folder / "model" / "model.safetensors") for folder in (torn, tmp_path / "whole"))
    assert a.keys() == b.keys()
    assert all(a[name].equal(b[name]) for name in a)
    assert not list((torn / "checkpoints").glob("*.unfinished"))


def test_asked_to_stop_it_writes_a_checkpoint_and_goes_on_later(tmp_path, data):
    finish(command(data, tmp_path / "whole", "--steps", "60"))
    out = tmp_path / "stopped"
    run = command(data, out, "--steps", "60", "checkpoint_every=1000")
    started = lambda: bool(read_metrics(out, "step"))  # noqa: E731
    assert kill_when(run, started, delay=0, sent=signal.SIGTERM)
    (checkpoint,) = (out / "checkpoints").iterdir()
    assert 0 < int(checkpoint.name[5:]) < 60
    finish(run)
    assert losses(out) == losses(tmp_path / "whole")


def test_a_finished_run_is_left_alone(tmp_path, data):
    run = command(data, tmp_path, "--steps", "4")
    finish(run)
    before = (tmp_path / "metrics.jsonl").read_text()
    finish(run)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_another_run_is_refused_by_what_differs(tmp_path, data):
    finish(command(data, tmp_path, "--steps", "4"))
    told = finish(command(data, tmp_path, "--steps", "4", "lr=0.5", "--seed", "3"), expect=2)
    assert "holds a run that differs in recipe.lr: 0.003 -> 0.5; recipe.seed: 0 -> 3" in told
    told = finish(command(data, tmp_path, "--steps", "4", variant="gqa"), expect=2)
    assert "model.attention: 'gva' -> 'gqa'" in told


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
