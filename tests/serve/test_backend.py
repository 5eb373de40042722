"""The parts of a step that only a GPU takes, as far as a CPU can try them: plans in Triton's interpreter, and the call
into FlashAttention with a stand-in of the same arguments."""

import functools
from itertools import pairwise
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-serve")

import torch

from gva import ops
from gva.serve.backend import StepBuilder, slots_of
from gva.serve.paths import Absorbed, Expanded
from gva.serve.rows import Row

H, BLOCK = 4, 16


def layer_with_cache(fp8=False, pages=12):
    """A stand-in for an attention layer, whose cache holds noise in the shape that vLLM hands out."""
    row = Row(groups=2, width=32, rope_dim=16, dtype=torch.float32, fp8=fp8)
    cache = torch.zeros(pages, 1, BLOCK, row.size, dtype=row.storage_dtype)
    tokens = pages * BLOCK
    row.write(cache, torch.randn(tokens, 64), torch.randn(tokens, 16), torch.arange(tokens))
    maps = torch.randn(H, 16, 32) / 4
    return SimpleNamespace(
        row=row,
        kv_cache=cache,
        num_heads=H,
        scale=32**-0.5,
        attends_in_place=True,
        absorb=lambda q: (torch.einsum("thn,hnd->thd", q[..., :16], maps), q[..., 16:]),
        expand=lambda state, k_rope: tuple(x[0] for x in ops.expand(state[None], k_rope[None], maps)),
    )


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("S", [1, 3])
def test_a_plan_is_refilled_in_place_and_its_workspace_shared(monkeypatch, fp8, S):
    layer = layer_with_cache(fp8)
    builder = StepBuilder.__new__(StepBuilder)
    builder.layer, builder.plans = layer, {}
    table = torch.randperm(12)[:8].reshape(2, 4).int()
    triton = functools.partial(ops.paged_attention, impl="triton")
    buffers = set()
    for lengths in ([5, 50], [64, 3], [33, 0]):  # as a captured graph sees them: other lengths, the same buffers
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        plan = builder.plan(seq_lens, S)
        buffers.add((plan.schedule.data_ptr(), plan.part_out.data_ptr(), plan.part_lse.data_ptr()))
        q, outs = torch.randn(2 * S, H, 32), []
        for planned, attention in ((plan, triton), (None, ops.paged_attention)):
            monkeypatch.setattr("gva.serve.paths.ops.paged_attention", attention)
            out = torch.full((2 * S, H, 32), float("nan"))
            run = Absorbed(slice(0, 2 * S), table, seq_lens, None, S, planned)
            run.attend(layer, q, torch.empty(0), torch.empty(0), layer.kv_cache, out)
            outs.append(out)
        monkeypatch.undo()
        torch.testing.assert_close(outs[0], outs[1])
    assert len(buffers) == 1
    other = builder.plan(torch.tensor([5, 6, 7], dtype=torch.int32), S)
    assert other.part_out.data_ptr() == plan.part_out.data_ptr()
    assert other.schedule.data_ptr() != plan.schedule.data_ptr()


@pytest.mark.parametrize("S", [1, 3])
def test_a_padded_step_of_a_full_graph(monkeypatch, S):
    """vLLM pads a decode step to the size of a captured graph: more tokens, and requests of length 0 without tokens.
    The run must be the captured one, of all tokens with one plan; padding gives zeros."""
    real, padded = 2, 4
    layer, builder = layer_with_cache(), StepBuilder.__new__(StepBuilder)
    builder.layer, builder.plans, builder.expands = layer, {}, True
    builder.device, builder.reorder_batch_threshold = SimpleNamespace(type="cuda"), S
    table = torch.zeros(padded, 4, dtype=torch.int32)
    table[:real] = torch.randperm(11)[:8].reshape(real, 4) + 1
    seq_lens = torch.tensor([5, 50, 0, 0], dtype=torch.int32)
    starts = torch.tensor([0, S, 2 * S, 2 * S, 2 * S], dtype=torch.int32)
    step = SimpleNamespace(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        block_table_tensor=table,
        num_reqs=padded,
        num_actual_tokens=padded * S,
        max_query_len=S,
    )
    (run,) = builder.build(0, step).runs
    assert run.tokens == slice(0, padded * S)
    assert run.cu_seqlens_q is None
    assert run.plan is builder.plans[padded, S]
    q, nothing = torch.randn(padded * S, H, 32), torch.empty(0)
    out, wanted = (torch.full((padded * S, H, 32), float("nan")) for _ in range(2))
    exact = Absorbed(slice(0, real * S), table[:real], seq_lens[:real], None, S, None)
    exact.attend(layer, q[: real * S], nothing, nothing, layer.kv_cache, wanted[: real * S])
    wanted[real * S :] = 0
    triton = functools.partial(ops.paged_attention, impl="triton")
    monkeypatch.setattr("gva.serve.paths.ops.paged_attention", triton)
    run.attend(layer, q, nothing, nothing, layer.kv_cache, out)
    torch.testing.assert_close(out, wanted)


def test_a_prompt_that_attends_absorbed_has_no_kernel_of_its_own():
    """Kernels are compiled for each uniform number of new tokens: a prompt of any length must not count as one."""
    builder = StepBuilder.__new__(StepBuilder)
    builder.layer, builder.plans, builder.expands = layer_with_cache(), {}, False
    builder.device, builder.reorder_batch_threshold = SimpleNamespace(type="cuda"), 1
    starts = torch.tensor([0, 7], dtype=torch.int32)
    step = SimpleNamespace(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([40], dtype=torch.int32),
        block_table_tensor=torch.arange(4, dtype=torch.int32)[None],
        num_reqs=1,
        num_actual_tokens=7,
        max_query_len=7,
    )
    (run,) = builder.build(0, step).runs
    assert run.cu_seqlens_q.tolist() == [0, 7]
    assert run.plan is None
    assert not builder.plans


def stand_in(
    q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, softmax_scale, causal, fa_version, out
):
    """FlashAttention's varlen function: one width, causal to the end of the keys."""
    assert causal
    assert fa_version == 3
    assert k.shape == v.shape == (int(cu_seqlens_k[-1]), *q.shape[1:])
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    out = torch.empty_like(q) if out is None else out
    bounds = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for (a, b), (c, d) in bounds:
        assert b - a <= max_seqlen_q
        assert d - c <= max_seqlen_k
        scores = torch.einsum("shd,thd->hst", q[a:b], k[c:d]) * softmax_scale
        hidden = torch.ones(b - a, d - c).triu(d - c - (b - a) + 1).bool()
        out[a:b] = torch.einsum("hst,thd->shd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v[c:d])
    return out


@pytest.mark.parametrize("key_width", [32, 48])  # additive: keys are wider
def test_flash_attention_is_given_what_the_plain_path_computes(monkeypatch, key_width):
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", stand_in, raising=False)
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda *args, **kwargs: 3)
    starts_q, starts_k = [0, 3, 10], [0, 20, 27]
    on_device = [torch.tensor(x, dtype=torch.int32) for x in (starts_q, starts_k)]
    run = Expanded(slice(0, 10), *on_device, starts_q, starts_k, None)
    q, k, v = torch.randn(10, H, key_width), torch.randn(27, H, key_width), torch.randn(27, H, 32)
    outs = [torch.empty(10, H, 32) for _ in range(2)]
    run._flash(q, k, v, 0.2, outs[0])
    run._plain(q, k, v, 0.2, outs[1])
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("fp8", [False, True])
def test_expanded_reads_what_absorbed_reads(fp8):
    """A piece of a prompt whose earlier tokens are cached: both ways see the same rows."""
    layer = layer_with_cache(fp8)
    table = torch.randperm(12)[:8].reshape(2, 4).int()
    lengths, starts_q, starts_k = torch.tensor([40, 21], dtype=torch.int32), [0, 5, 9], [0, 40, 61]
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in (starts_q, starts_k))
    slots = slots_of(table, cu_k, 61, BLOCK)
    q = torch.randn(9, H, 32)
    outs = [torch.empty(9, H, 32) for _ in range(2)]
    nothing = torch.empty(0)
    runs = (
        Expanded(slice(0, 9), cu_q, cu_k, starts_q, starts_k, slots),
        Absorbed(slice(0, 9), table, lengths, cu_q, 5, None),
    )
    for run, out in zip(runs, outs, strict=True):
        run.attend(layer, q, nothing, nothing, layer.kv_cache, out)
    torch.testing.assert_close(*outs)
