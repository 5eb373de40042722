"""vLLM's attention backend: how the requests of a step are cut into runs, and who attends.

vLLM puts requests with few new tokens first. Those attend absorbed; the others, which are prompts or pieces of them,
expanded. Decode steps alone run in full CUDA graphs: what kernels read then lies in buffers that outlive the step,
which are vLLM's own and those of the plans kept here.
"""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
)

from gva import ops
from gva.ops.layout import misfit
from gva.serve.paths import Absorbed, Expanded, flash_takes
from gva.serve.versions import PageShape, pages

EXPANDED_TOKENS = 32768  # that may have keys and values of every head at a time, where earlier tokens are cached


@dataclass
class StepMetadata(AttentionMetadata):
    """Where the step's new rows go, [N], and its runs, in the order of their tokens."""

    slots: Tensor
    runs: list[Absorbed | Expanded]


class GvaBackend(PageShape, AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3"]
    forward_includes_kv_cache_update = True  # a call less at every layer

    @staticmethod
    def get_name() -> str:
        return "GVA"

    @staticmethod
    def get_impl_cls() -> type["GvaImpl"]:
        return GvaImpl

    @staticmethod
    def get_builder_cls() -> type["StepBuilder"]:
        return StepBuilder

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # runs are cut by the query counts that the host knows


class GvaImpl(AttentionImpl):
    """What vLLM's op calls: it writes the new rows, then attends. Stateless beside its layer."""

    def __init__(self, num_heads: int, head_size: int, scale: float, **unused: Any) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.kv_cache_dtype = "auto"

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: StepMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [N, H*d_qk], its slice rotated; key [N, d_r], rotated, and value [N, G*width], the state of the new
        tokens -> output [N, H*d_h]. Tokens past the last run pad a graph."""
        if attn_metadata is None:  # vLLM measures memory: hold what the largest prompt will
            layer.reserve_expanded(query.device, max(EXPANDED_TOKENS, len(query)))
            return output.zero_()
        layer.row.write(layer.pages, value, key, attn_metadata.slots)
        q, out = (x.view(x.shape[0], self.num_heads, -1) for x in (query, output))
        for run in attn_metadata.runs:
            run.attend(layer, q, value, key, out)
        return output


class StepBuilder(AttentionMetadataBuilder[StepMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self.plans: dict[tuple[int, int], ops.DecodePlan] = {}
        dtype = self.layer.row.dtype
        self.expands = device.type == "cpu" or flash_takes(dtype, self.layer.query_dim)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepMetadata:
        step = common_attn_metadata
        starts = step.query_start_loc_cpu[: step.num_reqs + 1].tolist()
        few = self.reorder_batch_threshold if self.expands else step.max_query_len
        runs: list[Absorbed | Expanded] = []
        if step.max_query_len <= few:
            runs.append(self.absorbed(step, 0, step.num_reqs, starts, step.num_actual_tokens))
        else:
            counts = [last - first for first, last in pairwise(starts)]
            decodes = next(i for i, count in enumerate(counts) if count > few)
            if decodes:
                runs.append(self.absorbed(step, 0, decodes, starts, starts[decodes]))
            runs += self.prompts(step, decodes, starts)
        return StepMetadata(step.slot_mapping, runs)

    def absorbed(self, step: Any, first: int, last: int, starts: list[int], end: int) -> Absorbed:
        """Requests `first` to `last`, whose tokens end at `end`: a padded graph has more than its requests do."""
        tokens, count = slice(starts[first], end), last - first
        longest = max(b - a for a, b in pairwise(starts[first : last + 1]))
        # Kernels are compiled, and plans kept, for each uniform count: not for each length that a prompt may have.
        uniform = longest <= self.reorder_batch_threshold and tokens.stop - tokens.start == count * longest
        seq_lens, table = step.seq_lens[first:last], step.block_table_tensor[first:last]
        if self.device.type == "cpu":  # the reference reads whole tables: cut them to what is used
            block = self.kv_cache_spec.block_size
            table = table[:, : -(-step.max_seq_len // block)]
        if uniform:
            plan = self.plan(seq_lens, longest) if self.device.type == "cuda" else None
            return Absorbed(tokens, table, seq_lens, None, longest, plan)
        return Absorbed(tokens, table, seq_lens, query_starts(step, first, last), longest, None)

    def plan(self, seq_lens: Tensor, S: int) -> ops.DecodePlan:
        """The plan of this many requests with S new tokens each, refilled in place: a CUDA graph captured with it
        stays valid. All plans share one workspace, for steps come one after another."""
        key = len(seq_lens), S
        if key in self.plans:
            return self.plans[key].update(seq_lens)
        row, layer = self.layer.row, self.layer
        plan = ops.plan_decode(
            seq_lens,
            H=layer.num_heads,
            G=row.groups,
            d_h=row.width,
            d_r=row.rope_dim,
            page=pages(layer.kv_cache).shape[1],
            dtype=row.dtype,
            value_dtype=torch.float8_e4m3fn if row.fp8 else row.dtype,
            max_seqlen_q=S,
            row_stride=row.size,
            impl=None if misfit(layer.pages) is None else "triton",  # checked here, not at every call
        )
        for other in self.plans.values():
            if other.part_out.shape == plan.part_out.shape:
                plan = replace(plan, part_out=other.part_out, part_lse=other.part_lse)
                break
        self.plans[key] = plan
        return plan

    def prompts(self, step: Any, first: int, starts: list[int]) -> list[Absorbed | Expanded]:
        """Runs of the requests from `first` on: as many at a time as may have keys of every head. One that is longer
        attends absorbed, if some of it is cached; what is new of a prompt is bounded by the size of a step."""
        lengths = host_lengths(step).tolist()
        runs: list[Absorbed | Expanded] = []
        while first < step.num_reqs:
            last, total = first, 0
            while last < step.num_reqs and (last == first or total + lengths[last] <= EXPANDED_TOKENS):
                total += lengths[last]
                last += 1
            fresh = total == starts[last] - starts[first]
            if total > EXPANDED_TOKENS and not fresh:
                runs.append(self.absorbed(step, first, last, starts, starts[last]))
            else:
                runs.append(self.expanded(step, first, last, starts, lengths, fresh))
            first = last
        return runs

    def expanded(
        self, step: Any, first: int, last: int, starts: list[int], lengths: list[int], fresh: bool
    ) -> Expanded:
        starts_q = [start - starts[first] for start in starts[first : last + 1]]
        starts_k = list(accumulate(lengths[first:last], initial=0))
        # Of what is on the device already: to copy from pageable memory may wait for all steps before this one.
        cu_seqlens_q = cu_seqlens_k = query_starts(step, first, last)
        slots = None
        if not fresh:
            cu_seqlens_k = torch.nn.functional.pad(step.seq_lens[first:last].cumsum(0, dtype=torch.int32), (1, 0))
            table, block = step.block_table_tensor[first:last], pages(self.layer.kv_cache).shape[1]
            slots = slots_of(table, cu_seqlens_k, starts_k[-1], block)
        return Expanded(slice(starts[first], starts[last]), cu_seqlens_q, cu_seqlens_k, starts_q, starts_k, slots)


def query_starts(step: Any, first: int, last: int) -> Tensor:
    """Where the new tokens of requests `first` to `last` begin among theirs, [B+1], on the device."""
    starts = step.query_start_loc[first : last + 1]
    return starts - starts[0] if first else starts


def host_lengths(step: Any) -> Tensor:
    """Tokens of each request on the host. vLLM's bound is exact for prompts, which alone are asked for."""
    bound = getattr(step, "seq_lens_cpu_upper_bound", None)
    return step.seq_lens.cpu() if bound is None else bound


def slots_of(block_table: Tensor, cu_seqlens: Tensor, total: int, block: int) -> Tensor:
    """Where all tokens of all requests lie, one request after another: [total], without waiting for the device."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    requests = torch.arange(len(lengths), device=lengths.device)
    request = torch.repeat_interleave(requests, lengths, output_size=total)
    position = torch.arange(total, device=lengths.device) - cu_seqlens[request]
    return block_table[request, position // block].long() * block + position % block
