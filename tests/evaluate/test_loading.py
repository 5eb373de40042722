"""`gva eval` on every kind of checkpoint, and what it says where something is missing."""

import json
import shutil

import pytest
import torch

from gva import GvaConfig, GvaForCausalLM
from gva.cli import main
from gva.data.recall import write_recall
from gva.evaluate import loading
from gva.evaluate.results import table
from gva.run.metrics import read_metrics


def evaluate(*words, out=None):
    code = main(["eval", *map(str, words), "--device", "cpu", *(["--out", str(out)] if out else [])])
    return code, json.loads(out.read_text()) if code == 0 and out else None


def test_a_run_its_model_and_its_last_checkpoint_score_alike(trained, text, files, tmp_path, capsys):
    """And the validation loss is the one that the run reported of itself."""
    reports = []
    last = trained / "checkpoints" / "step-00000040"
    for number, path in enumerate((trained, trained / "model", last)):
        words = ("--data-dir", files, "--data", text, "--sequences", 8)
        code, report = evaluate(path, *words, out=tmp_path / f"{number}.json")
        assert code == 0
        reports.append(report)
    assert all((report["step"], report["tokens"]) == (40, 40 * 16 * 64) for report in reports)
    assert reports[0]["results"] == reports[1]["results"] == reports[2]["results"]
    told = read_metrics(trained, "eval")[-1]
    for report in reports:
        assert report["validation"]["valid_loss"] == pytest.approx(told["valid_loss"], rel=1e-6)
        assert report["validation"]["bits_per_byte"] == pytest.approx(told["bits_per_byte"], rel=1e-6)
        assert report["validation"]["valid_tokens"] == told["valid_tokens"]
        assert set(report["results"]) == {"hellaswag", "winogrande", "openbookqa", "arc_easy", "arc_challenge"}
        assert report["average"]["chance"] > 0.25
    shown = capsys.readouterr().out
    assert "average" in shown
    assert "bits per byte" in shown


@pytest.mark.parametrize("words", [
    ["eval", "MODEL", "--tasks", "none", "--data", "DATA"], ["generate", "MODEL", "--prompt", "a"], ["serve", "MODEL"],
    ["train", "--from", "MODEL", "--data", "DATA", "--out", "OUT", "--device", "cpu", "length=64"],
    ["convert", "MODEL", "--to", "gqa", "--cache", "64", "--calibrate", "TEXT", "--out", "OUT", "--length", "64"],
], ids=lambda words: words[0])  # fmt: skip
def test_each_command_that_loads_weights_refuses_a_flipped_bit(words, trained, text, tmp_path, capsys):
    model = shutil.copytree(trained / "model", tmp_path / "model")
    if words[0] == "convert":
        GvaForCausalLM(GvaConfig.preset("demo", variant="gqa", vocab_size=2048)).save_pretrained(model)
        (tmp_path / "a.txt").write_text("\n\n".join(f"{i} and a few more words " * 99 for i in range(900)))
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-9] ^= 1
    weights.write_bytes(content)
    places = {"MODEL": model, "DATA": text, "OUT": tmp_path / "out", "TEXT": tmp_path / "a.txt"}
    assert main([str(places.get(word, word)) for word in words]) == 2
    assert "model: model.safetensors is not what was written; copy the checkpoint again" in capsys.readouterr().err


def test_earlier_checkpoints_can_be_scored_after_the_fact(trained, text, files, tmp_path):
    early = trained / "checkpoints" / "step-00000020"
    code, report = evaluate(early, "--tasks", "none", "--data", text, "--sequences", 8, out=tmp_path / "a.json")
    assert code == 0
    told = next(line for line in read_metrics(trained, "eval") if line["step"] == 20)
    assert report["validation"]["valid_loss"] == pytest.approx(told["valid_loss"], rel=1e-6)
    torn = shutil.copytree(trained, tmp_path / "torn")
    shutil.rmtree(torn / "model")
    words = ("--data-dir", files, "--tasks", "winogrande", "--tokenizer", text / "tokenizer" / "tokenizer.json")
    code, report = evaluate(torn, *words, out=tmp_path / "b.json")
    assert (code, report["step"]) == (0, 40), "a run without its model is scored at its newest checkpoint"


def test_accuracies_are_recorded_in_the_run(trained, text, files, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    before = read_metrics(run)
    words = ("--data-dir", files, "--tasks", "arc_easy,winogrande", "--record")
    assert "No task has been run" in (run / "model" / "README.md").read_text()
    assert evaluate(run, *words)[0] == 0
    assert evaluate(run / "checkpoints" / "step-00000020", *words)[0] == 0
    assert evaluate(run / "checkpoints" / "step-00000020", *words)[0] == 0  # again: in place of the line before
    lines = read_metrics(run)
    assert [line for line in lines if line["kind"] != "tasks"] == before
    tasks = [line for line in lines if line["kind"] == "tasks"]
    assert [(line["step"], line["tokens"]) for line in tasks] == [(40, 40 * 1024), (20, 20 * 1024)]
    card = (run / "model" / "README.md").read_text()
    assert table(tasks[0]["results"]) in card, "the card has the accuracies of the model beside it"
    assert "No task has been run" not in card
    assert set(tasks[0]) == {"kind", "step", "tokens", "results"}
    assert set(tasks[0]["results"]["winogrande"]) == {
        "acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "chance", "items",
    }  # fmt: skip
    assert tasks[0]["results"]["winogrande"]["acc_norm"] is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{tmp}/nowhere", "--data-dir", "{files}"], "nowhere: no such checkpoint"),
        (["{tmp}", "--data-dir", "{files}"], "not a checkpoint; give a model folder (with config.json), a run"),
        (["{run}", "--data-dir", "{tmp}"], "no file for hellaswag; expected hellaswag_val.jsonl"),
        (["{run}", "--tasks", "arc"], "must be one of"),
        (["{run}", "--tasks", "none"], "leaves nothing to do without --data"),
        (["{run}", "--data-dir", "{files}", "--limit", "-1"], "--limit=-1: must be a number of items"),
        (["{run}", "--engine", "lm-eval", "--limit", "-1"], "--limit=-1: must be a number of items"),
        (["{run}", "--data-dir", "{wrong}"], "arc_easy.jsonl: line 2: not an item of arc_easy"),
        (["{run}", "--data-dir", "{files}", "--batch-tokens", "0"], "--batch-tokens=0: must be positive"),
        (["{run}", "--tasks", "none", "--data", "{files}"], "make the dataset with: gva data prepare"),
        (["{run}", "--tasks", "none", "--data", "{text}", "--length", "999"], "max_position_embeddings=128"),
        (["{run}", "--tasks", "none", "--data", "{text}", "--sequences", "-2"], "sequences=-2: must not be negative"),
        (["{bare}", "--tasks", "none", "--data", "{recall}"], "is associative recall, which a run measures"),
        (["{run}", "--tasks", "none", "--data", "{text}", "--out", "{tmp}"], "is a folder; give the name of a file"),
        (["{run}", "--tasks", "none", "--data", "{text}", "--out", "{run}/run.json/a.json"], "run.json"),
        (["{bare}", "--data-dir", "{files}"], "say with --tokenizer which the model was trained with"),
        (["{bare}", "--data-dir", "{files}", "--tokenizer", "{big}"], "not the one that the model was trained with"),
        (["{bare}", "--tasks", "none", "--data", "{text}", "--record"], "--record: needs a run's checkpoint"),
    ],
    ids=str,
)
def test_what_is_missing_is_said_before_a_weight_is_read(
    words, told, trained, text, files, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(loading, "load_model", lambda *ignored: pytest.fail("the model is loaded"))
    write_recall(tmp_path / "recall", keys=64, values=40, pairs=8)
    wrong = shutil.copytree(files, tmp_path / "wrong")
    (wrong / "arc_easy.jsonl").write_text((files / "arc_easy.jsonl").read_text().splitlines()[0] + "\n{}\n")
    bare, big = (
        shutil.copytree(trained / "model", tmp_path / "bare"),
        shutil.copytree(text / "tokenizer", tmp_path / "big"),
    )
    (bare / "tokenizer.json").unlink()
    tokens = json.loads((big / "tokenizer.json").read_text())
    tokens["added_tokens"] += [{**tokens["added_tokens"][0], "id": 2048 + i, "content": f"<{i}>"} for i in range(20)]
    (big / "tokenizer.json").write_text(json.dumps(tokens))
    places = {"tmp": tmp_path, "files": files, "run": trained, "text": text, "bare": bare, "big": big}
    places |= {"recall": tmp_path / "recall", "wrong": wrong}
    assert evaluate(*[word.format(**places) for word in words])[0] == 2
    assert told in capsys.readouterr().err


def test_a_model_that_gives_no_numbers_gets_no_accuracies(trained, text, files, tmp_path, capsys):
    """The first choice of each item would be its likeliest: on ARC-Easy that is 28.50 +- 2.26 percent."""
    model = GvaForCausalLM.from_pretrained(trained / "model")
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    broken = shutil.copytree(trained / "model", tmp_path / "broken")
    model.save_pretrained(broken)
    told = "nan instead of a number; the model's weights are damaged, or its training diverged"
    for engine in ("own", "lm-eval"):
        words = ("--data-dir", files, "--tasks", "arc_easy", "--engine", engine)
        assert evaluate(broken, *words, out=tmp_path / "a.json")[0] == 2
        assert f"arc_easy: a loglikelihood is {told}" in capsys.readouterr().err
    assert evaluate(broken, "--tasks", "none", "--data", text, out=tmp_path / "a.json")[0] == 2
    assert f"the validation loss is {told}" in capsys.readouterr().err
    assert not (tmp_path / "a.json").exists()
    assert main(["generate", str(broken), "--prompt", "a", "--device", "cpu"]) == 2
    assert "broken: weights that are not numbers; train again" in capsys.readouterr().err


def test_a_checkpoint_away_from_its_run_is_told(trained, tmp_path, capsys):
    moved = shutil.copytree(trained / "checkpoints" / "step-00000020", tmp_path / "elsewhere" / "step-00000020")
    assert evaluate(moved)[0] == 2
    assert "the model of a training checkpoint is unknown" in capsys.readouterr().err
