"""A model with a smaller cache in vLLM's engine: each target, layers that split their rows differently too."""

import gc
import os
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-serve")

import torch
from served import bytes_per_token, check_greedy, greedy, ragged_prompts, start

from gva import GvaForCausalLM, cost
from gva.convert.converter import Conversion, Request
from gva.convert.targets import Split
from gva.data.tokenizer import load_tokenizer
from models import SIZE

APART = [Split(24, 72), Split(40, 56)]


@pytest.mark.parametrize(
    ("target", "cache", "splits"),
    [
        ("gva", 96, None),
        ("gva", 96, APART),
        ("mla", 96, None),
        ("mla", 96, APART),
        ("gva-own-groups", 72, None),
        ("gqa", 64, None),
    ],
)
def test_a_converted_model_is_served(target, cache, splits, checkpoints, tmp_path):
    folder, _ = checkpoints("gqa")
    source = GvaForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    text = torch.randint(1, SIZE["vocab_size"] - 2, (6, 40), generator=torch.Generator().manual_seed(0))
    conversion = Conversion(source, Request(target, cache, text, 2), tmp_path, say=lambda line: None)
    conversion.calibrate()
    model = conversion.convert(splits or conversion.alike(len(conversion.splits) // 2))
    model.save_pretrained(tmp_path / "model")
    served, prompts = start(tmp_path / "model", block_size=32 if target == "gqa" else 16), ragged_prompts((1, 17, 200))
    try:
        check_greedy(model, prompts, greedy(served, prompts)[0])
        assert bytes_per_token(served) == cost.cache_bytes_per_token(model.config, "float32")
        assert cost.cache_scalars_per_token_per_layer(model.config) == cache
    finally:
        del served
        gc.collect()


@pytest.mark.skipif("GVA_CONVERTED" not in os.environ, reason="GVA_CONVERTED names no folder that gva convert wrote")
def test_a_trained_one_is_served():
    folder = Path(os.environ["GVA_CONVERTED"])
    model = GvaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    words = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    tokens = load_tokenizer(folder).encode([words])[0]
    prompts = [tokens[i : i + 1 + 7 * i] for i in range(20)]
    served = start(folder, block_size=16, kv_cache_memory_bytes=256 << 20)
    try:
        check_greedy(model, prompts, greedy(served, prompts)[0])
        assert bytes_per_token(served) == cost.cache_bytes_per_token(model.config, "float32")
    finally:
        del served
        gc.collect()
