"""The parts of a step that only a GPU takes, as far as a CPU can try them: plans in Triton's interpreter, and the call
into FlashAttention with a stand-in of the same arguments."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-serve")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gva.serve import attention, paths, rows
from gva.serve.attention import GroupedValueAttention
from gva.serve.backend import GvaImpl, StepBuilder, StepMetadata, slots_of
from gva.serve.paths import Absorbed, Expanded
from gva.serve.rows import Row

H, BLOCK = 4, 16


class Layer(GroupedValueAttention):
    """An attention layer outside a model, whose cache holds noise in the shape that vLLM hands out."""

    def __init__(self, fp8=False, pages=12):
        torch.nn.Module.__init__(self)
        self.row = Row(groups=2, width=32, rope_dim=16, dtype=torch.float32, fp8=fp8)
        self.num_heads, self.content_dim, self.scale = H, 16, 32**-0.5
        self.key_map = SimpleNamespace(weight=torch.randn(H, 16, 32) / 4)
        tokens = pages * BLOCK
        self.kv_cache = torch.zeros(pages, 1, BLOCK, self.row.size, dtype=self.row.storage_dtype)
        self.row.write(self.pages, torch.randn(tokens, 64), torch.randn(tokens, 16), torch.arange(tokens))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("S", [1, 3])
def test_a_plan_is_refilled_in_place_and_its_workspace_shared(fp8, S):
    layer = Layer(fp8)
    builder = StepBuilder.__new__(StepBuilder)
    builder.layer, builder.plans = layer, {}
    table = torch.randperm(12)[:8].reshape(2, 4).int()
    buffers = set()
    for lengths in ([5, 50], [64, 3], [33, 0]):  # as a captured graph sees them: other lengths, the same buffers
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        plan = builder.plan(seq_lens, S)
        buffers.add((plan.schedule.data_ptr(), plan.part_out.data_ptr(), plan.part_lse.data_ptr()))
        q, outs = torch.randn(2 * S, H, 32), []
        for planned in (plan, None):
            out = torch.full((2 * S, H, 32), float("nan"))
            run = Absorbed(slice(0, 2 * S), table, seq_lens, None, S, planned)
            run.attend(layer, q, torch.empty(0), torch.empty(0), out)
            outs.append(out)
        torch.testing.assert_close(outs[0], outs[1])
    assert len(buffers) == 1
    other = builder.plan(torch.tensor([5, 6, 7], dtype=torch.int32), S)
    assert other.part_out.data_ptr() == plan.part_out.data_ptr()
    assert other.schedule.data_ptr() != plan.schedule.data_ptr()


@pytest.mark.parametrize("S", [1, 3])
def test_a_padded_step_of_a_full_graph(S):
    """vLLM pads a decode step to the size of a captured graph: more tokens, and requests of length 0 without tokens.
    The run must be the captured one, of all tokens with one plan; padding gives zeros."""
    real, padded = 2, 4
    layer, builder = Layer(), StepBuilder.__new__(StepBuilder)
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
        slot_mapping=torch.full((padded * S,), -1),
    )
    (run,) = builder.build(0, step).runs
    assert run.tokens == slice(0, padded * S)
    assert run.cu_seqlens_q is None
    assert run.plan is builder.plans[padded, S]
    q, nothing = torch.randn(padded * S, H, 32), torch.empty(0)
    out, wanted = (torch.full((padded * S, H, 32), float("nan")) for _ in range(2))
    exact = Absorbed(slice(0, real * S), table[:real], seq_lens[:real], None, S, None)
    exact.attend(layer, q[: real * S], nothing, nothing, wanted[: real * S])
    wanted[real * S :] = 0
    run.attend(layer, q, nothing, nothing, out)
    torch.testing.assert_close(out, wanted)


def test_a_prompt_that_attends_absorbed_has_no_kernel_of_its_own():
    """Kernels are compiled for each uniform number of new tokens: a prompt of any length must not count as one."""
    builder = StepBuilder.__new__(StepBuilder)
    builder.layer, builder.plans, builder.expands = Layer(), {}, False
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
        slot_mapping=torch.arange(7),
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
    monkeypatch.setattr(paths, "flash", lambda: (stand_in, 3))
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
    layer = Layer(fp8)
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
        run.attend(layer, q, nothing, nothing, out)
    torch.testing.assert_close(*outs)


class Recorded(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


def mixed_step():
    """Two requests that decode, a piece of a prompt with 32 tokens cached before it, a prompt from its start."""
    starts = torch.tensor([0, 1, 2, 10, 15], dtype=torch.int32)
    seq_lens = torch.tensor([30, 50, 40, 5], dtype=torch.int32)
    return SimpleNamespace(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens,
        slot_mapping=torch.arange(15),
        block_table_tensor=torch.randperm(16).reshape(4, 4).int(),
        num_reqs=4,
        num_actual_tokens=15,
        max_query_len=8,
    )


def test_nothing_of_a_step_is_copied_from_the_host(monkeypatch):
    """A copy from pageable memory may wait until the GPU has done all before it."""
    builder = StepBuilder.__new__(StepBuilder)
    builder.layer, builder.plans, builder.expands = Layer(), {}, True
    builder.device, builder.reorder_batch_threshold = SimpleNamespace(type="cuda"), 1
    monkeypatch.setattr(StepBuilder, "plan", lambda *arguments: "a plan")
    step = mixed_step()
    with Recorded() as recorded:
        decodes, prompts = builder.build(0, step).runs
    assert not [name for name in recorded.names if "lift_fresh" in name or "item" in name or "local_scalar" in name]
    assert (decodes.tokens, decodes.plan) == (slice(0, 2), "a plan")
    assert (prompts.tokens, prompts.max_seqlen_q, prompts.max_seqlen_k) == (slice(2, 15), 8, 40)
    assert prompts.cu_seqlens_q.tolist() == prompts.starts_q == [0, 8, 13]
    assert prompts.cu_seqlens_k.tolist() == prompts.starts_k == [0, 40, 45]
    assert prompts.cu_seqlens_q.dtype == prompts.cu_seqlens_k.dtype == torch.int32
    table = step.block_table_tensor[2:].tolist()
    at = [(0, position) for position in range(40)] + [(1, position) for position in range(5)]
    assert prompts.slots.tolist() == [table[i][position // BLOCK] * BLOCK + position % BLOCK for i, position in at]


def test_a_layer_of_a_mixed_step_asks_little_of_the_host(monkeypatch):
    """Steps with prompts run outside CUDA graphs: every torch op beside the kernels, which are left out here, is time
    in which the GPU may wait."""
    layer, kernels = Layer(), []
    monkeypatch.setattr(paths, "flash", lambda: (lambda **arguments: kernels.append("flash"), 3))
    monkeypatch.setattr(Expanded, "_plain", Expanded._flash)
    monkeypatch.setattr(rows.fast, "append", lambda *arguments: kernels.append("append"))
    expanded = torch.empty(27, H, 32), torch.empty(27, H, 32)
    monkeypatch.setattr(attention.fast, "expand", lambda *arguments: (kernels.append("expand"), expanded)[1])
    monkeypatch.setattr(attention.fast, "absorb", lambda q, maps: (kernels.append("absorb"), q)[1])
    monkeypatch.setattr(paths.fast, "attend", lambda *arguments: kernels.append("decode"))
    table, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([30, 40], dtype=torch.int32)
    starts_q, starts_k = [0, 3, 10], [0, 20, 27]
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in (starts_q, starts_k))
    decodes = Absorbed(slice(0, 2), table, lengths, None, 1, object())
    prompts = Expanded(slice(2, 12), cu_q, cu_k, starts_q, starts_k, slots_of(table, cu_k, 27, BLOCK))
    impl, step = GvaImpl(H, 32, layer.scale), StepMetadata(torch.arange(12), [decodes, prompts])
    q, k_rope, state, out = (torch.randn(12, width) for width in (H * 32, 16, 64, H * 32))
    with Recorded() as recorded:
        impl.forward(layer, q, k_rope, state, layer.kv_cache, step, out)
    assert kernels == ["append", "absorb", "decode", "expand", "flash"]
    assert {name.split(".")[1] for name in recorded.names} == {"view", "slice"}
    assert len(recorded.names) <= 8
