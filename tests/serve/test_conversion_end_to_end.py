"""An owner's whole way at toy size, by the commands: train, make the cache smaller in every way, heal, serve."""

import gc
import json
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-serve")

from served import check_greedy, greedy, ragged_prompts, start

from gva import GvaForCausalLM, cost
from gva.cli import main
from gva.run.metrics import read_metrics

SIZE = ["hidden_size=96", "intermediate_size=192", "num_hidden_layers=2", "num_attention_heads=6", "num_value_groups=3",
        "value_head_dim=32"]  # fmt: skip
RECIPE = ["length=96", "global_batch=16", "micro_batch=16", "precision=fp32", "compile=false", "eval_sequences=16",
          "warmup=5"]  # fmt: skip
STEPS, HEALING = 300, 50
CACHES = {"gva": 96, "mla": 96, "gva-own-groups": 128, "gqa": 64}  # of 192


def gva(*words):
    assert main([str(word) for word in words]) == 0


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A toy trained on some of the standard library's source, with validation losses along the way."""
    folder = tmp_path_factory.mktemp("owner")
    home = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(home.glob("[a-h]*.py"))
    gva("data", "prepare", *files, "--out", folder / "data", "--vocab-size", 512, "--workers", 1)
    gva("train", "--preset", "demo", "--variant", "gqa", "--data", folder / "data", "--out", folder / "run", "--steps",
        STEPS, "--device", "cpu", "eval_every=50", "lr=4e-3", *SIZE, *RECIPE)  # fmt: skip
    return folder, files


@pytest.mark.parametrize("target", CACHES)
def test_converted_healed_and_served(source, target, tmp_path):
    folder, files = source
    model, healed, out = folder / "run" / "model", tmp_path / "healed", tmp_path / "converted"
    gva("convert", model, "--to", target, "--cache", CACHES[target], "--calibrate", *files, "--tokens", 8192,
        "--length", 96, "--search-tokens", 1536, "--out", out, "--device", "cpu")  # fmt: skip
    record = json.loads((out / "conversion.json").read_text())
    assert record["cache"] == {"source": 192.0, "converted": float(CACHES[target])}
    gva("train", "--from", out, "--teacher", model, "--data", folder / "data", "--out", healed, "--steps", HEALING,
        "--device", "cpu", "eval_every=50", "lr=2e-3", *RECIPE)  # fmt: skip
    source_losses = {line["step"]: line["valid_loss"] for line in read_metrics(folder / "run", "eval")}
    losses = [line["valid_loss"] for line in read_metrics(healed, "eval")]
    (teacher,) = read_metrics(healed, "teacher")
    assert teacher["valid_loss"] == pytest.approx(source_losses[STEPS], rel=1e-5)
    assert losses[-1] < losses[0]
    # What healing makes of it is at most as far behind as the source was as many steps before its end.
    assert losses[-1] < source_losses[STEPS - HEALING]

    served = start(healed / "model", block_size=32 if target == "gqa" else 16, max_model_len=256)
    try:
        weights = GvaForCausalLM.from_pretrained(healed / "model").eval()
        assert cost.cache_scalars_per_token_per_layer(weights.config) == CACHES[target]
        prompts = [[token % 400 for token in prompt] for prompt in ragged_prompts((3, 20))]
        check_greedy(weights, prompts, greedy(served, prompts)[0])
    finally:
        del served
        gc.collect()
