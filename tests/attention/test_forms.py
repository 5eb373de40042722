"""Expanded and absorbed are one function; a cache changes nothing; low precision loses no more than it must."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gva import VARIANTS, GvaConfig, GvaForCausalLM
from gva.attention import build
from gva.attention.rope import tables
from gva.caches import SideBySide, eager_attention
from models import DECOUPLED, tiny_config, tiny_model, tokens


def gradients(model, ids, form):
    model.zero_grad()
    logits = model(ids, use_cache=False, attention_form=form).logits
    loss = logits.logsumexp(-1).mean() - logits[..., 7].mean()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_forms_agree(model, ids):
    loss, grads = gradients(model, ids, "expanded")
    absorbed_loss, absorbed_grads = gradients(model, ids, "absorbed")
    assert abs(loss - absorbed_loss) < 1e-10
    for name, grad in grads.items():
        assert (grad - absorbed_grads[name]).abs().max() < 1e-10, name
    assert any("key_map" in n or "k_up" in n for n in grads) or model.config.attention == "gta"


@pytest.mark.parametrize("variant", DECOUPLED)
def test_forms_agree_with_all_gradients(variant):
    assert_forms_agree(tiny_model(variant), tokens(2, 17))


@st.composite
def shapes(draw):
    """Odd lengths, R = 1, G = 1, G = H, any even slice, carved and additive."""
    G = draw(st.sampled_from([1, 2, 3]))
    R = draw(st.sampled_from([1, 2, 3, 5]))
    allocation = draw(st.sampled_from(["carved", "additive"]))
    d_r = draw(st.integers(1, 32)) * 2
    d_h = draw(st.integers(d_r + 1, d_r + 16)) if allocation == "carved" else draw(st.integers(1, 40))
    return {
        "num_attention_heads": G * R,
        "num_value_groups": G,
        "value_head_dim": d_h,
        "rope_dim": d_r,
        "rope_allocation": allocation,
        "query_norm": draw(st.booleans()),
        "hidden_size": draw(st.sampled_from([24, 40])),
    }, draw(st.integers(1, 21))


@settings(max_examples=30, deadline=None)
@given(shapes())
def test_forms_agree_over_shapes(drawn):
    overrides, length = drawn
    assert_forms_agree(tiny_model("gva-drope-16", num_hidden_layers=1, **overrides), tokens(2, length))


@settings(max_examples=30, deadline=None)
@given(shapes(), st.sampled_from(["mla", "gqa", "shared-kv-qnorm", "gva-variance-fixed", "gva-drope-16"]), st.data())
def test_prefill_plus_decode_is_prefill_over_shapes(drawn, variant, data):
    overrides, length = drawn
    if variant != "gva-drope-16":
        overrides = {k: v for k, v in overrides.items() if k not in ("rope_dim", "rope_allocation")}
        overrides["value_head_dim"] += overrides["value_head_dim"] % 2
    if variant == "mla":
        overrides |= {"rope_dim": 2, "value_head_dim": overrides["value_head_dim"] + 2}
    model = tiny_model(variant, num_hidden_layers=1, **overrides)
    check_prefill_plus_decode(model, tokens(2, length), data.draw(st.integers(0, length)))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("split", [1, 8, 16])
def test_prefill_plus_decode_is_prefill(variant, split):
    check_prefill_plus_decode(tiny_model(variant), tokens(3, 17), split)


@torch.no_grad()
def check_prefill_plus_decode(model, ids, n):
    """n tokens at once, then two at a time (a chunk), then one by one."""
    whole = model(ids, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    cuts = sorted({0, n, min(n + 2, ids.shape[1]), *range(min(n + 2, ids.shape[1]), ids.shape[1] + 1)})
    parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in itertools.pairwise(cuts)]
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-10


@pytest.mark.parametrize("form", [None, "expanded", "absorbed"])
@pytest.mark.parametrize("variant", DECOUPLED)
def test_both_forms_decode_on_the_compact_cache(variant, form):
    model, ids = tiny_model(variant), tokens(2, 9)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache = DynamicCache(config=model.config)
        parts = [model(ids[:, i : i + 3], past_key_values=cache, attention_form=form).logits for i in (0, 3, 6)]
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-10


@pytest.mark.parametrize("variant", ["gqa", "shared-kv", "gva-variance-fixed"])
def test_absorption_is_refused_under_ordinary_rope(variant):
    with pytest.raises(ValueError, match=r"attention_form='absorbed'.*positional='rope'.*positional='decoupled'"):
        tiny_model(variant)(tokens(1, 4), attention_form="absorbed")


def test_an_unknown_form_is_refused_by_name():
    with pytest.raises(ValueError, match=r"attention_form='absorb'.*did you mean 'absorbed'"):
        tiny_model("gva-drope-16")(tokens(1, 4), attention_form="absorb")


@pytest.mark.parametrize(
    ("variant", "queries", "cached", "form"),
    [
        ("gva-drope-16", 1, True, "absorbed"),
        ("gva-drope-16", 32, True, "absorbed"),  # break-even: 32 * 16 / (32 - 16) = 32 queries
        ("gva-drope-16", 33, True, "expanded"),
        ("gva-drope-16", 1, False, "expanded"),
        ("gta", 1, True, "expanded"),
        ("gqa", 1, True, "expanded"),
    ],
)
def test_the_cheaper_form_is_chosen(variant, queries, cached, form):
    module = build(tiny_config(variant), 0)
    assert module.choose_form(None, cached, queries) == form


LOW = [torch.bfloat16, torch.float16, torch.float32]


def within_budget(fast, eager, reference, dtype):
    """max error against float64 <= 2 x eager's in the same dtype and form + 2 eps max|ref|, on the same inputs."""
    budget = 2 * (eager - reference).abs().max() + 2 * torch.finfo(dtype).eps * reference.abs().max()
    return (fast - reference).abs().max() <= budget


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("variant", DECOUPLED)
def test_low_precision_error_is_that_of_eager(variant, dtype, form):
    config = tiny_config(variant)
    module = build(config, 0).to(dtype).eval()
    x = torch.randn(2, 33, config.hidden_size).to(dtype)
    mask = torch.full((33, 33), torch.finfo(dtype).min).triu(1)[None, None]
    positions = torch.arange(33)[None]

    @torch.no_grad()
    def run(implementation, precision):
        config._attn_implementation = implementation
        module.to(precision)
        embeddings = tables(config, positions, precision)
        out, _ = module(x.to(precision), embeddings, SideBySide(mask.to(precision), form=form))
        return out.double()

    assert within_budget(run("sdpa", dtype), run("eager", dtype), run("eager", torch.float64), dtype)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_low_precision_decoding_on_a_cache(variant, dtype):
    """The same rule for a whole model that decodes step by step, against eager that re-reads everything."""
    model, ids = tiny_model(variant, dtype, std=0.05), tokens(2, 12)

    @torch.no_grad()
    def run(implementation, precision, cached):
        model.set_attn_implementation(implementation)
        model.to(precision)
        if not cached:
            return model(ids, use_cache=False).logits.double()
        cache = DynamicCache(config=model.config)
        parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in itertools.pairwise([0, 6, *range(7, 13)])]
        return torch.cat(parts, 1).double()

    eager, reference = run("eager", dtype, False), run("eager", torch.float64, False)
    model.to(dtype)
    assert within_budget(run("sdpa", dtype, True), eager, reference, dtype)


def test_eager_takes_its_softmax_in_float32():
    """A thousand equal bfloat16 weights would not sum to one if they were normalised in bfloat16."""
    x = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    keys = torch.linspace(0, 1, 3000).view(1, 1, 3000, 1).expand(-1, -1, -1, 8).to(torch.bfloat16)
    _, weights = eager_attention(None, x + 1, keys, keys, None, scaling=1.0)
    exact = torch.softmax((x + 1).double() @ keys.double().mT, -1)
    assert (weights.double() - exact).abs().max() <= torch.finfo(torch.bfloat16).eps * exact.max()


def test_one_query_token_repeats_no_key_or_value(monkeypatch):
    """The heads of a group become query rows: the kernel gets G keys and values, not H copies."""
    shapes = []

    def spy(module, query, key, value, mask, **kwargs):
        shapes.append((query.shape[1], key.shape[1], value.shape[1], module.num_key_value_groups))
        return eager_attention(module, query, key, value, mask, **kwargs)

    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "get_interface", lambda name, default: spy)
    for variant in ("gqa", "gva-drope-16", "mla"):
        model, cache = tiny_model(variant), DynamicCache()
        model(tokens(2, 5), past_key_values=cache)
        shapes.clear()
        model(tokens(2, 1), past_key_values=cache)
        kept = 1 if variant == "mla" else 2
        assert set(shapes) == {(kept, kept, kept, 1)}, variant


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", ["gva-drope-16", "gva-one-group", "mla"])
def test_an_absorbed_step_reads_the_cache_as_it_lies(variant, implementation, new, monkeypatch):
    """Keys and values that the kernel gets are the cache's own memory, for one new token and for a few drafts."""
    model, ids = tiny_model(variant), tokens(2, 12)
    model.set_attn_implementation(implementation)
    for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=16)):
        memory, kernel = [], ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)

        def spy(module, query, key, value, mask, kernel=kernel, memory=memory, **kwargs):
            memory += [x.untyped_storage().data_ptr() for x in (key, value)]
            return kernel(module, query, key, value, mask, **kwargs)

        with torch.no_grad():
            model(ids[:, :-new], past_key_values=cache)
            with monkeypatch.context() as patch:
                patch.setattr(ALL_ATTENTION_FUNCTIONS, "get_interface", lambda name, default, spy=spy: spy)
                step = model(ids[:, -new:], past_key_values=cache).logits
        assert memory == [layer.values.untyped_storage().data_ptr() for layer in cache.layers for _ in range(2)]
        assert (step - model(ids, use_cache=False).logits[:, -new:]).abs().max() < 1e-10


def test_training_in_either_form_follows_the_same_losses():
    """Forty steps of a tiny float64 model, absorbed against expanded: rounding alone may separate them."""
    losses = {}
    for form in ("expanded", "absorbed"):
        torch.manual_seed(1)
        model = GvaForCausalLM(GvaConfig.preset("demo", num_hidden_layers=1, vocab_size=64)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        ids = torch.randint(64, (4, 24))
        losses[form] = []
        for _ in range(40):
            loss = model(ids, labels=ids, use_cache=False, attention_form=form).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[form].append(loss.item())
    assert losses["expanded"][-1] < 0.5 * losses["expanded"][0]
    assert losses["absorbed"] == pytest.approx(losses["expanded"], rel=1e-6)
