"""Attention to keys and values side by side, with an LSE by which parts of a context merge to the whole."""

import os

import pytest
import torch

from gva import ops
from gva.ops import dense, flash

B, H, S, T, d = 2, 4, 24, 40, 64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def draw(dtype, device, G=H, tokens=T):
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((B, H, S, d), (B, G, tokens, d), (B, G, tokens, d))
    return [torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes]


def exact(q, k, v, causal):
    q, k, v = q.double(), *(x.double().repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * d**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(T - S + 1), float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


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
    out, lse = dense.attend(q, k, v, d**-0.5, causal)
    true, true_lse = exact(q, k, v, causal)
    tolerance = 4 * torch.finfo(dtype).eps
    assert lse.shape == (B, H, S)
    assert (out.double() - true).abs().max() <= tolerance * v.abs().max()
    # The sum over keys is kept in float32; scores are as exact as the products of the queries' dtype.
    assert (lse.double() - true_lse).abs().max() <= tolerance * true_lse.abs().max()


@pytest.mark.parametrize("device", DEVICES)
def test_parts_merge_to_the_whole(backend, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = draw(dtype, device)
    old = T - S
    past = dense.attend(q, k[:, :, :old], v[:, :, :old], d**-0.5, causal=False)
    own = dense.attend(q, k[:, :, old:], v[:, :, old:], d**-0.5, causal=True)
    out, lse = ops.merge_states(*past, *own)
    true, true_lse = exact(q, k, v, causal=True)
    tolerance = 4 * torch.finfo(dtype).eps
    assert (out.double() - true).abs().max() <= tolerance * v.abs().max()
    assert (lse.double() - true_lse).abs().max() <= tolerance * true_lse.abs().max()


def test_an_installed_vllm_is_found(tmp_path, monkeypatch):
    assert flash.installed() is None
    assert flash.load() is False
    package = tmp_path / "vllm" / "vllm_flash_attn"
    package.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    (package / "_vllm_fa3_C.abi3.so").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert flash.installed() == str(package / "_vllm_fa3_C.abi3.so")
