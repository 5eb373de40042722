"""A matrix executed for real, in its processes: resumed, stopped, crashed, and the seeds of a row in one process."""

import signal
import subprocess
import sys
import time

import pytest
import torch

from gva.cli import main
from gva.run.metrics import is_done, read_metrics
from gva.study import child
from gva.study.child import KEEPS
from gva.study.matrix import Matrix, Row, run_folder, simple_matrix
from gva.study.results import load
from gva.study.runner import Runner
from gva.train.recipe import read_overrides
from train.runs import ENVIRONMENT, SIZE, command, finish

FIELDS = {**read_overrides(None, SIZE), "steps": 8, "eval_every": 4}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def matrix(*variants, seeds=2, **fields):
    return Matrix("demo", tuple(Row(name, name, tuple(range(seeds)), {**FIELDS, **fields}) for name in variants))


def losses(folder):
    return [line["loss"] for line in read_metrics(folder, "step")]


def test_seeds_share_a_process_and_give_what_they_give_alone(tmp_path, data, capsys):
    study = matrix("gqa", "gva-drope-16")
    outcome = Runner(study, data, tmp_path, device="cpu").execute(study.runs())
    assert outcome.finished == ["gqa:0", "gqa:1", "gva-drope-16:0", "gva-drope-16:1"]
    assert not outcome.failed
    assert (tmp_path / "runs" / "gqa" / "log.txt").read_text().count("===") == 1, "one process for both seeds"
    finish(command(data, tmp_path / "alone", "--steps", "8", "eval_every=4", "--seed", "1", variant="gva-drope-16"))
    together = run_folder(tmp_path, study.rows[1].name, 1)
    assert losses(together) == losses(tmp_path / "alone")
    assert len(losses(together)) == 8
    told = capsys.readouterr().out
    assert "[4/4] gva-drope-16 seed 1: validation loss " in told
    # Done, its model kept and its checkpoints gone; run again, nothing is trained.
    assert sorted(path.name for path in together.iterdir() if path.is_dir() and path.name != "tensorboard") == ["model"]
    before = (together / "metrics.jsonl").stat().st_mtime_ns
    (together / "checkpoints").mkdir()  # as if kept by another command: only --no-weights takes it back
    Runner(study, data, tmp_path, device="cpu").execute(study.runs())
    assert (together / "checkpoints").is_dir()
    again = Runner(study, data, tmp_path, device="cpu", weights="none").execute(study.runs())
    assert again.finished == outcome.finished
    assert (together / "metrics.jsonl").stat().st_mtime_ns == before
    assert not (together / "checkpoints").exists()
    assert not (together / "model").exists(), "a run is done once its metrics say so, whatever is left of its weights"
    assert "4 of 4 runs are done already" in capsys.readouterr().out


def test_a_damaged_model_is_exported_again_and_a_damaged_line_costs_itself(tmp_path, data):
    study = matrix("gqa", seeds=1)
    Runner(study, data, tmp_path, device="cpu", weights="all").execute(study.runs())
    run = run_folder(tmp_path, "gqa", 0)
    weights, trained = (run / "model" / "model.safetensors").read_bytes(), losses(run)
    (run / "model" / "model.safetensors").write_bytes(weights[:-1])
    outcome = Runner(study, data, tmp_path, device="cpu", weights="all").execute(study.runs())
    assert outcome.finished == ["gqa:0"]
    assert (run / "model" / "model.safetensors").read_bytes() == weights
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[2] = "#" + lines[2]
    (run / "metrics.jsonl").write_text("".join(lines))
    with pytest.warns(UserWarning, match=r"line 3 is damaged and left out"):
        outcome = Runner(study, data, tmp_path, device="cpu", weights="all").execute(study.runs())
    assert outcome.finished == ["gqa:0"]
    assert (run / "metrics.jsonl").read_text() == "".join(lines), "it was not trained again"
    with pytest.warns(UserWarning, match="damaged"):
        assert losses(run) == [*trained[:2], *trained[3:]]


def test_changed_settings_are_refused_before_anything_runs(tmp_path, data):
    study = matrix("gqa", seeds=1)
    Runner(study, data, tmp_path, device="cpu").execute(study.runs())
    other = matrix("mla", "gqa", seeds=1, lr=0.5)
    with pytest.raises(ValueError, match=r"holds a run that differs in recipe.lr: 0.003 -> 0.5"):
        Runner(other, data, tmp_path, device="cpu").execute(other.runs())
    assert not (tmp_path / "runs" / "mla").exists()


MATRIX = """
preset = "demo"
seeds = [0]

[[row]]
variant = "gqa"
seeds = [0, 1, 2]

[[row]]
name = "tied"
variant = "shared-kv"
"""


def test_a_crash_costs_the_run_that_crashed(tmp_path, data, capsys):
    """The middle seed finds its folder taken by a file; the others of its row and the next row are reported."""
    (tmp_path / "matrix.toml").write_text(MATRIX)
    out = tmp_path / "out"
    (out / "runs" / "gqa").mkdir(parents=True)
    (out / "runs" / "gqa" / "seed-1").write_text("in the way")
    words = ["compare", "--matrix", str(tmp_path / "matrix.toml"), "--data", str(data), "--out", str(out)]
    assert main([*words, "--device", "cpu", "--steps", "8", *SIZE]) == 1
    said = capsys.readouterr()
    assert "gqa:1 failed: ended with exit code 1; the whole log: " in said.err
    assert "FileExistsError" in said.err
    assert "1 of 4 runs failed; the same command tries them again" in said.err
    results = load([out])
    assert {row.name: row.seeds for row in results.rows} == {"gqa": [0, 2], "tied": [0]}
    assert "tied" in said.out
    assert (out / "report" / "report.md").is_file()
    (out / "runs" / "gqa" / "seed-1").unlink()
    assert main([*words, "--device", "cpu", "--steps", "8", *SIZE, "--only", "gqa:1"]) == 0
    assert load([out]).row("gqa").seeds == [0, 1, 2]


def start(data, out, *words):
    words = ["--preset", "demo", "--variants", "gqa", "--seeds", "2", "--data", str(data), "--out", str(out), *words]
    return subprocess.Popen(
        [sys.executable, "-m", "gva.cli", "compare", *words, *SIZE, "--device", "cpu", "checkpoint_every=100000"],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def wait_for(condition, process=None, seconds=100):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline and (process is None or process.poll() is None):
        time.sleep(0.01)
    assert condition()


def test_stopped_it_writes_a_checkpoint_and_goes_on_with_the_same_losses(tmp_path, data):
    out, steps = tmp_path / "stopped", ["--steps", "60"]
    first = out / "runs" / "gqa" / "seed-0"
    running = start(data, out, *steps)
    wait_for(lambda: bool(read_metrics(first, "step")), running)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "stopping with a checkpoint; asked again, at once" in said
    assert "the same command goes on from there" in said
    (checkpoint,) = (first / "checkpoints").glob("step-*[0-9]")
    assert 0 < int(checkpoint.name[5:]) < 60
    assert not (out / "runs" / "gqa" / "seed-1").exists()
    again = start(data, out, *steps)
    said = again.communicate(timeout=120)
    assert again.returncode == 0, said[1]
    finish(command(data, tmp_path / "whole", "--steps", "60", variant="gqa"))
    assert losses(first) == losses(tmp_path / "whole")


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_killed_without_a_word_its_training_stops_too(tmp_path, data, ranks):
    running = start(data, tmp_path, "--steps", "100000", "--ranks", ranks)
    first = tmp_path / "runs" / "gqa" / "seed-0"
    wait_for(lambda: bool(read_metrics(first, "step")), running)
    running.kill()
    running.communicate()
    wait_for(lambda: any((first / "checkpoints").glob("step-*[0-9]")))
    assert not is_done(first)


def test_compilation_is_paid_once_for_all_seeds_of_a_row(tmp_path, data, monkeypatch):
    """The second seed captures no new graph: it runs what was compiled for the first."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()  # whatever a test before this one compiled in this process
    counters.clear()
    seen = []
    monkeypatch.setattr(child, "stop_with", lambda parent: None)
    monkeypatch.setattr(child, "discard_weights", lambda *_: seen.append(counters["stats"]["unique_graphs"]))
    job = {
        "preset": "demo", "name": "gva", "variant": "gva-drope-16", "seeds": [0, 1, 2], "device": "cpu", "parent": 0,
        "data": str(data), "folder": str(tmp_path), "weights": "all", "overrides": {**FIELDS, "compile": True},
    }  # fmt: skip
    assert child.main(job) == 0
    assert len(seen) == 3
    assert seen[0] > 0
    assert seen == [seen[0]] * 3


def test_a_run_over_two_ranks(tmp_path, data):
    """Two processes that exchange gradients, as one with twice the micro-batch: the losses say so."""
    study = matrix("gqa", seeds=1)
    outcome = Runner(study, data, tmp_path, device="cpu", ranks=2).execute(study.runs())
    assert outcome.finished == ["gqa:0"], outcome.failed
    finish(command(data, tmp_path / "alone", "--steps", "8", variant="gqa"))
    spread = losses(run_folder(tmp_path, study.rows[0].name, 0))
    assert spread == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    assert spread != losses(tmp_path / "alone"), "summed in another order: it was not one process alone"


def test_modules_of_the_folder_that_one_stands_in_are_not_run(tmp_path, data, monkeypatch):
    (tmp_path / "gva.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    assert Runner(matrix("gqa"), data, tmp_path)._run_module(tmp_path, ["gva.study.child", "no job"]) == 1
    assert not (tmp_path / "ran").exists()


def test_the_simple_matrix_builds_for_the_data(data, tmp_path):
    study = simple_matrix("demo", ["gqa"], 1)
    assert Runner(study, data, tmp_path).vocab_size == 512


def test_what_a_kill_kept_from_being_discarded_goes_with_the_next_command(tmp_path, data, monkeypatch):
    """And what an earlier command was told to keep stays."""
    study = matrix("gqa", seeds=1)
    run, how = run_folder(tmp_path, "gqa", 0), {"device": "cpu", "progress": False}
    Runner(study, data, tmp_path, weights="all", **how).execute(study.runs())
    Runner(study, data, tmp_path, **how).execute(study.runs())
    assert (run / "checkpoints").is_dir()
    (run / KEEPS).touch()
    assert Runner(study, data, tmp_path, **how).execute(study.runs()).finished == ["gqa:0"]
    assert not (run / "checkpoints").exists()
    assert not (run / KEEPS).exists()
    assert (run / "model").is_dir()
