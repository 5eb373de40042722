"""What is counted equals what exists."""

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from gva import PRESETS, VARIANTS, GvaConfig, GvaForCausalLM, cost, ops
from models import tiny_config, tiny_model, tokens


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_equal_those_of_the_model(variant, tied):
    config = tiny_config(variant, tie_word_embeddings=tied)
    model = GvaForCausalLM(config)
    counted = cost.parameters(config)
    assert counted["total"] == sum(p.numel() for p in model.parameters())
    attention = model.model.layers[0].self_attn
    by_name = {n.removesuffix(".weight"): p.numel() for n, p in attention.named_parameters()}
    assert cost.attention_parameters(config) == by_name
    assert counted["feed_forward"] == sum(p.numel() for n, p in model.named_parameters() if ".mlp." in n)


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_of_the_presets(preset):
    for variant in VARIANTS:
        config = GvaConfig.preset(preset, variant=variant)
        with torch.device("meta"):
            model = GvaForCausalLM(config)
        assert cost.parameters(config)["total"] == sum(p.numel() for p in model.parameters())


def test_the_papers_figures():
    gqa = GvaConfig.preset("paper-350m", variant="gqa")
    assert cost.parameters(gqa)["total"] == pytest.approx(341e6, rel=0.001)
    for width, saved in ((16, 0.47), (24, 0.45)):
        gva = GvaConfig.preset("paper-350m", variant=f"gva-drope-{width}")
        ratio = cost.cache_scalars_per_token_per_layer(gva) / cost.cache_scalars_per_token_per_layer(gqa)
        assert round(1 - ratio, 2) == saved
        assert ratio == 0.5 + width / (2 * 4 * 64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_formulas_of_the_paper(variant):
    config = GvaConfig.preset("paper-350m", variant=variant)
    H, G, d_h, d_r = 16, config.num_value_groups, 64, config.rope_dim or 0
    expected = {"mha": 2 * H * d_h, "mqa": 2 * d_h, "gqa": 2 * G * d_h, "mla": 256 + 16}.get(variant, G * d_h + d_r)
    assert cost.cache_scalars_per_token_per_layer(config) == expected
    assert cost.cache_bytes_per_token(config) == 24 * 2 * expected
    assert cost.cache_bytes_per_token(config, "float32") == 24 * 4 * expected


def test_fp8_rows_count_scales_and_padding():
    gva = GvaConfig.preset("paper-350m", variant="gva-drope-16")
    assert cost.cache_row_bytes(gva, "fp8") == 4 * 64 + 2 * 16 + 4 * 4  # 304, a multiple of 16 already
    odd = GvaConfig.preset("paper-350m", variant="gva-drope-16", rope_dim=18)
    assert cost.cache_row_bytes(odd, "fp8") == 320  # 308 padded
    assert cost.cache_row_bytes(GvaConfig.preset("paper-350m", variant="gqa"), "fp8") == 2 * 4 * 64
    mla = GvaConfig.preset("paper-350m", variant="mla")
    assert cost.cache_row_bytes(mla, "fp8") == 304  # 256 + 32 + 4 padded


@pytest.mark.parametrize(("G", "d_h", "d_r"), [(4, 64, 16), (1, 128, 8), (3, 96, 32), (8, 128, 64)])
def test_fp8_rows_are_those_of_the_kernels(G, d_h, d_r):
    config = GvaConfig(num_attention_heads=2 * G, num_value_groups=G, value_head_dim=d_h, rope_dim=d_r)
    assert cost.cache_row_bytes(config, "fp8") == ops.packed_row_bytes(G, d_h, d_r)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_flops_equal_what_a_step_computes(variant, batch):
    """torch counts the products of a real cached step in eager form, attention included."""
    context = 19
    model = tiny_model(variant, torch.float32, attn_implementation="eager")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(batch, context - 1), past_key_values=cache)
        with FlopCounterMode(display=False) as counter:
            model(tokens(batch, 1), past_key_values=cache)
    assert counter.get_total_flops() == cost.decode_step(model.config, batch, context).flops


def test_decode_bytes_and_floor():
    config = GvaConfig.preset("paper-350m", variant="gva-drope-16")
    step = cost.decode_step(config, batch=64, context=8192)
    assert step.weight_bytes == 2 * cost.parameters(config)["total"]
    assert step.cache_bytes == 64 * 8193 * 24 * 2 * 272
    assert step.bytes == step.weight_bytes + step.cache_bytes
    assert step.seconds(4e12, 1e15) == pytest.approx(step.bytes / 4e12)
    fp8 = cost.decode_step(config, batch=64, context=8192, cache_dtype="fp8")
    assert fp8.cache_bytes == 64 * 8193 * 24 * 304


def test_largest_batch():
    config = GvaConfig.preset("paper-350m", variant="gva-drope-16")
    weights, sequence = 2 * cost.parameters(config)["total"], 32768 * cost.cache_bytes_per_token(config)
    assert cost.largest_batch(config, 32768, weights + 5 * sequence) == 5
    assert cost.largest_batch(config, 32768, weights + 5 * sequence - 1) == 4
    assert cost.largest_batch(config, 32768, 1000) == 0


@pytest.mark.parametrize(
    ("variant", "fields", "on_each_of"),
    [
        ("gva-drope-16", {"rope_dim": 32}, {1: 288, 2: 160, 4: 96, 8: 96}),
        ("gqa", {}, {1: 512, 2: 256, 4: 128, 8: 128}),
        ("mqa", {}, {1: 128, 4: 128}),
        ("mla", {}, {1: 272, 4: 272}),
        ("gqa", {"num_attention_heads": 12, "num_value_groups": 3}, {2: 256}),
    ],
)
def test_the_cache_of_one_rank(variant, fields, on_each_of):
    config = GvaConfig.preset("paper-350m", variant=variant, **fields)
    for ranks, scalars in on_each_of.items():
        assert cost.cache_scalars_per_token_per_layer(config, ranks) == scalars
        assert cost.cache_bytes_per_token(config, "float32", ranks) == 24 * 4 * scalars
    if config.row.packs:
        one = config.row.over(4)
        row = cost.packed_row_bytes(one.content[0].heads, one.content[0].width, config.rope_dim)
        assert cost.cache_row_bytes(config, "fp8", 4) == row


def test_a_row_that_cannot_be_had_says_why():
    narrow = GvaConfig(hidden_size=64, num_attention_heads=4, attention="gqa", value_head_dim=2)
    rows = cost.table(narrow, ["gta", "gqa"])
    assert "value_head_dim=2: gta rotates half of a head" in rows[0]["error"]
    assert rows[1]["cache_saved_against_gqa"] == 0


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * 2**30), ("1.5 GB", 1_500_000_000), ("512", 512), ("4MiB", 4 << 20)]
)
def test_sizes(text, size):
    assert cost.parse_size(text) == size


def test_sizes_that_are_none():
    with pytest.raises(ValueError, match=r"size '80 gigs': must be a number"):
        cost.parse_size("80 gigs")


@pytest.mark.parametrize("module", ["gva", "gva.cost", "gva.ops"])
def test_counting_and_ops_load_no_transformers(module):
    code = f"import {module}, sys; print(sorted(set(sys.modules) & {{'transformers', 'triton', 'datasets', 'vllm'}}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
