"""The parts of a step that only a GPU takes, as far as a CPU can try them: plans in Triton's interpreter, and the call
into FlashAttention with a stand-in of the same arguments."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-serve")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gva.attention import Part, Row
from gva.attention import gva as gva_attention
from gva.attention.base import JoinedQuery
from gva.ops import dense, fast
from gva.ops.dense import Spans
from gva.paged import attend
from gva.paged.attend import Absorbed, Expanded, slots_of
from gva.paged.pages import storage
from gva.serve import flash
from gva.serve.attention import served
from gva.serve.backend import GvaImpl, StepBuilder, StepMetadata

H, BLOCK = 4, 16
SERVED = served(gva_attention.GroupedValueAttention)


class Layer(SERVED):
    """An attention layer outside a model, whose cache holds noise in the shape that vLLM hands out."""

    def __init__(self, fp8=False, pages=12):
        torch.nn.Module.__init__(self)
        self.local_row, self.dtype, self.fp8 = Row((Part(2, 32),), Part(1, 16, shared=True)), torch.float32, fp8
        self.config = SimpleNamespace(
            content_dim=16, rope_dim=16, value_head_dim=32, score_dim=32, map_init="scale_matched"
        )
        self.num_heads, self.scaling = H, 32**-0.5
        self.key_map = SimpleNamespace(weight=torch.randn(H, 16, 32) / 4)
        tokens = pages * BLOCK
        (((width,), dtype),) = storage(self.local_row, "rows", self.dtype, fp8)
        self.kv_cache = torch.zeros(pages, 1, BLOCK, width, dtype=dtype)
        self.pages.write((torch.randn(tokens, 2, 32), torch.randn(tokens, 16)), torch.arange(tokens))


def run_alone(stretch, layer, q, out, row=()):
    """q [N, H, d_qk] through one stretch of a step."""
    with torch.no_grad():
        stretch.attend(layer, layer.pages, JoinedQuery(q, 16), row, out)


def spans(starts):
    return Spans(starts, torch.tensor(starts, dtype=torch.int32))


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
            stretch = Absorbed(slice(0, 2 * S), table, seq_lens, None, S, planned)
            run_alone(stretch, layer, q, out)
            outs.append(out)
        torch.testing.assert_close(outs[0], outs[1])
    assert len(buffers) == 1
    other = builder.plan(torch.tensor([5, 6, 7], dtype=torch.int32), S)
    assert other.part_out.data_ptr() == plan.part_out.data_ptr()
    assert other.schedule.data_ptr() != plan.schedule.data_ptr()


@pytest.mark.parametrize("S", [1, 3])
def test_a_padded_step_of_a_full_graph(S):
    """vLLM pads a decode step to the size of a captured graph: more tokens, and requests of length 0 without tokens.
    The stretch must be the captured one, of all tokens with one plan; padding gives zeros."""
    real, padded = 2, 4
    layer, builder = Layer(), StepBuilder.__new__(StepBuilder)
    builder.layer, builder.others, builder.plans, builder.expands = layer, {}, {}, True
    builder.kernel, builder.device, builder.reorder_batch_threshold = None, SimpleNamespace(type="cuda"), S
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
    (stretch,) = builder.build(0, step).stretches
    assert stretch.tokens == slice(0, padded * S)
    assert stretch.cu_seqlens_q is None
    assert stretch.plan is builder.plans[padded, S]
    q = torch.randn(padded * S, H, 32)
    out, wanted = (torch.full((padded * S, H, 32), float("nan")) for _ in range(2))
    exact = Absorbed(slice(0, real * S), table[:real], seq_lens[:real], None, S, None)
    run_alone(exact, layer, q[: real * S], wanted[: real * S])
    wanted[real * S :] = 0
    run_alone(stretch, layer, q, out)
    torch.testing.assert_close(out, wanted)


def test_a_prompt_that_attends_absorbed_has_no_kernel_of_its_own():
    """Kernels are compiled for each uniform number of new tokens: a prompt of any length must not count as one."""
    builder = StepBuilder.__new__(StepBuilder)
    builder.layer, builder.others, builder.plans, builder.expands = Layer(), {}, {}, False
    builder.kernel, builder.device, builder.reorder_batch_threshold = None, SimpleNamespace(type="cuda"), 1
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
    (stretch,) = builder.build(0, step).stretches
    assert stretch.cu_seqlens_q.tolist() == [0, 7]
    assert stretch.plan is None
    assert not builder.plans


def stand_in(
    q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, softmax_scale, causal, fa_version,
    return_softmax_lse, out
):  # fmt: skip
    """FlashAttention's varlen function: one width, causal to the end of the keys."""
    assert fa_version == 3
    assert return_softmax_lse
    assert k.shape == v.shape == (int(cu_seqlens_k[-1]), *q.shape[1:])
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    out, lse = torch.empty_like(q) if out is None else out, torch.empty(q.shape[1], len(q))
    bounds = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for (a, b), (c, d) in bounds:
        assert b - a <= max_seqlen_q
        assert d - c <= max_seqlen_k
        scores = torch.einsum("shd,thd->hst", q[a:b], k[c:d]) * softmax_scale
        if causal:
            scores.masked_fill_(torch.ones(b - a, d - c).triu(d - c - (b - a) + 1).bool(), float("-inf"))
        out[a:b] = torch.einsum("hst,thd->shd", scores.softmax(-1), v[c:d])
        lse[:, a:b] = scores.logsumexp(-1)
    return out, lse


@pytest.mark.parametrize("key_width", [32, 48])  # additive: keys are wider
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_is_given_what_the_plain_path_computes(monkeypatch, key_width, with_lse, causal):
    monkeypatch.setattr(flash, "_found", lambda: (stand_in, 3))
    q, k, v = torch.randn(10, H, key_width), torch.randn(27, H, key_width), torch.randn(27, H, 32)
    found = []
    for kernel in (flash.varlen, None):
        out = torch.empty(10, H, 32)
        queries, keys = spans([0, 3, 10]), spans([0, 20, 27])
        given, lse = dense.attend(q, k, v, queries, keys, 0.2, causal, out=out, with_lse=with_lse, kernel=kernel)
        assert given.data_ptr() == out.data_ptr()
        found.append((out, lse) if with_lse else (out,))
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("at_a_time", [7, 1000])
def test_expanded_reads_what_absorbed_reads(fp8, at_a_time, monkeypatch):
    """A piece of a prompt whose earlier tokens are cached, at once or part by part: both ways see the same rows."""
    monkeypatch.setattr(attend, "EXPANDED_TOKENS", at_a_time)
    layer = Layer(fp8)
    table = torch.randperm(12)[:8].reshape(2, 4).int()
    for lengths, starts_q, starts_k in (([40, 21], [0, 5, 9], [0, 40, 61]), ([50], [0, 6], [0, 50])):
        if at_a_time < 50 and len(lengths) > 1:
            continue  # a sequence that is too long goes alone
        queries, keys, new = spans(starts_q), spans(starts_k), starts_q[-1]
        own = table[: len(lengths)]
        slots = slots_of(own, keys, BLOCK)
        ends = [keys.starts[i + 1] - (b - a) + j for i, (a, b) in enumerate(pairwise(starts_q)) for j in range(b - a)]
        row = layer.pages.read(slots[torch.tensor(ends)])
        q, outs = torch.randn(new, H, 32), [torch.empty(new, H, 32) for _ in range(2)]
        longest, seq_lens = queries.longest, torch.tensor(lengths, dtype=torch.int32)
        expanded = Expanded(slice(0, new), queries, keys, slots)
        absorbed = Absorbed(slice(0, new), own, seq_lens, queries.on_device, longest, None)
        for stretch, out in zip((expanded, absorbed), outs, strict=True):
            run_alone(stretch, layer, q, out, row)
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
    builder.layer, builder.others, builder.plans, builder.expands = Layer(), {}, {}, True
    builder.kernel, builder.device, builder.reorder_batch_threshold = None, SimpleNamespace(type="cuda"), 1
    monkeypatch.setattr(StepBuilder, "plan", lambda *arguments: "a plan")
    step = mixed_step()
    with Recorded() as recorded:
        decodes, prompts = builder.build(0, step).stretches
    assert not [name for name in recorded.names if "lift_fresh" in name or "item" in name or "local_scalar" in name]
    assert (decodes.tokens, decodes.plan) == (slice(0, 2), "a plan")
    assert (prompts.tokens, prompts.queries.longest, prompts.keys.longest) == (slice(2, 15), 8, 40)
    assert prompts.queries.on_device.tolist() == prompts.queries.starts == [0, 8, 13]
    assert prompts.keys.on_device.tolist() == prompts.keys.starts == [0, 40, 45]
    assert prompts.queries.on_device.dtype == prompts.keys.on_device.dtype == torch.int32
    table = step.block_table_tensor[2:].tolist()
    at = [(0, position) for position in range(40)] + [(1, position) for position in range(5)]
    assert prompts.slots.tolist() == [table[i][position // BLOCK] * BLOCK + position % BLOCK for i, position in at]


def test_a_layer_of_a_mixed_step_asks_little_of_the_host(monkeypatch):
    """Steps with prompts run outside CUDA graphs: every torch op beside the kernels, which are left out here, is time
    in which the GPU may wait."""
    layer, kernels = Layer(), []
    expanded = torch.empty(27, H, 32), torch.empty(27, H, 32)

    def flash_kernel(*arguments):
        kernels.append("flash")
        return torch.empty(0), torch.empty(0, 0)

    monkeypatch.setattr(fast, "append", lambda *arguments: kernels.append("append"))
    monkeypatch.setattr(fast, "attend", lambda *arguments: kernels.append("decode"))
    monkeypatch.setattr(fast, "expand", lambda *arguments: (kernels.append("expand"), expanded)[1])
    monkeypatch.setattr(fast, "absorb", lambda q, maps: (kernels.append("absorb"), q)[1])
    monkeypatch.setattr(dense, "attend", lambda *arguments, **options: kernels.append("flash"))
    table, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([30, 40], dtype=torch.int32)
    keys = spans([0, 20, 27])
    decodes = Absorbed(slice(0, 2), table, lengths, None, 1, "a plan")
    prompts = Expanded(slice(2, 12), spans([0, 3, 10]), keys, slots_of(table, keys, BLOCK))
    impl, step = GvaImpl(H, 32, layer.scaling), StepMetadata(torch.arange(12), [decodes, prompts])
    q, k_rope, state, out = (torch.randn(12, *shape) for shape in ((H, 32), (16,), (2, 32), (H, 32)))
    with torch.no_grad(), Recorded() as recorded:
        impl.forward(layer, q, k_rope, state, layer.kv_cache, step, out)
    assert kernels == ["append", "absorb", "decode", "expand", "flash"]
    names = [name.split(".")[1] for name in recorded.names]
    assert set(names) <= {"view", "slice"}
    assert len(names) <= 8
