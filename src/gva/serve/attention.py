"""The attentions of `gva.attention` as layers of vLLM's: the same classes, their parameters split over ranks.

Tokens of all requests lie one after another, [N]. An attention that caches one state and one slice attends through our
backend; keys and values that are both cached are vLLM's own business. Names of weights are those of the checkpoint,
except that all projections of one input are one product, `in_proj`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention as StockAttention
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.kv_cache_interface import FullAttentionSpec

from gva.attention import Attention, Part, class_of
from gva.attention.rope import Rotation
from gva.paged.pages import LayerPages, pages_of, storage
from gva.serve import versions
from gva.serve.backend import GvaBackend
from gva.serve.checks import FP8


class JointProjection(MergedColumnParallelLinear):
    """Several projections of one input as one product, each split over ranks by its heads.

    Fewer heads than ranks are replicated, as k_rope, the latent and, on many ranks, the groups are: the checkpoint's
    rows are repeated, then split like all others.
    """

    def __init__(self, hidden_size: int, parts: dict[str, Part], bias: bool, quant_config: Any, prefix: str) -> None:
        ranks = get_tensor_model_parallel_world_size()
        self.names, self.parts = list(parts), list(parts.values())
        self.copies = [max(1, ranks // part.heads) for part in self.parts]
        sizes = [part.size * n for part, n in zip(self.parts, self.copies, strict=True)]
        super().__init__(hidden_size, sizes, bias=bias, quant_config=quant_config, prefix=prefix)
        self.local_sizes = [size // ranks for size in sizes]

    def repeated(self, weight: Tensor, part: int) -> Tensor:
        if self.copies[part] == 1:
            return weight
        return weight.unflatten(0, (self.parts[part].heads, -1)).repeat_interleave(self.copies[part], 0).flatten(0, 1)

    def weight_loader(self, param: Any, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
        super().weight_loader(param, self.repeated(loaded_weight, loaded_shard_id), loaded_shard_id)

    def weight_loader_v2(self, param: Any, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
        super().weight_loader_v2(param, self.repeated(loaded_weight, loaded_shard_id), loaded_shard_id)

    def forward(self, hidden_states: Tensor) -> list[Tensor]:
        """[N, heads, width] of each part, the heads of this rank."""
        joined, _ = super().forward(hidden_states)
        split = joined.split(self.local_sizes, dim=-1)
        return [x.unflatten(-1, (-1, part.width)) for x, part in zip(split, self.parts, strict=True)]


class OutputProjection(RowParallelLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class Norm(RMSNorm):
    """vLLM's kernel wants neighbours in memory, which parts of a joint product are not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.contiguous())


class PerHead(nn.Module):
    """The matrices of a map, those of this rank's heads: not a linear layer of vLLM's, which may repack its weight."""

    def __init__(self, heads: int, width: int, inner: int) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        self.weight = nn.Parameter(torch.empty(heads // ranks, width, inner), requires_grad=False)
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.flatten(0, 1))

    @staticmethod
    def load(param: Tensor, loaded_weight: Tensor) -> None:
        own = loaded_weight.chunk(get_tensor_model_parallel_world_size())[get_tensor_model_parallel_rank()]
        param.data.copy_(own.view(param.shape))


class Sharded(Attention):
    """Mixed into an attention: it makes its parameters of vLLM's layers."""

    def __init__(self, config: Any, vllm_config: Any, prefix: str) -> None:
        self.vllm_config, self.prefix = vllm_config, prefix
        self.ranks = get_tensor_model_parallel_world_size()
        super().__init__(config)

    def make_inputs(self, parts: dict[str, Part]) -> None:
        config, quant_config, prefix = self.config, self.vllm_config.quant_config, f"{self.prefix}.in_proj"
        self.in_proj = JointProjection(config.hidden_size, parts, config.qkv_bias, quant_config, prefix)

    def make_output(self, width: int, hidden_size: int) -> nn.Module:
        quant_config, bias = self.vllm_config.quant_config, self.config.output_bias
        prefix = f"{self.prefix}.o_proj"
        return OutputProjection(width, hidden_size, bias=bias, quant_config=quant_config, prefix=prefix)

    def make_norm(self, width: int) -> nn.Module:
        return Norm(width, eps=self.config.rms_norm_eps)

    def make_map(self, name: str, heads: int, width: int, inner: int) -> nn.Module:
        return PerHead(heads, width, inner)

    def inputs(self, hidden_states: Tensor) -> list[Tensor]:
        q, *others = self.in_proj(hidden_states)
        q_norm = self.q_norm
        return [q if q_norm is None else q_norm(q), *others]


class StockLayer(Sharded):
    """Keys and values, through vLLM's own attention."""

    def __init__(self, config: Any, vllm_config: Any, prefix: str) -> None:
        super().__init__(config, vllm_config, prefix)
        self.attn = StockAttention(
            config.num_attention_heads // self.ranks,
            config.value_head_dim,
            self.scaling,
            num_kv_heads=config.row.over(self.ranks).content[0].heads,
            cache_config=vllm_config.cache_config,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, hidden_states: Tensor, rotation: Rotation) -> Tensor:  # type: ignore[override]
        query, (k, v) = self.project(hidden_states, rotation)
        return self.o_proj(self.attn(query.content.flatten(1), k.flatten(1), v.flatten(1)))


class PagedLayer(Sharded, AttentionLayerBase):
    """One state and one rotated key per token: a layer of vLLM's with our backend."""

    def __init__(self, config: Any, vllm_config: Any, prefix: str) -> None:
        super().__init__(config, vllm_config, prefix)
        self.num_heads = config.num_attention_heads // self.ranks
        self.local_row = config.row.over(self.ranks)
        self.dtype = vllm_config.model_config.dtype
        self.fp8 = vllm_config.cache_config.cache_dtype in FP8
        self.impl = GvaBackend.get_impl_cls()(self.num_heads, config.score_dim, self.scaling)
        self.kv_cache = torch.tensor([])
        set_default_quant_scales(self, register_buffer=True)
        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"two attention layers are called {prefix!r}")
        layers[prefix] = self
        self.layer_name = prefix

    def get_attn_backend(self) -> type[GvaBackend]:
        return GvaBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> FullAttentionSpec:
        """One head as wide as a row, and no second tensor: what vLLM would call keys is the whole row."""
        (((width,), dtype),) = storage(self.local_row, "rows", self.dtype, self.fp8)
        block_size = vllm_config.cache_config.block_size
        return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=width, head_size_v=0, dtype=dtype)

    def forward(self, hidden_states: Tensor, rotation: Rotation) -> Tensor:  # type: ignore[override]
        """What vLLM's op calls query, key and value are whole queries [N, H, d_qk], k_rope [N, d_r] and the state."""
        query, (state, k_rope) = self.project(hidden_states, rotation)
        q, name = query.whole, _encode_layer_name(self.layer_name)
        out = q.new_empty(*q.shape[:2], self.config.value_head_dim)
        torch.ops.vllm.unified_attention_with_output(q, k_rope, state, out, name)
        return self.o_proj(out.flatten(1))

    # ---- what the backend asks, eagerly, at every layer: each torch op costs the host microseconds ----

    @property
    def kv_cache(self) -> Tensor:
        return self.bound_cache

    @kv_cache.setter
    def kv_cache(self, cache: Tensor) -> None:
        """vLLM binds the cache, or takes it away again, by assignment: the moment to view it, once."""
        self.bound_cache = cache
        self.pages: LayerPages | None = None
        if cache.numel():
            self.pages = pages_of(self.local_row, [versions.pages(cache)], self.dtype)

    def reserve_expanded(self, device: torch.device, tokens: int) -> None:
        """Hold for a moment what `expand` will give for so many tokens: vLLM measures the peak, then fills the rest."""
        if device.type == "cuda":
            width = self.num_heads * (self.config.score_dim + self.config.value_head_dim)
            torch.empty(tokens, width, dtype=self.dtype, device=device)


def served(attention: type[Attention]) -> type[Sharded]:
    """The attention as a layer of vLLM's."""
    layer = PagedLayer if attention.absorbs else StockLayer
    return type(f"Served{attention.__name__}", (layer, attention), {})


def build(config: Any, vllm_config: Any, prefix: str) -> nn.Module:
    return served(class_of(config))(config, vllm_config, prefix)
