"""Every attention against the numpy implementation: as a whole, and token by token on its cache."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from gva import VARIANTS
from gva.attention import build
from gva.attention.rope import tables
from gva.caches import SideBySide
from models import DECOUPLED, tiny_config
from oracle import attend_all, decode_gva, project

T = 13


def module_and_weights(config):
    config._attn_implementation = "sdpa"
    module = build(config, 0).double().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    weights = {n.removesuffix(".weight"): p.detach().numpy().T for n, p in module.named_parameters()}
    return module, weights


def run(module, config, x, form=None, cached=False):
    cache = DynamicCache(config=config) if cached else None
    outputs, steps = [], range(T) if cached else [slice(0, T)]
    for step in steps:
        part = x[:, step : step + 1] if cached else x
        positions = torch.arange(T)[None, step : step + 1] if cached else torch.arange(T)[None]
        held = torch.arange(step + 1 if cached else T)[None]
        with torch.no_grad():
            attend = SideBySide(cache=cache, form=form, key_rotation=tables(config, held, x.dtype))
            out, _ = module(part, tables(config, positions, x.dtype), attend)
        outputs.append(out)
    return torch.cat(outputs, 1)[0].numpy()


def expected(config, x, weights):
    d_r = config.rope_dim or 0
    kind = "gqa" if config.attention in ("mha", "mqa") else config.attention
    arguments = {
        "H": config.num_attention_heads,
        "G": config.num_value_groups,
        "d_h": config.value_head_dim,
        "d_n": config.content_dim,
        "d_r": d_r,
        "theta": config.rope_theta,
        "q_gain": weights.get("q_norm"),
        "scale": config.score_scale,
        "frequencies": config.rope_frequencies,
    }
    if kind == "gva" and d_r:
        out = decode_gva(x[0].numpy(), weights, **arguments)
    else:
        out = attend_all(x[0].numpy(), weights, kind=kind, **arguments)
    return project(out, weights, "o_proj")


@pytest.mark.parametrize("cached", [False, True], ids=["whole", "step-by-step"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_numpy(variant, cached):
    config = tiny_config(variant)
    module, weights = module_and_weights(config)
    x = torch.randn(1, T, config.hidden_size, dtype=torch.float64)
    np.testing.assert_allclose(run(module, config, x, cached=cached), expected(config, x, weights), rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("variant", DECOUPLED)
def test_both_forms_equal_numpy(variant, form):
    config = tiny_config(variant)
    module, weights = module_and_weights(config)
    x = torch.randn(1, T, config.hidden_size, dtype=torch.float64)
    np.testing.assert_allclose(run(module, config, x, form), expected(config, x, weights), rtol=0, atol=1e-10)


SOURCES = {  # what a converted model takes over from its source
    "frequencies": {"rope_frequencies": [1.0, 0.3, 0.3, 0.1, 0.01, 0.01, 0.0, 2e-4]},
    "scale": {"score_scale": 0.11},
    "input-bias": {"qkv_bias": True},
    "output-bias": {"output_bias": True},
    "all": {
        "rope_frequencies": [0.5] * 8, "score_scale": 0.3, "qkv_bias": True, "output_bias": True, "latent_norm": False
    },
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("variant", ["gqa", "mla", "gta", "gva-drope-16", "gva-scale-matched"])
def test_what_a_source_brings_equals_numpy(variant, source):
    options = {k: v for k, v in SOURCES[source].items() if k != "latent_norm" or variant == "mla"}
    if variant == "gva-scale-matched":  # its keys are rebuilt and rotated at every step
        options.pop("rope_frequencies", None)
    if variant == "gqa" and "rope_frequencies" in options:
        options["rope_frequencies"] = [*options["rope_frequencies"], *options["rope_frequencies"]]
    config = tiny_config(variant, **options)
    module, weights = module_and_weights(config)
    assert ("latent_norm" in weights) == (variant == "mla" and "latent_norm" not in options)
    x = torch.randn(1, T, config.hidden_size, dtype=torch.float64)
    want = expected(config, x, weights)
    for form in ("expanded", "absorbed") if config.absorbs else ("expanded",):
        for cached in (False, True):
            got = run(module, config, x, form, cached=cached)
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("query_norm", [False, True])
def test_gva_without_maps_has_values_for_keys(query_norm):
    """As if every map were the identity."""
    config = tiny_config("gva-drope-16", map_init="none", query_norm=query_norm)
    assert config.content_dim == config.value_head_dim
    module, weights = module_and_weights(config)
    assert "key_map" not in weights
    x = torch.randn(1, T, config.hidden_size, dtype=torch.float64)
    eye = np.tile(np.eye(config.value_head_dim), (1, config.num_attention_heads))
    want = expected(config, x, {**weights, "key_map": eye})
    for form in ("expanded", "absorbed"):
        np.testing.assert_allclose(run(module, config, x, form), want, rtol=0, atol=1e-10)
        np.testing.assert_allclose(run(module, config, x, form, cached=True), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("allocation", ["carved", "additive"])
@pytest.mark.parametrize("query_norm", [False, True])
def test_gva_options_equal_algorithm_1(allocation, query_norm):
    config = tiny_config("gva-drope-16", rope_allocation=allocation, query_norm=query_norm, rope_theta=100.0)
    module, weights = module_and_weights(config)
    x = torch.randn(1, T, config.hidden_size, dtype=torch.float64)
    want = expected(config, x, weights)
    for form in ("expanded", "absorbed"):
        np.testing.assert_allclose(run(module, config, x, form), want, rtol=0, atol=1e-10)
        np.testing.assert_allclose(run(module, config, x, form, cached=True), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_a_slice_beside_the_heads_of_mla_equals_numpy(form):
    config = tiny_config("mla", rope_allocation="additive", rope_dim=40, output_bias=True)
    assert config.score_dim == config.value_head_dim + 40
    module, weights = module_and_weights(config)
    x = torch.randn(1, T, config.hidden_size, dtype=torch.float64)
    want = expected(config, x, weights)
    for cached in (False, True):
        np.testing.assert_allclose(run(module, config, x, form, cached=cached), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("allocation", ["carved", "additive"])
@pytest.mark.parametrize("attention", ["gva_untied", "gva_look_back"])
def test_other_keys_beside_a_slice_equal_numpy(attention, allocation):
    config = tiny_config("gva-drope-16", attention=attention, rope_allocation=allocation, qkv_bias=True)
    module, weights = module_and_weights(config)
    x = torch.randn(1, T, config.hidden_size, dtype=torch.float64)
    want = expected(config, x, weights)
    for cached in (False, True):
        np.testing.assert_allclose(run(module, config, x, cached=cached), want, rtol=0, atol=1e-10)
