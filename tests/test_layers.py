"""Layers that differ from one another: each is what its own config says, on every cache, however it is counted."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache, StaticCache

from attention.test_against_oracle import expected
from gva import GvaConfig, GvaForCausalLM, cost, diagnostics
from gva.caches import SideBySide
from gva.paged.cache import PagedCache
from gva.paged.generator import PagedGenerator, run_layer
from models import tiny_config, tiny_model, tokens

T = 11
FREQUENCIES = [1.0, 0.3, 0.3, 0.1, 0.01, 0.01, 0.0, 2e-4]
MIXTURES = {
    "frequencies": ("gva-drope-16", {i: {"rope_frequencies": [f / (i + 1) for f in FREQUENCIES]} for i in range(3)}),
    "rows": (
        "gva-drope-16",
        {
            0: {"rope_dim": 8, "value_head_dim": 40, "num_value_groups": 1, "rope_allocation": "additive"},
            2: {"rope_dim": 24, "score_scale": 0.4},
        },
    ),
    "kinds": ("gqa", {1: {"attention": "mla", "latent_dim": 24, "latent_norm": False}, 2: {"attention": "gva"}}),
    "late": ("gva-drope-16", {1: {"attention": "shared_kv"}, 2: {"positional": "rope"}, 3: {"attention": "mqa"}}),
    "biases": ("mla", {0: {"qkv_bias": True}, 1: {"output_bias": True, "latent_dim": 40}}),
}


def model_of(mixture, dtype=torch.float64, **overrides):
    variant, layers = MIXTURES[mixture]
    model = tiny_model(variant, dtype, num_hidden_layers=4, layers=layers, **overrides)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(params=MIXTURES)
def mixture(request):
    return request.param


@torch.no_grad()
def test_each_layer_equals_numpy_with_its_own_config(mixture):
    model, seen = model_of(mixture), {}
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda m, args, out: seen.update({m.layer_idx: (m, args[0], out[0])}))
    model(tokens(1, T), use_cache=False)
    assert len(seen) == 4
    for index, (attention, x, out) in seen.items():
        config = model.config.layer(index)
        weights = {n.removesuffix(".weight"): p.numpy().T for n, p in attention.named_parameters()}
        np.testing.assert_allclose(out[0].numpy(), expected(config, x, weights), rtol=0, atol=1e-10)


@torch.no_grad()
def test_caches_change_nothing_and_hold_what_is_counted(mixture):
    model, ids = model_of(mixture), tokens(2, T)
    want = model(ids, use_cache=False).logits
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=T)):
        got = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 6), (6, 7), (7, T))]
        torch.testing.assert_close(torch.cat(got, 1), want, rtol=0, atol=1e-10)
        held = diagnostics.cache_scalars_per_token_per_layer(cache)
        assert held == cost.cache_scalars_per_token_per_layer(model.config)
    absorbing = {layer.self_attn.absorbs for layer in model.model.layers}
    if absorbing == {True}:
        torch.testing.assert_close(model(ids, attention_form="absorbed").logits, want, rtol=0, atol=1e-10)


def test_pages(mixture):
    model, prompts = model_of(mixture), [tokens(1, n)[0].tolist() for n in (1, 13, 6)]
    want = [
        model.generate(torch.tensor([p]), max_new_tokens=6, do_sample=False, pad_token_id=0)[0, len(p) :].tolist()
        for p in prompts
    ]
    packs = all(layer.row.packs for layer in model.config.layer_configs)
    for layout in ("rows", "separate") if packs else (None,):
        generator = PagedGenerator(model, 3, 24, page=4, prefill_tokens=8, layout=layout)
        assert generator.generate(prompts, 6) == want
        pages = generator.cache.pages + 1
        assert generator.cache.nbytes == pages * 4 * cost.cache_bytes_per_token(model.config, "float32") * 2
    if packs:
        fp8 = PagedCache(model.config, 1, 16, page=4, fp8=True)
        assert fp8.nbytes == 5 * 4 * cost.cache_bytes_per_token(model.config, "fp8")


def test_counts(mixture):
    config = model_of(mixture).config
    model = GvaForCausalLM(config)
    assert cost.parameters(config)["total"] == sum(p.numel() for p in model.parameters())
    step, alone = (
        cost.decode_step(c, 3, 100) for c in (config, GvaConfig.from_dict({**config.to_dict(), "layers": None}))
    )
    assert (step == alone) == (mixture == "frequencies")


def test_saved_and_loaded(mixture, tmp_path):
    model = model_of(mixture)
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = GvaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config.layers == model.config.layers == json.loads((tmp_path / "config.json").read_text())["layers"]
    held, given = loaded.state_dict(), model.state_dict()
    assert held.keys() == given.keys()
    assert all(torch.equal(held[name], given[name]) for name in given)
    ids = tokens(1, T)  # weights read from a file begin at other addresses, where products may round otherwise
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-13, atol=1e-13)
    assert loaded.config.with_variant("mla").layers is None


def test_gradients_reach_every_layer(mixture):
    model, ids = model_of(mixture), tokens(2, T)
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_maps_are_drawn_for_their_own_layer():
    """The deviation of M_h follows the value width, which is the layer's."""
    torch.manual_seed(0)
    model = GvaForCausalLM(tiny_config("gva-drope-16", layers={1: {"value_head_dim": 128, "rope_dim": 16}}))
    first, second = (layer.self_attn.key_map.weight.std().item() for layer in model.model.layers)
    assert first / second == pytest.approx(2, rel=0.05)


def test_biases_start_at_zero():
    model = GvaForCausalLM(tiny_config("gqa", qkv_bias=True, output_bias=True, mlp_bias=True))
    biases = {name: p for name, p in model.named_parameters() if name.endswith(".bias")}
    assert len(biases) == 2 * 7
    assert all((p == 0).all() for p in biases.values())
    assert cost.parameters(model.config)["total"] == sum(p.numel() for p in model.parameters())


@torch.no_grad()
def test_the_kernel_is_the_models_even_if_it_changes():
    model, ids = model_of("rows"), tokens(1, T)
    want = model(ids).logits
    model.set_attn_implementation("eager")
    out = model(ids, output_attentions=True)
    torch.testing.assert_close(out.logits, want, rtol=0, atol=1e-10)
    assert [w.shape for w in out.attentions] == [(1, 4, T, T)] * 4


def test_layers_that_differ_in_frequencies_compile_to_one_graph():
    torch._dynamo.reset()
    model, prompts = model_of("frequencies"), [tokens(1, 5)[0].tolist()]
    eager, compiled = (PagedGenerator(model, 1, 24, page=4, compile=c) for c in (False, True))
    counter = CompileCounter()
    compiled._compiled_layer = torch.compile(run_layer, fullgraph=True, dynamic=False, backend=counter)
    assert compiled.generate(prompts, 6) == eager.generate(prompts, 6)
    assert counter.frame_count == 1


def test_layers_of_one_kind_share_their_attend():
    """A layer that rotates late alone has keys' rotations; the model hands the others what it always did."""
    model, seen = model_of("late"), []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda m, args: seen.append(args[2]))
    model(tokens(1, T))
    assert [isinstance(a, SideBySide) and a.key_rotation is not None for a in seen] == [False, True, True, False]
    assert replace(seen[1], key_rotation=None) == seen[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": {2: {"rope_dim": 8}}}, r"layers=2: must be the number of a layer, 0 to 1"),
        ({"layers": {"-1": {"rope_dim": 8}}}, r"layers='-1': must be the number of a layer"),
        ({"layers": {0: {"rope_dim": 7}}}, r"layers\[0\]: rope_dim=7: must be even"),
        ({"layers": {0: {"hidden_size": 8}}}, r"layers\[0\]='hidden_size': must be one of"),
        ({"layers": {0: {"ropedim": 8}}}, r"layers\[0\]='ropedim': must be one of .*did you mean 'rope_dim'"),
        ({"layers": {0: {"attention": "gqqa"}}}, r"layers\[0\]: attention='gqqa': must be one of"),
        ({"layers": {0: 8}}, r"layers\[0\]=8: must be a mapping of fields"),
        ({"layers": [8]}, r"layers=\[8\]: must be a mapping"),
        ({"rope_frequencies": [1.0]}, r"rope_frequencies=\[1.0\]: 1 numbers for 8 rotated pairs"),
        ({"rope_frequencies": [-1.0] * 8}, r"rope_frequencies=.*none of them negative"),
        ({"rope_frequencies": 1.0}, r"rope_frequencies=1.0: must be a list"),
        ({"rope_frequencies": [float("nan")] * 8}, r"rope_frequencies=.*must be a list of numbers"),
        ({"positional": "rope", "rope_frequencies": [1.0] * 16}, r"rope_frequencies=.*follow rope_parameters alone"),
        ({"score_scale": 0}, r"score_scale=0: must be positive"),
        ({"score_scale": "1"}, r"score_scale='1': must be positive"),
        ({"latent_norm": False}, r"latent_norm=False: only attention='mla' has a latent"),
        ({"qkv_bias": 1}, r"qkv_bias=1: must be True or False"),
    ],
)
def test_bad_fields_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_config("gva-drope-16", **{"rope_dim": None if fields.get("positional") else 16, **fields})


def test_transformers_own_overrides_are_refused():
    with pytest.raises(TypeError, match="per_layer_config: GvaConfig has `layers`"):
        tiny_config("gva-drope-16", per_layer_config={0: {"rope_dim": 8}})


def test_a_layer_without_overrides_is_the_model():
    config = tiny_config("gva-drope-16", layers={"1": {"rope_dim": 8}, 0: {}})
    assert config.layers == {"1": {"rope_dim": 8}}
    assert config.layer(0) is config
    assert [layer.rope_dim for layer in config.layer_configs] == [16, 8]
    assert tiny_config("gqa", layers={}).layers is None
