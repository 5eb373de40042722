"""A model folder from elsewhere: none of its Python runs, whoever says yes, and nothing of it leads away."""

import json
import os
import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gva.cli import main
from gva.paged.generator import PagedGenerator
from gva.weights import INDEX
from hostile import CODE, change, yes  # noqa: F401
from models import tiny_model


@pytest.fixture
def folder(tmp_path, text):
    tiny_model("gva-drope-16", torch.float32, vocab_size=2048).save_pretrained(tmp_path / "model")
    shutil.copytree(text / "tokenizer", tmp_path / "model", dirs_exist_ok=True)
    (tmp_path / "model" / "code.py").write_text(CODE.format(made=str(tmp_path / "made")))
    return tmp_path / "model"


def refused(*words, capsys):
    assert main([*map(str, words), "--device", "cpu"]) == 2
    return capsys.readouterr().err


def test_python_of_a_model_or_a_tokenizer_is_not_run(folder, files, tmp_path, capsys):
    whole = shutil.copytree(folder, tmp_path / "whole")
    change(folder / "config.json", model_type="theirs", auto_map={
        "AutoConfig": "code.Theirs", "AutoModelForCausalLM": "code.Model",
    })  # fmt: skip
    asked = ["eval", folder, "--data-dir", files, "--tasks", "arc_easy"]
    assert "contains custom code" in refused(*asked, capsys=capsys)
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text("{}")
    change(folder / "tokenizer_config.json", tokenizer_class="Tokenizer", auto_map={
        "AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"],
    })  # fmt: skip
    told = refused("eval", whole, "--data-dir", files, "--tasks", "arc_easy", "--tokenizer", folder, capsys=capsys)
    assert "contains custom code" in told
    assert not (tmp_path / "made").exists()


def test_no_kernel_is_fetched_that_a_config_names(folder, text, tmp_path):
    """Neither ours nor another family's."""
    llama = tmp_path / "llama"
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=2048, **size)).save_pretrained(llama)
    for model in (folder, llama):
        for name in ("_attn_implementation", "attn_implementation"):
            change(model / "config.json", **{name: "kernels-community/theirs"})
        words = ["--tasks", "none", "--data", str(text), "--sequences", "2", "--length", "16", "--device", "cpu"]
        assert main(["eval", str(model), *words]) == 0
    assert main(["generate", str(folder), "--prompt", "a", "--max-new-tokens", "2", "--device", "cpu"]) == 0


@pytest.mark.parametrize(("change_to", "told"), [
    ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight is missing"),
    ({"num_hidden_layers": 1}, "has no place in such a model"),
    ({"layers": {"0": {"attention": "mla"}}}, "model.layers.0.self_attn.latent_proj.weight is missing"),
    ({"hidden_size": 10**7}, "model.embed_tokens.weight has the shape (2048, 64), not (2048, 10000000)"),
    ({"dtype": "object"}, "cannot be loaded (AttributeError: module 'torch' has no attribute 'object')"),
])  # fmt: skip
def test_weights_that_are_not_those_of_the_config_are_refused(change_to, told, folder, text, tmp_path, capsys):
    """Before room is made for what it says; transformers would draw what is missing anew."""
    change(folder / "config.json", **change_to)
    small = ["--steps", "2", "length=16", "global_batch=2", "micro_batch=2"]
    commands = [["eval", folder, "--tasks", "none", "--data", text], ["generate", folder, "--prompt", "a"]]
    if "dtype" not in change_to:  # which training says itself
        commands.append(["train", "--from", folder, "--data", text, "--out", tmp_path / "run", *small])
    for words in commands:
        assert f"{folder}: " in (said := refused(*words, capsys=capsys))
        assert told in said


def test_a_run_whose_record_is_not_of_its_checkpoint_is_refused(trained, text, tmp_path, capsys):
    run = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(run / "model")
    record = json.loads((run / "run.json").read_text())
    record["identity"]["model"]["hidden_size"] = 10**6
    (run / "run.json").write_text(json.dumps(record))
    told = refused("eval", run, "--tasks", "none", "--data", text, capsys=capsys)
    assert "step-00000040: its weights are not those of " in told
    assert "embed_tokens.weight has the shape (2048, 32), not (2048, 1000000)" in told


def test_a_tokenizer_that_is_none_is_told_in_one_line(folder, capsys):
    (folder / "tokenizer.json").write_text("{}")
    assert "cannot be loaded (KeyError: 'added_tokens'); copy it again" in refused(
        "generate", folder, "--prompt", "a", capsys=capsys
    )


def test_no_pickle_is_read_as_weights(folder, text, capsys):
    weights = tiny_model("gva-drope-16", torch.float32, vocab_size=2048).state_dict()
    for name in ("model.safetensors", "model.sums.json"):
        (folder / name).unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    for words in (["eval", folder, "--tasks", "none", "--data", text], ["generate", folder, "--prompt", "a"]):
        assert "no file named model.safetensors" in refused(*words, capsys=capsys)


def test_a_shard_outside_of_any_kind_of_model_is_not_read(text, tmp_path, capsys):
    folder = tmp_path / "llama"
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=2048, **size)).save_pretrained(folder, max_shard_size="100KB")
    index = json.loads((folder / INDEX).read_text())
    name = index["weight_map"]["model.norm.weight"]
    os.rename(folder / name, tmp_path / "x.safetensors")
    moved = {key: "../x.safetensors" if value == name else value for key, value in index["weight_map"].items()}
    change(folder / INDEX, weight_map=moved)
    told = refused("eval", folder, "--tasks", "none", "--data", text, capsys=capsys)
    assert "'../x.safetensors' is not the name of a file" in told


def test_what_a_model_says_does_not_command_the_terminal(folder, capsys, monkeypatch):
    monkeypatch.setattr(PagedGenerator, "generate", lambda *_: ["\x1b[2J"])
    words = ["generate", str(folder), "--prompt", "a", "--max-new-tokens", "2", "--device", "cpu"]
    assert main(words) == 0
    assert capsys.readouterr().out == "a\x1b[2J\n", "a file gets what was said"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(words) == 0
    assert capsys.readouterr().out == "a\\x1b[2J\n"


def test_an_error_does_not_either(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "\x1b[2J"}))
    assert main(["serve", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "\x1b" not in told
    assert main(["report", str(tmp_path / "\x1b[2J")]) == 2
    assert "\x1b" not in capsys.readouterr().err
