"""The command line: tables and JSON, and errors that name what was meant."""

import errno
import json
import os
import re
import subprocess
import sys

import pytest
import torch

import gva
from gva import VARIANTS, check
from gva.cli import bench, main, train
from models import tiny_model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def rows(capsys, *arguments):
    assert main(["cost", *arguments, "--json"]) == 0
    return {row["variant"]: row for row in json.loads(capsys.readouterr().out)}


def test_json_of_a_preset(capsys):
    table = rows(capsys, "--preset", "paper-350m", "--context", "32768", "--memory", "80GiB")
    assert list(table) == list(VARIANTS)
    gva, gqa = table["gva-drope-16"], table["gqa"]
    assert gva["cache_scalars_per_token_per_layer"] == 272
    assert gva["cache_bytes_per_token"] == 24 * 2 * 272
    assert gva["parameters"] == sum(v for k, v in gva["parameters_by_part"].items() if k != "total")
    assert gva["largest_batch"] / gqa["largest_batch"] > 1.85
    assert gva["decode_bytes"] < gqa["decode_bytes"]


def test_table_of_a_foreign_checkpoint(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for path in (tmp_path, tmp_path / "config.json"):
        table = rows(capsys, str(path))
        assert table["gqa"]["parameters"] == 8_030_261_248  # Llama 3.1 8B
        assert table["gqa"]["cache_bytes_per_token"] == 32 * 2 * 2 * 8 * 128
        assert table["gva-drope-16"]["cache_scalars_per_token_per_layer"] == 8 * 128 + 16
    assert main(["cost", str(tmp_path), "--variants", "gqa,gva-drope-16", "--cache-dtype", "fp8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("variant")


def test_table_of_our_own_checkpoint(capsys, tmp_path):
    tiny_model("mla").save_pretrained(tmp_path / "model")
    (tmp_path / "run.json").write_text("{}")
    for place in (tmp_path / "model", tmp_path):  # the folder of the model, and of the run that left it
        assert rows(capsys, str(place))["mla"]["cache_scalars_per_token_per_layer"] == 80


def test_the_cache_on_each_rank(capsys):
    """Groups are split, one key or latent for all heads is not; past G groups are repeated."""
    words = ["--preset", "paper-350m", "--variants", "gqa,mqa,mla,gva-drope-16,shared-kv", "--ranks", "1,4,8,3"]
    table = rows(capsys, *words)
    held = {variant: row["on_each_rank"] for variant, row in table.items()}
    scalars = {v: {n: r["cache_scalars_per_token_per_layer"] for n, r in on.items()} for v, on in held.items()}
    assert {v: n["4"] for v, n in scalars.items()} == {
        "gqa": 128, "mqa": 128, "mla": 272, "gva-drope-16": 80, "shared-kv": 64
    }  # fmt: skip
    for variant, row in table.items():
        assert scalars[variant]["1"] == row["cache_scalars_per_token_per_layer"]
        assert scalars[variant]["8"] == scalars[variant]["4"]
        assert held[variant]["4"]["cache_bytes_per_token"] == 24 * 2 * scalars[variant]["4"]
    assert {v for v, on in held.items() if on["4"]["refused"]} == {"shared-kv"}
    assert "cannot be served" in held["shared-kv"]["1"]["refused"]
    assert "tensor_parallel_size=3: must divide num_attention_heads=16" in held["gqa"]["3"]["refused"]
    assert main(["cost", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("each of 1  each of 4  each of 8  each of 3")
    assert lines[1].split()[-4:] == ["512", "128", "128", "256*"]
    assert any(line.startswith("* gqa on 3, mqa on 3, mla on 3, gva-drope-16 on 3: tensor") for line in lines)


def test_fields_of_a_preset_can_be_changed(capsys):
    assert (
        rows(capsys, "--preset", "small", "--set", "num_value_groups=4")["gqa"]["cache_scalars_per_token_per_layer"]
        == 512
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cost"], "give either a checkpoint or --preset"),
        (
            ["cost", "--preset", "smal"],
            "preset='smal': must be one of ['demo', 'small', 'paper-350m', 'llama-8b']; did you mean 'small'?",
        ),
        (["cost", "--preset", "small", "--variants", "gqaa"], "--variants='gqaa'"),
        (["cost", "--preset", "small", "--set", "rope_theata=4"], "no field 'rope_theata'; did you mean 'rope_theta'?"),
        (["cost", "--preset", "small", "--set", "rope_theta"], "must be FIELD=VALUE"),
        (["cost", "--preset", "small", "--memory", "80GiB"], "needs --context"),
        (["cost", "--preset", "small", "--context", "-1"], "context=-1: must be positive"),
        (["cost", "--preset", "small", "--batch", "0"], "batch=0: must be positive"),
        (["cost", "--preset", "small", "--set", "rope_dim=8"], "'rope_dim': is what a variant sets"),
        (["cost", "--preset", "small", "--set", 'rope_parameters={"rope_type":"linear"}'], "rope_parameters="),
        (["cost", "--preset", "small", "--ranks", "0"], "ranks=0: must be positive"),
        (["cost", "/nowhere"], "/nowhere: no such file"),
    ],
)
def test_bad_arguments_are_named(capsys, arguments, message):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cost", "--prset", "small"], "unknown argument --prset; did you mean '--preset'?"),
        (["cost", "--preset", "small", "--memory", "80 gigs"], "size '80 gigs': must be a number"),
        (["cost", "--preset", "small", "--ranks", "1,x"], "'1,x': must be numbers of GPUs, as 1,2,4,8"),
        (["cots"], "'cots' is none of cost, "),
        (["cots"], "did you mean 'cost'?"),
        (["cost", "--preset", "small", "--dtype", "bfloat61"], "did you mean 'bfloat16'?"),
    ],
)
def test_misspelt_options_are_named(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "mamba"}'])
def test_a_config_that_is_none_is_refused(capsys, tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    assert main(["cost", str(tmp_path)]) == 2
    assert "gva cost:" in capsys.readouterr().err


def test_the_self_check_checks_what_it_shows(capsys, monkeypatch):
    assert main(["check"]) == 0
    shown = capsys.readouterr().out
    for variant in VARIANTS:
        assert shown.count(f"{variant} ") >= 2
    monkeypatch.setattr(check, "TOLERANCE", 0.0)
    assert main(["check"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_the_version_and_the_help_of_every_field(capsys):
    for words, told in ((["--version"], f"gva {gva.__version__}\n"), (["train", "--help"], "\n  weight_decay=0.1 ")):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 0
        assert told in capsys.readouterr().out


def test_a_gpu_that_is_not_there_is_told_first(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in (["train", "--preset", "demo", "--out"], ["compare", "--preset", "demo", "--out"], ["eval"]):
        assert main([*command, str(tmp_path / "new"), "--device", "cuda"]) == 2
        assert "--device='cuda': torch sees no NVIDIA GPU here; leave it out" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "words", [["lr=-1"], ["--seed", "-1"], ["eps=nan"], ["--steps", "0"], ["length=999"]], ids=" ".join
)
@pytest.mark.parametrize("command", ["train", "compare"])
def test_what_cannot_be_trained_leaves_nothing_behind(capsys, tmp_path, command, words):
    """So that the corrected command is not refused for another identity."""
    if command == "compare" and words[0] == "--seed":
        words = ["--seeds", "-1"]
    assert main([command, "--preset", "demo", "--out", str(tmp_path / "new"), *words]) == 2
    assert re.search("must |exceeds max_position_embeddings=256", capsys.readouterr().err)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--vocab-size", "-3"], "vocab_size=-3: must be at least 257"),
        (["--vocab-size", "0"], "vocab_size=0: must be at least 257"),
        (["--workers", "0"], "--workers=0: must be positive"),
        (["--max-documents", "-1"], "--max-documents=-1: must be positive"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
@pytest.mark.parametrize("texts", [["corpus.txt"], []], ids=["a text", "the standard library"])
def test_what_cannot_be_prepared_leaves_nothing_behind(capsys, tmp_path, texts, words, told):
    (tmp_path / "corpus.txt").write_text("One.\n\nTwo.\n")
    inputs = [str(tmp_path / name) for name in texts]
    assert main(["data", "prepare", *inputs, "--out", str(tmp_path / "new"), *words]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_folder_of_other_files_is_refused(capsys, tmp_path, command):
    (tmp_path / "thesis.tex").write_text("")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.jpg").write_text("")
    assert main([command, "--preset", "demo", "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert f"{tmp_path}: a folder of other files (photos, thesis.tex); give another --out" in told
    assert {path.name for path in tmp_path.iterdir()} == {"photos", "thesis.tex"}
    assert main([command, "--preset", "demo", "--out", str(tmp_path / "thesis.tex")]) == 2
    assert "not a folder; give another --out" in capsys.readouterr().err


def test_a_full_disk_says_what_to_do(capsys, monkeypatch):
    def write(arguments):
        raise OSError(errno.ENOSPC, "No space left on device", "run/model")

    monkeypatch.setattr(train, "run", write)
    assert main(["train", "--preset", "demo", "--out", "run"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("gva train: ")
    assert told.endswith("'run/model'; make room and run the same command again\n")


def test_threads_do_not_spin_while_they_wait():
    """What decides it is read when torch is loaded, so no command may have loaded it before."""
    code = """
import os, sys
from gva.cli import main
from gva.cli.parser import Parser
def parse(*words, plain=Parser.parse_args):
    print('torch' in sys.modules)
    return plain(*words)
Parser.parse_args = parse
main(['check'])
print(dict(os.environ))
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False\n")
    assert "'OMP_WAIT_POLICY': 'PASSIVE'" in done.stdout


def test_benchmarks_run_from_the_command_line(capfd, tmp_path):
    words = ["--preset", "demo", "--variants", "gqa,gva-drope-16", "--batch", "2", "--length", "64", "--steps", "5"]
    table = tmp_path / "train.csv"
    assert main(["bench", "train", *words, "--device", "cpu", "--eager", "--csv", str(table)]) == 0
    assert "gva-drope-16" in capfd.readouterr().out
    header, *rows = table.read_text().splitlines()
    assert len(rows) == 2
    assert {"tokens_per_second", "mfu", "loop_over_bare", "gpu", "torch", "commit"} <= set(header.split(","))
    words = [
        "--preset",
        "demo",
        "--variants",
        "gqa,gva-drope-16",
        "--shapes",
        "2x20",
        "--steps",
        "2",
        "--device",
        "cpu",
    ]
    assert main(["bench", "end-to-end", *words, "--csv", str(tmp_path / "e2e.csv")]) == 0
    assert len((tmp_path / "e2e.csv").read_text().splitlines()) == 3
    assert main(["bench", "train", "--no-such-option"]) != 0


def test_the_benchmarks_that_there_are_and_what_they_miss(capfd, monkeypatch):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench"]) == 0
    lines = capfd.readouterr().out.splitlines()
    scripts = {path.stem.replace("_", "-") for path in bench.FOLDER.glob("*.py") if "__main__" in path.read_text()}
    assert {line.split()[0] for line in lines if line[0] != " "} == {*bench.BENCHMARKS, "gva"}
    assert set(bench.BENCHMARKS) == scripts - {"table"}, "table.py writes what they measured into docs/"
    serving = next(n for n, line in enumerate(lines) if line.startswith("serving"))
    assert "GVA against GQA in vLLM" in lines[serving]
    assert "missing here: vLLM" in lines[serving + 1]
    assert main(["bench", "decode"]) == 2
    told = capfd.readouterr().err
    assert "gva bench: decode needs an NVIDIA GPU that torch sees and triton (pip install triton" in told
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert bench.missing("decode") == [bench.HOW_TO_GET["triton"]]
    assert bench.missing("train") == []
