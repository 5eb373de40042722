"""Scales at the start: matched where the paper matches them, and not where it does not."""

import copy
import math

import pytest
import torch

from gva import VARIANTS, GvaConfig, GvaForCausalLM
from gva.diagnostics import qk_scales
from models import tiny_config

MATCHED = ["gva-scale-matched", "gva-variance-fixed", "gva-drope-24", "gva-drope-16"]


def scales(variant, **overrides):
    torch.manual_seed(0)
    model = GvaForCausalLM(GvaConfig.preset("small", variant=variant, **overrides))
    return qk_scales(model, torch.randint(model.config.vocab_size, (2, 64)))


def ratios(layers, slice_name):
    return [s[f"k_{slice_name}"] / s[f"q_{slice_name}"] for s in layers]


@pytest.mark.parametrize("overrides", [{}, {"query_norm": True}, {"hidden_size": 384}], ids=["", "qnorm", "narrow"])
@pytest.mark.parametrize("variant", [*MATCHED, "additive"])
def test_scale_matched_variants_start_matched(variant, overrides):
    if variant == "additive":
        variant, overrides = "gva-drope-16", {**overrides, "rope_allocation": "additive"}
    layers = scales(variant, **overrides)
    for slice_name in ("nope", "rope") if "drope" in variant else ("nope",):
        measured = ratios(layers, slice_name)
        assert sum(measured) / len(measured) == pytest.approx(1, abs=0.10), slice_name
        assert measured == pytest.approx([1] * len(measured), abs=0.25), slice_name


def test_the_baseline_starts_with_keys_far_below_queries():
    """0.02 sqrt(d_h) = 0.16 at d_h = 64."""
    measured = ratios(scales("gva-baseline"), "nope")
    assert measured == pytest.approx([0.02 * math.sqrt(64)] * 8, rel=0.25)


@pytest.mark.parametrize("variant", ["gqa", "gva-baseline", "shared-kv"])
def test_without_a_slice_the_head_is_content(variant):
    layers = scales(variant)
    assert len(layers) == 8
    assert all(s["q_rope"] is None and s["k_rope"] is None and s["v"] > 0 for s in layers)


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("model.embed_tokens.weight", 0.02),
        ("model.layers.3.self_attn.q_proj.weight", 0.02),
        ("model.layers.3.self_attn.o_proj.weight", 0.02 / math.sqrt(16)),
        ("model.layers.3.mlp.down_proj.weight", 0.02 / math.sqrt(16)),
        ("model.layers.3.mlp.up_proj.weight", 0.02),
        ("model.layers.3.self_attn.key_map.weight", 1 / math.sqrt(64)),
        ("model.layers.3.self_attn.k_rope_proj.weight", 0.02),
    ],
)
def test_each_matrix_is_drawn_at_its_deviation(name, std):
    model = GvaForCausalLM(GvaConfig.preset("small", variant="gva-drope-16"))
    weight = dict(model.named_parameters())[name]
    assert weight.std().item() == pytest.approx(std, rel=0.03)
    assert weight.mean().item() == pytest.approx(0, abs=0.03 * std * 3)


def test_standard_maps_are_drawn_as_every_other_matrix():
    model = GvaForCausalLM(tiny_config("gva-baseline"))
    assert model.model.layers[0].self_attn.key_map.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_variants_share_what_they_have_in_common():
    """Same seed, same name, same shape, same deviation: same numbers."""
    drawn = {}
    for variant in VARIANTS:
        torch.manual_seed(3)
        drawn[variant] = dict(GvaForCausalLM(tiny_config(variant)).named_parameters())
    compared = 0
    for variant, parameters in drawn.items():
        for name, weight in parameters.items():
            for other, theirs in drawn.items():
                unlike = "key_map" in name or other == variant or theirs.get(name) is None
                if not unlike and theirs[name].shape == weight.shape:
                    assert torch.equal(weight, theirs[name]), (variant, other, name)
                    compared += 1
    assert compared > 12 * 11 * 8
    maps = [drawn[v]["model.layers.0.self_attn.key_map.weight"] for v in ("gva-baseline", "gva-variance-fixed")]
    ratio = maps[1] / maps[0]
    torch.testing.assert_close(ratio, torch.full_like(ratio, ratio[0, 0].item()))


def test_a_copy_can_be_initialised_again():
    """A deep copy has other modules under the same names: their weights must stay apart."""
    model = copy.deepcopy(GvaForCausalLM(tiny_config("gqa")))
    for module in [model, *model.modules()]:
        module.__dict__.pop("_is_hf_initialized", None)
    for parameter in model.parameters():
        parameter.__dict__.pop("_is_hf_initialized", None)
    model.init_weights()
    first, second = model.model.layers
    assert not torch.equal(first.mlp.up_proj.weight, first.mlp.gate_proj.weight)
    assert not torch.equal(first.mlp.up_proj.weight, second.mlp.up_proj.weight)


def test_seeds_and_models_differ():
    def first(seed):
        torch.manual_seed(seed)
        return GvaForCausalLM(tiny_config("gqa")), GvaForCausalLM(tiny_config("gqa"))

    (a, b), (c, _) = first(0), first(1)
    name = "model.layers.0.mlp.up_proj.weight"
    weights = [dict(m.named_parameters())[name] for m in (a, b, c)]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    layers = [dict(a.named_parameters())[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1)]
    assert not torch.equal(*layers)
