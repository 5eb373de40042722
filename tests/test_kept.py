"""What an earlier version left on disk still reads, scores and resumes; kept/README.md says how it was made."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gva import GvaConfig
from gva.cli import main
from gva.data.shards import TokenDataset
from gva.data.tokenizer import load_tokenizer
from gva.run.metrics import is_done, read_metrics
from gva.train import loop
from gva.train.recipe import Recipe

KEPT = Path(__file__).parent / "kept"
DATA, RUN = KEPT / "data", KEPT / "run"
RECORD = json.loads((RUN / "run.json").read_text())


def test_the_data_is_whole_and_reads():
    assert main(["data", "verify", str(DATA)]) == 0
    splits = {name: TokenDataset(DATA, name) for name in ("train", "valid")}
    assert {name: split.fingerprint for name, split in splits.items()} == RECORD["identity"]["data"]
    train = splits["train"]
    text = load_tokenizer(DATA / "tokenizer").tokenizer.decode(train.read(0, int(train.document_ends[2])).tolist())
    assert text == "2 times 2 is 4.\n2 times 4 is 8.\n2 times 6 is 12.\n"


@pytest.mark.parametrize(("path", "step"), [(".", 8), ("model", 8), ("checkpoints/step-00000004", 4)])
def test_the_run_its_model_and_its_checkpoint_have_the_loss_they_had(path, step, tmp_path):
    words = ["--tasks", "none", "--data", str(DATA), "--sequences", "4", "--device", "cpu"]
    assert main(["eval", str(RUN / path), *words, "--out", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    told = next(line for line in read_metrics(RUN, "eval") if line["step"] == step)
    assert (report["step"], report["tokens"]) == (step, step * 4 * 32)
    assert report["validation"]["valid_loss"] == pytest.approx(told["valid_loss"], rel=1e-6)


def test_the_run_goes_on_from_its_checkpoint_to_the_end_it_had(tmp_path):
    run = shutil.copytree(RUN, tmp_path / "run")
    shutil.rmtree(run / "model")
    config, recipe = GvaConfig.from_dict(RECORD["identity"]["model"]), Recipe(**RECORD["recipe"])
    loop.train(config, recipe, DATA, run, device="cpu", progress=False)
    assert is_done(run)
    now, before = read_metrics(run, "step"), read_metrics(RUN, "step")
    assert now[:4] == before[:4], "what was trained before the checkpoint is not trained again"
    assert [line["loss"] for line in now] == pytest.approx([line["loss"] for line in before], rel=1e-5)
    evaluated = [[line["valid_loss"] for line in read_metrics(folder, "eval")] for folder in (run, RUN)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (run, RUN))
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-3, atol=1e-4, msg=name)
