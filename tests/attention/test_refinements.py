"""Attentions of the studies that are no variants: keys of their own beside a slice, keys that read one token back."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from gva import PagedGenerator, cost
from gva.attention.init import weight_std
from gva.diagnostics import cache_scalars_per_token_per_layer, qk_scales
from gva.paged import attend
from gva.serve.checks import check_servable
from gva.train.optimizer import make_optimizer
from gva.train.recipe import Recipe
from models import tiny_config, tiny_model, tokens

REFINED = {
    "untied": {"attention": "gva_untied"},
    "look-back": {"attention": "gva_look_back"},
    "first-layer": {"layers": {0: {"attention": "gva_untied", "rope_dim": 16}, 1: {"attention": "gva_look_back"}}},
}


@pytest.fixture(params=REFINED, scope="module")
def model(request):
    made = tiny_model("gva-drope-16", **REFINED[request.param])
    for name, parameter in made.named_parameters():
        if "back_map" in name:  # they start at zero
            torch.nn.init.normal_(parameter, std=0.3)
    return made


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_documents_and_padding_change_nothing(model, implementation):
    first, second = tokens(1, 7), tokens(1, 9)
    alone = [model(ids, use_cache=False).logits for ids in (first, second)]
    model.set_attn_implementation(implementation)
    positions = torch.cat([torch.arange(7), torch.arange(9)])[None]
    packed = model(torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
    assert (packed - torch.cat(alone, 1)).abs().max() < 1e-10
    mask = torch.tensor([[0] * 3 + [1] * 9])
    padded, positions = torch.cat([tokens(1, 3), second], 1), (mask.cumsum(-1) - 1).clamp(min=0)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=16)):
        parts = [
            model(
                padded[:, a:b], attention_mask=mask[:, :b], position_ids=positions[:, a:b], past_key_values=cache
            ).logits
            for a, b in ((0, 6), (6, 11), (11, 12))
        ]
        assert (torch.cat(parts, 1)[:, 3:] - alone[1]).abs().max() < 1e-10
    model.set_attn_implementation("sdpa")


@torch.no_grad()
def test_choices_after_a_shared_context_do_not_see_one_another(model):
    """As tasks are scored: context, then every choice, each going on from the context."""
    context, choices = tokens(1, 5), [tokens(1, 3), tokens(1, 4)]
    ids = torch.cat([context, *choices], 1)
    part = torch.tensor([0] * 5 + [1] * 3 + [2] * 4)
    seen = ((part[None] == part[:, None]) | (part[None] == 0)).tril()
    positions = torch.tensor([*range(5), *range(5, 8), *range(5, 9)])[None]
    shared = model(ids, attention_mask=seen[None, None], position_ids=positions, use_cache=False).logits
    for number, choice in enumerate(choices, 1):
        alone = model(torch.cat([context, choice], 1), use_cache=False).logits[:, 5:]
        assert (shared[:, part == number] - alone).abs().max() < 1e-10


@torch.no_grad()
def test_generates_on_every_cache(model, monkeypatch):
    prompts, wanted = [tokens(1, n)[0].tolist() for n in (3, 11, 6)], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        for _ in range(7):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        wanted.append(ids[0, len(prompt) :].tolist())
        for options in ({}, {"cache_implementation": "static"}):
            got = model.generate(torch.tensor([prompt]), max_new_tokens=7, do_sample=False, pad_token_id=0, **options)
            assert got[0, len(prompt) :].tolist() == wanted[-1]
    for tokens_at_a_time in (attend.EXPANDED_TOKENS, 4):  # the latter: prompts attend part by part
        monkeypatch.setattr(attend, "EXPANDED_TOKENS", tokens_at_a_time)
        for prefill in (64, 5):
            generator = PagedGenerator(model, 3, 24, page=4, prefill_tokens=prefill)
            assert generator.generate(prompts, 7) == wanted


def test_is_counted_and_not_served(model):
    config = model.config
    assert cost.parameters(config)["total"] == sum(p.numel() for p in model.parameters())
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(tokens(2, 9), past_key_values=cache)
    assert cache_scalars_per_token_per_layer(cache) == cost.cache_scalars_per_token_per_layer(config)
    with pytest.raises(
        ValueError, match=r"attention='gva_(untied|look_back)' cannot be served: it has no absorbed form"
    ):
        check_servable(config)
    assert len(qk_scales(model, tokens(1, 5))) == 2


def test_what_they_cost():
    untied, back = (tiny_config("gva-drope-16", **REFINED[name]) for name in ("untied", "look-back"))
    assert cost.cache_scalars_per_token_per_layer(untied) == 2 * (16 + 32) + 16
    assert cost.cache_scalars_per_token_per_layer(back) == 2 * 32 + 16
    maps = 2 * 4 * 16 * 32  # two of [d_n, d_h] for every head, applied to everything that is cached
    far, near = (cost.decode_step(back, 1, context).flops for context in (11, 10))
    assert far - near == 2 * 2 * (maps + 4 * (32 + 32))


def test_look_back_begins_as_gva_and_its_maps_learn_at_their_rate():
    torch.manual_seed(0)
    plain, back = (tiny_model("gva-drope-16", **fields) for fields in ({}, REFINED["look-back"]))
    ids = tokens(1, 9)
    assert torch.equal(back(ids, use_cache=False).logits, plain(ids, use_cache=False, attention_form="expanded").logits)
    assert weight_std(back.config, "back_map") == 0
    maps = make_optimizer(back, Recipe(map_lr=4.0)).param_groups[2]["params"]
    assert len(maps) == 4
    loss = back(ids, labels=ids).loss
    loss.backward()
    assert all(p.grad.abs().max() > 0 for p in maps)
