"""The layer for one's own model: against our model's, and its cache against a forward pass that re-reads all."""

import itertools
import re

import pytest
import torch

from gva import GvaForCausalLM
from gva.attention.rope import tables
from gva.nn import GroupedValueAttention
from models import tiny_config

SHAPES = {
    "recommended": {"num_heads": 4, "head_dim": 64},  # carved, one group
    "beside": {"num_heads": 4},  # heads no wider than the slice
    "groups": {"num_heads": 4, "num_groups": 2, "rope_dim": 8, "query_norm": True, "qkv_bias": True},
    "no maps": {"num_heads": 6, "num_groups": 3, "head_dim": 12, "rope_dim": 10, "map_init": "none"},
}


@pytest.fixture(params=SHAPES)
def layer(request):
    return wide(GroupedValueAttention(64, **SHAPES[request.param]).double())


def wide(layer):
    """Drawn wider than in training, so that what a token sees shows."""
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def hidden(*shape, width=64):
    return torch.randn(*shape, width, dtype=torch.float64)


def test_it_computes_what_the_layer_of_the_model_computes():
    """With the same state; and back into the model."""
    config = tiny_config("gva-drope-16", initializer_range=0.2)
    model = GvaForCausalLM(config).double().eval()
    theirs = model.model.layers[1].self_attn
    ours = GroupedValueAttention(config.hidden_size, 4, 2, head_dim=32, rope_dim=16).double()
    ours.load_state_dict(theirs.state_dict())
    seen = []
    theirs.register_forward_hook(lambda module, given, out: seen.append((given[0], out[0])))
    model(torch.randint(98, (2, 21)))
    (x, y), *_ = seen
    torch.testing.assert_close(ours(x), y, rtol=0, atol=1e-12)
    theirs.load_state_dict(ours.state_dict())


def test_a_token_sees_itself_and_what_came_before(layer):
    x = hidden(2, 13)
    y = layer(x)
    x[:, 7] += 1
    changed = (layer(x) - y).abs().amax((0, 2)) > 1e-9
    assert changed.tolist() == [False] * 7 + [True] * 6
    layer.causal = False
    y = layer(x)
    x[:, 12] += 1
    assert ((layer(x) - y).abs().amax((0, 2)) > 1e-9).all()


@pytest.mark.parametrize("cuts", [(0, 1, 2, 3, 4), (0, 40, 41, 42), (0, 17, 20, 66, 67, 70)], ids=str)
def test_decoding_with_its_cache_is_the_forward_pass(layer, cuts):
    x = hidden(3, cuts[-1])
    cache = layer.make_cache(batch=3, max_tokens=70)
    with torch.no_grad():
        parts = [layer(x[:, a:b], cache) for a, b in itertools.pairwise(cuts)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x), rtol=0, atol=1e-12)


def test_sequences_come_and_go_on_their_own(layer):
    x, cache = hidden(2, 9), layer.make_cache(2, 16)
    with torch.no_grad():
        layer(x[:, :5], cache)
        cache.release(0)
        last = layer(x[:, 5:], cache)
        torch.testing.assert_close(last[0], layer(x[:1, 5:])[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(last[1], layer(x[1:])[0, 5:], rtol=0, atol=1e-12)


def test_prompts_longer_than_what_has_keys_at_a_time(layer, monkeypatch):
    monkeypatch.setattr("gva.paged.attend.EXPANDED_TOKENS", 16)
    x, cache = hidden(3, 60), layer.make_cache(3, 64)
    with torch.no_grad():
        parts = [layer(x[:, a:b], cache) for a, b in ((0, 30), (30, 60))]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x), rtol=0, atol=1e-12)


def test_the_cache_holds_values_and_the_slice_alone():
    layer = GroupedValueAttention(64, 4, 2, rope_dim=8)
    cache = layer.make_cache(batch=5, max_tokens=64, page=64)
    pages = 5 + 1  # one belongs to nobody
    assert cache.nbytes == pages * 64 * (2 * 16 + 8) * 4
    assert layer.config.row.scalars == 2 * 16 + 8


def test_gradients_reach_everything_and_are_right(layer):
    layer(hidden(1, 3)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters() if p.dim() > 1)
    x, onto = hidden(1, 3), hidden(1, 3)
    parameters = list(layer.parameters())
    steps = [torch.randn_like(p) for p in parameters]
    wanted = torch.autograd.grad((layer(x) * onto).sum(), parameters)

    @torch.no_grad()
    def moved(by):
        for p, step in zip(parameters, steps, strict=True):
            p += by * step
        return (layer(x) * onto).sum()

    slope = (moved(1e-6) - moved(-2e-6)) / 2e-6
    assert slope.item() == pytest.approx(
        sum((w * s).sum() for w, s in zip(wanted, steps, strict=True)).item(), rel=1e-6
    )


def test_positions_turn_the_slice(layer):
    x = hidden(2, 11)
    y = layer(x)
    at = torch.arange(11)
    torch.testing.assert_close(layer(x, positions=at), y, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer(x, positions=at + 5), y, rtol=0, atol=1e-12)  # relative
    apart = layer(x, positions=torch.stack((at, 2 * at)))
    torch.testing.assert_close(apart[0], y[0], rtol=0, atol=1e-12)
    assert (apart[1] - y[1]).abs().max() > 1e-6
    cache = layer.make_cache(2, 16)
    with torch.no_grad():
        parts = [layer(x[:, a:b], cache, torch.stack((at, 2 * at))[:, a:b]) for a, b in ((0, 9), (9, 10), (10, 11))]
    torch.testing.assert_close(torch.cat(parts, 1), apart, rtol=0, atol=1e-12)


@pytest.mark.compiles
def test_it_compiles_to_one_graph():
    layer, x = wide(GroupedValueAttention(64, 4, 2, rope_dim=8).double()), hidden(2, 11)
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=1e-12)
    compiled(x).sum().backward()
    assert layer.key_map.weight.grad is not None


def test_it_starts_scale_matched_and_trains():
    """Keys as large as queries, slice by slice, for an input of RMS 1."""
    layer, x = GroupedValueAttention(512, 8, 2, rope_dim=16), torch.randn(1, 64, 512)
    query, row = layer.project(x, tables(layer.config, torch.arange(64), torch.float32))
    k_nope = layer.content(row[0])[0]
    for q, k in ((query.content, k_nope), (query.rope, row[1])):
        assert (k.norm() / q.norm() * (q.numel() / k.numel()) ** 0.5).item() == pytest.approx(1, abs=0.1)
    assert layer.o_proj.weight.std() < layer.q_proj.weight.std() / 4
    head, optimizer = torch.nn.Linear(512, 3), torch.optim.AdamW(layer.parameters(), lr=1e-2)
    goal, losses = torch.randint(3, (64,)), []
    for _ in range(10):
        loss = torch.nn.functional.cross_entropy(head(layer(x))[0], goal)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] / 2


def test_its_state_comes_back(tmp_path, layer):
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    x, before = hidden(1, 5), {name: p.clone() for name, p in layer.named_parameters()}
    y = layer(x)
    layer.reset_parameters()
    assert any(not torch.equal(p, before[name]) for name, p in layer.named_parameters())
    layer.load_state_dict(torch.load(tmp_path / "layer.pt"))
    assert torch.equal(layer(x), y)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"num_heads": 5}, "hidden_size=64: must be divisible by num_attention_heads=5"),
        ({"num_heads": 4, "num_groups": 3}, "num_value_groups=3: must divide num_attention_heads=4"),
        ({"num_heads": 4, "num_groups": 0}, "num_value_groups=0: must be positive"),
        ({"num_heads": 4, "rope_dim": 7}, "rope_dim=7: must be even"),
        ({"num_heads": 4, "map_init": "matched"}, "map_init='matched': must be one of"),
    ],
)
def test_what_it_cannot_be_is_refused_by_name(arguments, told):
    with pytest.raises(ValueError, match=told):
        GroupedValueAttention(64, **arguments)


@pytest.mark.parametrize("shape", [(5, 64), (2, 5, 32)])
def test_an_input_of_another_shape_is_told(shape):
    with pytest.raises(ValueError, match=rf"x={re.escape(str(shape))}: must be \[batch, tokens, 64\]"):
        GroupedValueAttention(64, 4)(torch.randn(shape))


def test_what_a_cache_is_not_for_is_refused():
    layer = GroupedValueAttention(64, 4)
    cache, x = layer.make_cache(2, 8), torch.randn(2, 3, 64)
    with pytest.raises(RuntimeError, match=r"cache: keeps no gradients; call the layer under torch\.no_grad"):
        layer(x, cache)
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"x=\(1, 3, 64\): the cache has 2 sequences"):
            layer(x[:1], cache)
        layer(x, cache)
        with pytest.raises(ValueError, match="exceed max_tokens"):
            layer(x.repeat(1, 30, 1), cache)
        layer.causal = False
        with pytest.raises(ValueError, match=r"causal=False: .* leave cache out"):
            layer(x, cache)
