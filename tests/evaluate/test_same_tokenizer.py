"""Tokens meet a model, and text meets tokens, by one tokenizer; another of the same size is noticed everywhere."""

import json
import shutil

import pytest
from tokenizers import Tokenizer

from gva.cli import main
from gva.data.documents import DataError
from gva.data.shards import TokenDataset, sum_of_index
from gva.evaluate.loading import open_tokenizer
from gva.train import loop
from gva.train.recipe import build

SIZE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "value_head_dim": 32,
    "length": 32, "global_batch": 2, "micro_batch": 2, "eval_sequences": 2, "checkpoint_every": 2, "steps": 4,
}  # fmt: skip


def swap(folder):
    """Two tokens for one another: as large, as valid, and every text means something else."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))


@pytest.fixture
def swapped(text, tmp_path):
    """The prepared folder with another tokenizer, and one that was honestly prepared with that."""
    folder = shutil.copytree(text, tmp_path / "swapped")
    swap(folder / "tokenizer")
    return folder


def train(data, out, **fields):
    config, recipe = build("demo", "gqa", {**SIZE, **fields}, TokenDataset(data).vocab_size)
    loop.train(config, recipe, data, out, device="cpu", progress=False)


def refused(*words, capsys):
    assert main([*map(str, words), "--device", "cpu"]) == 2
    return capsys.readouterr().err


def owned(folder):
    """The index says that its tokens were made with the tokenizer that lies there."""
    from gva.data.tokenizer import load_tokenizer

    index = json.loads((folder / "index.json").read_text())
    index["tokenizer"] = load_tokenizer(folder / "tokenizer").fingerprint
    (folder / "index.json").write_text(json.dumps({**index, "sha256": sum_of_index(index)}))


def test_training_refuses_tokens_of_another_tokenizer_before_anything_is_written(swapped, tmp_path):
    with pytest.raises(DataError, match="not the tokenizer that the tokens beside it were made with"):
        train(swapped, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_keeps_its_tokenizer(text, swapped, trained, tmp_path):
    train(text, tmp_path / "run")
    owned(swapped)
    with pytest.raises(ValueError, match=r"run: holds a run with another tokenizer .* trained on, or another --out"):
        train(swapped, tmp_path / "run")


def test_a_model_is_not_exported_with_another(text, tmp_path, monkeypatch):
    data, real = shutil.copytree(text, tmp_path / "data"), loop.export_model

    def later(*given):
        swap(data / "tokenizer")
        real(*given)

    monkeypatch.setattr(loop, "export_model", later)
    with pytest.raises(DataError, match="not the tokenizer that the tokens beside it were made with"):
        train(data, tmp_path / "run")
    assert not (tmp_path / "run" / "model").exists()


def test_a_model_is_not_scored_with_another(text, swapped, trained, files, tmp_path, capsys):
    """Neither on tasks, where it is given or lies in the model's place, nor on tokens; nor does it generate."""
    tasks, run = ["--data-dir", files, "--tasks", "arc_easy"], shutil.copytree(trained, tmp_path / "run")
    told = refused("eval", run, *tasks, "--tokenizer", swapped / "tokenizer", capsys=capsys)
    assert "another tokenizer than that of" in told
    assert "say with --tokenizer" in told
    loss = ["--tasks", "none", "--sequences", 2, "--data"]
    assert "not the tokenizer that the tokens" in refused("eval", run, *loss, swapped, capsys=capsys)
    owned(swapped)
    for model in (run, run / "model", shutil.copytree(run / "model", tmp_path / "model")):
        assert "another tokenizer than that of" in refused("eval", model, *loss, swapped, capsys=capsys)
    swap(run / "model")
    for words in (["eval", run, *tasks], ["generate", run, "--prompt", "a"]):
        assert "another tokenizer than that of" in refused(*words, capsys=capsys)


def test_one_that_cuts_alike_and_adds_tokens_is_no_other(text, trained, tmp_path, capsys):
    """As a model tuned and saved by others brings it along."""
    model = shutil.copytree(trained / "model", tmp_path / "model")
    tokenizer = open_tokenizer(model)
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    tokenizer.save_pretrained(model)
    assert Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id("<|pad|>") is not None
    words = ["--tasks", "none", "--data", text, "--sequences", 2, "--length", 16, "--device", "cpu"]
    assert main(["eval", *map(str, [model, *words])]) == 0
