"""Attention to keys and values side by side, with an LSE by which parts of a context merge to the whole."""

import os
from itertools import pairwise

import pytest
import torch

from gva import ops
from gva.ops import dense, flash
from gva.ops.dense import Spans

B, H, S, T, d = 2, 4, 24, 40, 64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def draw(dtype, device, G=H, tokens=T):
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((B, S, H, d), (B, tokens, G, d), (B, tokens, G, d))
    return [torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes]


def spans(count, device):
    starts = [count * i for i in range(B + 1)]
    return Spans(starts, torch.tensor(starts, dtype=torch.int32, device=device))


def attend(q, k, v, causal, **options):
    """B sequences of equal lengths, one after another."""
    queries, keys = spans(q.shape[1], q.device), spans(k.shape[1], q.device)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    out, lse = dense.attend(*flat, queries, keys, d**-0.5, causal, with_lse=True, **options)
    return out.unflatten(0, q.shape[:2]), lse.unflatten(0, q.shape[:2])


def exact(q, k, v, causal):
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * d**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(T - S + 1), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1).transpose(1, 2)


@pytest.fixture(params=["torch", "fa3"])
def backend(request, monkeypatch):
    """The second one needs FlashAttention-3's shared object, named by GVA_FA3."""
    if request.param == "fa3":
        path = os.environ.get("GVA_FA3")
        if path is None or not torch.cuda.is_available():
            pytest.skip("GVA_FA3 does not name FlashAttention-3's shared object, or there is no GPU")
        flash.load(path)
    else:
        monkeypatch.setattr(flash, "_loaded", False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("G", [1, 2, 4])
def test_matches_float64(backend, device, causal, G):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = draw(dtype, device, G)
    out, lse = attend(q, k, v, causal)
    true, true_lse = exact(q, k, v, causal)
    tolerance = 4 * torch.finfo(dtype).eps
    assert lse.shape == (B, S, H)
    assert (out.double() - true).abs().max() <= tolerance * v.abs().max()
    # The sum over keys is kept in float32; scores are as exact as the products of the queries' dtype.
    assert (lse.double() - true_lse).abs().max() <= tolerance * true_lse.abs().max()


@pytest.mark.parametrize("device", DEVICES)
def test_parts_merge_to_the_whole(backend, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = draw(dtype, device)
    old = T - S
    past = attend(q, k[:, :old], v[:, :old], causal=False)
    own = attend(q, k[:, old:], v[:, old:], causal=True)
    out, lse = ops.merge_states(*past, *own)
    true, true_lse = exact(q, k, v, causal=True)
    tolerance = 4 * torch.finfo(dtype).eps
    assert (out.double() - true).abs().max() <= tolerance * v.abs().max()
    assert (lse.double() - true_lse).abs().max() <= tolerance * true_lse.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [48, 64])
def test_ragged_sequences_and_narrow_values_into_a_given_tensor(backend, device, width):
    """Keys may be wider than values; every sequence has lengths of its own; `out` may be a slice."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    starts_q, starts_k = [0, 3, 20, 48], [0, 40, 57, 100]
    q, k = torch.randn(48, H, d).to(device, dtype), torch.randn(100, 2, d).to(device, dtype)
    v = torch.randn(100, 2, width).to(device, dtype)
    queries, keys = (Spans(x, torch.tensor(x, dtype=torch.int32, device=device)) for x in (starts_q, starts_k))
    room = torch.full((60, H, width), float("nan"), dtype=dtype, device=device)
    assert dense.attend(q, k, v, queries, keys, d**-0.5, True, out=room[5:53])[1] is None
    assert room[:5].isnan().all()
    assert room[53:].isnan().all()
    for (a, b), (c, e) in zip(pairwise(starts_q), pairwise(starts_k), strict=True):
        own_k, own_v = (x[c:e].double().repeat_interleave(2, dim=1) for x in (k, v))
        scores = torch.einsum("shd,thd->hst", q[a:b].double(), own_k) * d**-0.5
        hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(e - c - (b - a) + 1)
        true = torch.einsum("hst,thd->shd", scores.masked_fill(hidden, float("-inf")).softmax(-1), own_v)
        assert (room[5 + a : 5 + b].double() - true).abs().max() <= 4 * torch.finfo(dtype).eps * v.abs().max()


def test_an_installed_vllm_is_found(tmp_path, monkeypatch):
    assert flash.installed() is None
    assert flash.load() is False
    package = tmp_path / "vllm" / "vllm_flash_attn"
    package.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    (package / "_vllm_fa3_C.abi3.so").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert flash.installed() == str(package / "_vllm_fa3_C.abi3.so")
