"""vLLM's attention backend: how the requests of a step are cut into stretches (`gva.paged.attend`).

vLLM puts requests with few new tokens first. Those attend absorbed; the others, which are prompts or pieces of them,
expanded. Decode steps alone run in full CUDA graphs: what kernels read then lies in buffers that outlive the step,
which are vLLM's own and those of the plans kept here.
"""

from dataclasses import dataclass, field, replace
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
from gva.attention import Row
from gva.attention.base import JoinedQuery
from gva.ops.dense import Spans
from gva.ops.layout import misfit
from gva.paged.attend import EXPANDED_TOKENS, Absorbed, Expanded, attend, slots_of, together
from gva.serve import flash
from gva.serve.versions import PageShape


@dataclass
class StepMetadata(AttentionMetadata):
    """Where the step's new rows go, [N], and its stretches, in the order of their tokens; `others` are those of layers
    whose rows are cut otherwise than the first layer's, by row."""

    slots: Tensor
    stretches: list[Any]
    others: dict[Row, list[Any]] = field(default_factory=dict)

    def of(self, layer: Any) -> list[Any]:
        return self.others.get(layer.local_row, self.stretches) if self.others else self.stretches


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
        return False  # stretches are cut by the query counts that the host knows


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
        """query [N, H, d_qk], its slice rotated; key [N, d_r], rotated, and value [N, G, width], the state of the new
        tokens -> output [N, H, d_h]. Tokens past the last stretch pad a graph."""
        if attn_metadata is None:  # vLLM measures memory: hold what the largest prompt will
            layer.reserve_expanded(query.device, max(EXPANDED_TOKENS, len(query)))
            return output.zero_()
        q = JoinedQuery(query, layer.config.content_dim)
        attend(layer, layer.pages, q, (value, key), attn_metadata.slots, attn_metadata.of(layer), output)
        return output


class StepBuilder(AttentionMetadataBuilder[StepMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
        self.layer = layers[0]
        self.others = {layer.local_row: layer for layer in layers if layer.local_row != self.layer.local_row}
        self.plans: dict[tuple[Any, ...], ops.DecodePlan] = {}
        self.kernel = flash.varlen if device.type == "cuda" else None
        takes = all(flash.takes(layer.dtype, layer.config.score_dim) for layer in layers)
        self.expands = device.type == "cpu" or takes

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepMetadata:
        step = common_attn_metadata
        starts = step.query_start_loc_cpu[: step.num_reqs + 1].tolist()
        few = self.reorder_batch_threshold if self.expands else step.max_query_len
        stretches: list[Any] = []
        if step.max_query_len <= few:
            stretches.append(self.absorbed(step, 0, step.num_reqs, starts, step.num_actual_tokens))
        else:
            counts = [last - first for first, last in pairwise(starts)]
            decodes = next(i for i, count in enumerate(counts) if count > few)
            if decodes:
                stretches.append(self.absorbed(step, 0, decodes, starts, starts[decodes]))
            stretches += self.prompts(step, decodes, starts)
        others = {row: [self.planned_for(layer, s) for s in stretches] for row, layer in self.others.items()}
        return StepMetadata(step.slot_mapping, stretches, others)

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

    def planned_for(self, layer: Any, stretch: Any) -> Any:
        """The same stretch for a layer whose row is cut otherwise."""
        if getattr(stretch, "plan", None) is None:
            return stretch
        return replace(stretch, plan=self.plan(stretch.seq_lens, stretch.max_seqlen_q, layer))

    def plan(self, seq_lens: Tensor, S: int, layer: Any = None) -> ops.DecodePlan:
        """The plan of this many requests with S new tokens each, refilled in place: a CUDA graph captured with it
        stays valid. All plans share one workspace, for steps come one after another."""
        key: tuple[Any, ...] = (len(seq_lens), S) if layer is None else (len(seq_lens), S, layer.local_row)
        if key in self.plans:
            return self.plans[key].update(seq_lens)
        layer = layer or self.layer
        pages = layer.pages.packed
        (state,), k_rope = layer.local_row.content, layer.local_row.rope
        plan = ops.plan_decode(
            seq_lens,
            H=layer.num_heads,
            G=state.heads,
            d_h=state.width,
            d_r=k_rope.width,
            page=pages.values.shape[1],
            dtype=layer.dtype,
            value_dtype=pages.values.dtype,
            max_seqlen_q=S,
            row_stride=pages.values.stride(1),
            impl=None if misfit(pages) is None else "triton",  # checked here, not at every call
        )
        for other in self.plans.values():
            if other.part_out.shape == plan.part_out.shape:
                plan = replace(plan, part_out=other.part_out, part_lse=other.part_lse)
                break
        self.plans[key] = plan
        return plan

    def prompts(self, step: Any, first: int, starts: list[int]) -> list[Expanded]:
        """Runs of the requests from `first` on."""
        lengths = host_lengths(step)[: step.num_reqs].tolist()
        return [self.expanded(step, first + a, first + b, starts, lengths) for a, b in together(lengths[first:])]

    def expanded(self, step: Any, first: int, last: int, starts: list[int], lengths: list[int]) -> Expanded:
        starts_q = [start - starts[first] for start in starts[first : last + 1]]
        starts_k = list(accumulate(lengths[first:last], initial=0))
        # Of what is on the device already: to copy from pageable memory may wait for all steps before this one.
        queries = keys = Spans(starts_q, query_starts(step, first, last))
        slots = None
        if starts_k != starts_q:  # some of it is cached
            on_device = torch.nn.functional.pad(step.seq_lens[first:last].cumsum(0, dtype=torch.int32), (1, 0))
            keys = Spans(starts_k, on_device)
            slots = slots_of(step.block_table_tensor[first:last], keys, self.layer.pages.page)
        return Expanded(slice(starts[first], starts[last]), queries, keys, slots, self.kernel)


def query_starts(step: Any, first: int, last: int) -> Tensor:
    """Where the new tokens of requests `first` to `last` begin among theirs, [B+1], on the device."""
    starts = step.query_start_loc[first : last + 1]
    return starts - starts[0] if first else starts


def host_lengths(step: Any) -> Tensor:
    """Tokens of each request on the host. vLLM's bound is exact for prompts, which alone are asked for."""
    bound = getattr(step, "seq_lens_cpu_upper_bound", None)
    return step.seq_lens.cpu() if bound is None else bound
