"""Task accuracies during a run: the same as afterwards and on any number of ranks, and training does not notice."""

from pathlib import Path

import pytest
import torch

from gva.cli import main
from gva.data.documents import DataError
from gva.data.shards import TokenDataset
from gva.evaluate import scoring
from gva.evaluate.loading import open_tokenizer
from gva.evaluate.tasks import chosen_tasks
from gva.run.metrics import read_metrics
from gva.run.ranks import process_group
from gva.train import loop
from gva.train.measure import load_tasks, score_tasks
from gva.train.recipe import build, read_overrides
from task_rows import write_files
from train.runs import SIZE, command, finish

FIELDS = {"acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "chance", "items"}


def losses(out):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in read_metrics(out, "step")]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = write_files(tmp_path_factory.mktemp("files"))
    return ["tasks_every=6", f"tasks_data={folder}", "tasks=hellaswag,winogrande,arc_easy"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, data):
    """A run that scores no task."""
    out = tmp_path_factory.mktemp("plain")
    finish(command(data, out, "--steps", "15"))
    assert not read_metrics(out, "tasks")
    return out


@pytest.fixture(scope="module")
def scored(tmp_path_factory, data, words):
    out = tmp_path_factory.mktemp("scored")
    finish(command(data, out, "--steps", "15", "checkpoint_every=6", *words))
    return out


def test_accuracies_at_intervals_and_at_the_end(scored, plain):
    lines = read_metrics(scored, "tasks")
    assert [(line["step"], line["tokens"]) for line in lines] == [(n, n * 8 * 48) for n in (6, 12, 15)]
    assert all(set(line["results"]) == {"hellaswag", "winogrande", "arc_easy"} for line in lines)
    assert all(set(result) == FIELDS for line in lines for result in line["results"].values())
    assert losses(scored) == losses(plain), "training did not notice"


def test_they_are_those_of_the_checkpoints_afterwards(scored, data, words, tmp_path):
    folder = words[1].removeprefix("tasks_data=")
    during = {line["step"]: line for line in read_metrics(scored, "tasks")}
    for step, path in ((12, scored / "checkpoints" / "step-00000012"), (15, scored)):
        arguments = ["--data-dir", folder, "--tasks", words[2].removeprefix("tasks="), "--record", "--device", "cpu"]
        assert main(["eval", str(path), *arguments]) == 0
        (line,) = (line for line in read_metrics(scored, "tasks") if line["step"] == step)
        assert line == during[step]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_share_the_items(tmp_path, data, words, scored, parallel):
    finish(command(data, tmp_path, "--steps", "15", *words, f"parallel={parallel}"), ranks=2)
    one, two = (read_metrics(out, "tasks") for out in (scored, tmp_path))
    assert [line["results"] for line in two] == [line["results"] for line in one]


def test_a_run_goes_on_with_tasks_switched_on(tmp_path, data, words, plain):
    """What is scored may change on resume, and resuming stays exact."""
    run = ["--steps", "15", "checkpoint_every=5"]
    finish(command(data, tmp_path, *run, *words[:2], "tasks_limit=2", "tasks=arc_easy"))
    first = read_metrics(tmp_path, "tasks")
    assert [line["results"]["arc_easy"]["items"] for line in first] == [2, 2, 2]
    # As if killed after step 10: its last checkpoint, and what was logged after it, are gone.
    for path in (tmp_path / "checkpoints").glob("step-00000015"):
        path.rename(tmp_path / "gone")
    lines = [line for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if '"done"' not in line]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    finish(command(data, tmp_path, *run, *words, "tasks_every=7"))
    assert losses(tmp_path) == losses(plain)
    assert [(x["step"], len(x["results"])) for x in read_metrics(tmp_path, "tasks")] == [(6, 1), (14, 3), (15, 3)]


def settings(data, *words):
    return build("demo", "gva-drope-16", read_overrides(None, [*SIZE, *words]), TokenDataset(data).vocab_size)


def test_a_choice_is_as_likely_as_outside_of_training(data, words, monkeypatch):
    """Not only as often the likeliest: the mask of a pack reaches the model through the loss around it."""
    config, recipe = settings(data, *words, "micro_batch=1")
    monkeypatch.setattr("gva.train.measure.summarise", lambda task, items, found: found)
    folder, tokenizer = Path(recipe.tasks_data), data / "tokenizer"
    with process_group("cpu") as ranks:
        run = loop._build(config, recipe, TokenDataset(data), ranks)
        packed = load_tasks(recipe, tokenizer, config.max_position_embeddings)
        before = torch.get_rng_state()
        during = score_tasks(run.loss, packed, recipe, ranks)
        assert torch.equal(torch.get_rng_state(), before)
        assert not run.model.model._forward_pre_hooks
    outside = scoring.evaluate(run.model, open_tokenizer(tokenizer), chosen_tasks(recipe.tasks), folder, progress=False)
    for name, found in during.items():
        for ours, theirs in zip(found, outside[name].loglikelihoods, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4), name


def test_what_is_wrong_with_tasks_is_told_before_training(tmp_path, data):
    with pytest.raises(ValueError, match="tasks_data='': tasks_every needs their folder"):
        settings(data, "tasks_every=5")
    config, recipe = settings(data, "tasks_every=5", f"tasks_data={tmp_path}")
    with pytest.raises(DataError, match="no file for hellaswag"):
        loop.train(config, recipe, data, tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()
