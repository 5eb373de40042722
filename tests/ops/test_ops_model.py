"""The ops and the model are one function: a layer decoded on pages equals the layer decoded on a HuggingFace cache."""

import pytest
import torch

from gva import ops
from gva.attention import build
from gva.attention.rope import frequencies, tables
from gva.caches import SideBySide
from models import tiny_config

B, T, PAGE = 2, 11, 4


@pytest.mark.parametrize("variant", ["gva-drope-16", "gva-drope-24", "gta", "mla"])
@torch.no_grad()
def test_a_layer_on_pages(variant):
    config = tiny_config(variant, rope_theta=100.0)
    config._attn_implementation = "sdpa"
    (state,) = config.row.content
    module = build(config, 0).double().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(B, T, config.hidden_size, dtype=torch.float64)
    expected, _ = module(x, tables(config, torch.arange(T)[None], torch.float64), SideBySide())

    G, width = state.heads, state.width  # MLA is one group of latent width; GVA caches G groups of d_h
    pages = -(-T // PAGE)
    table = torch.randperm(B * pages).view(B, pages).int()
    value_pages = torch.full((B * pages, PAGE, G, width), float("nan"), dtype=torch.float64)
    rope_pages = torch.full((B * pages, PAGE, config.rope_dim), float("nan"), dtype=torch.float64)
    inverse, factor = frequencies(config, dtype=torch.float64)
    angles = torch.arange(T, dtype=torch.float64)[:, None] * inverse
    cos, sin = angles.cos() * factor, angles.sin() * factor
    for t in range(T):
        hidden, rotation = x[:, t : t + 1], tables(config, torch.tensor([[t]]), torch.float64)
        slots = table[:, t // PAGE] * PAGE + t % PAGE
        positions = torch.full((B,), t)
        query, (new_state, _) = module.project(hidden, rotation)
        k_rope = module.k_rope_proj(hidden)[:, 0]  # the op rotates it
        ops.append(new_state[:, 0], k_rope, value_pages, rope_pages, slots, positions=positions, cos=cos, sin=sin)
        lengths = torch.full((B,), t + 1, dtype=torch.int32)
        q_absorbed = module.absorb(query.content)
        out = ops.paged_decode(q_absorbed, query.rope, value_pages, rope_pages, table, lengths, module.scaling)
        got = module.o_proj(module.values_of(out).flatten(2))
        assert (got - expected[:, t : t + 1]).abs().max() < 1e-10
