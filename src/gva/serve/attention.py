"""The attentions of `gva.attention`, as vLLM wants them: tokens of all requests in one row, heads split over ranks.

GVA, GTA and MLA cache one row per token and attend through our backend; the GQA family is vLLM's own. Names of
weights are those of the checkpoint, except that all projections of one input are one product, `in_proj`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.kv_cache_interface import FullAttentionSpec

from gva.attention.rope import Rotation, rotate
from gva.ops import Pages, fast
from gva.serve.backend import GvaBackend
from gva.serve.checks import FP8
from gva.serve.rows import Row


class JointProjection(MergedColumnParallelLinear):
    """Several projections of one input as one product, each split over ranks by its heads.

    `parts` names each with its heads and the width of one. Fewer heads than ranks are replicated, as k_rope, the
    latent and, on many ranks, the groups are: the checkpoint's rows are repeated, then split like all others.
    """

    def __init__(self, hidden_size: int, parts: dict[str, tuple[int, int]], quant_config: Any, prefix: str) -> None:
        ranks = get_tensor_model_parallel_world_size()
        self.names = list(parts)
        self.heads = [heads for heads, _ in parts.values()]
        self.copies = [max(1, ranks // heads) for heads in self.heads]
        sizes = [heads * width * n for (heads, width), n in zip(parts.values(), self.copies, strict=True)]
        super().__init__(hidden_size, sizes, bias=False, quant_config=quant_config, prefix=prefix)
        self.local_sizes = [size // ranks for size in sizes]

    def repeated(self, weight: Tensor, part: int) -> Tensor:
        if self.copies[part] == 1:
            return weight
        return weight.unflatten(0, (self.heads[part], -1)).repeat_interleave(self.copies[part], 0).flatten(0, 1)

    def weight_loader(self, param: Any, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
        super().weight_loader(param, self.repeated(loaded_weight, loaded_shard_id), loaded_shard_id)

    def weight_loader_v2(self, param: Any, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
        super().weight_loader_v2(param, self.repeated(loaded_weight, loaded_shard_id), loaded_shard_id)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        joined, _ = super().forward(hidden_states)
        return joined.split(self.local_sizes, dim=-1)


class PerHead(nn.Module):
    """A matrix [width, inner] for each head of this rank: read, never called, so not a linear layer of vLLM's, which
    may repack its weight."""

    def __init__(self, heads: int, width: int, inner: int) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        self.weight = nn.Parameter(torch.empty(heads // ranks, width, inner), requires_grad=False)
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    @staticmethod
    def load(param: Tensor, loaded_weight: Tensor) -> None:
        own = loaded_weight.chunk(get_tensor_model_parallel_world_size())[get_tensor_model_parallel_rank()]
        param.data.copy_(own.view(param.shape))


class ServedAttention(nn.Module):
    """What all share: the joint projection, the query norm, the output projection."""

    def __init__(self, config: Any, vllm_config: Any, prefix: str) -> None:
        super().__init__()
        ranks, quant_config = get_tensor_model_parallel_world_size(), vllm_config.quant_config
        self.config = config
        self.num_heads = config.num_attention_heads // ranks
        self.groups = max(1, config.num_value_groups // ranks)
        self.query_dim, self.value_dim = config.score_dim, config.value_head_dim
        self.content_dim = config.content_dim
        self.scale = config.score_dim**-0.5
        parts = {"q_proj": (config.num_attention_heads, config.score_dim), **self.cached_parts(config)}
        self.in_proj = JointProjection(config.hidden_size, parts, quant_config, f"{prefix}.in_proj")
        width = config.num_attention_heads * config.value_head_dim
        self.o_proj = RowParallelLinear(
            width, config.hidden_size, bias=False, quant_config=quant_config, prefix=f"{prefix}.o_proj"
        )
        self.q_norm = RMSNorm(config.score_dim, eps=config.rms_norm_eps) if config.query_norm else None

    def cached_parts(self, config: Any) -> dict[str, tuple[int, int]]:
        """The projections beside the queries: heads and width of each."""
        raise NotImplementedError

    def queries(self, q: Tensor) -> Tensor:
        """[N, H, d_qk], normalised if the config says so."""
        q = q.unflatten(-1, (self.num_heads, self.query_dim))
        return q if self.q_norm is None else self.q_norm(q.contiguous())


class GroupedQueryAttention(ServedAttention):
    """MHA, MQA and GQA, through vLLM's own attention."""

    def __init__(self, config: Any, vllm_config: Any, prefix: str) -> None:
        super().__init__(config, vllm_config, prefix)
        self.attn = Attention(
            self.num_heads,
            config.value_head_dim,
            self.scale,
            num_kv_heads=self.groups,
            cache_config=vllm_config.cache_config,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.attn",
        )

    def cached_parts(self, config: Any) -> dict[str, tuple[int, int]]:
        part = config.num_value_groups, config.value_head_dim
        return {"k_proj": part, "v_proj": part}

    def forward(self, hidden_states: Tensor, rotation: Rotation) -> Tensor:
        q, k, v = self.in_proj(hidden_states)
        q = rotate(self.queries(q), rotation)
        k = rotate(k.unflatten(-1, (self.groups, self.value_dim)), rotation)
        return self.o_proj(self.attn(q.flatten(1), k.flatten(1), v))[0]


class DecoupledAttention(ServedAttention, AttentionLayerBase):
    """Attentions that cache one state and one rotated key per token: they are layers of vLLM's, with our backend."""

    attends_in_place = True  # what the absorbed form gives are the values themselves

    def __init__(self, config: Any, vllm_config: Any, prefix: str) -> None:
        super().__init__(config, vllm_config, prefix)
        cache_dtype = vllm_config.cache_config.cache_dtype
        groups, width = self.state_shape(config)
        self.row = Row(groups, width, config.rope_dim, vllm_config.model_config.dtype, cache_dtype in FP8)
        self.impl = GvaBackend.get_impl_cls()(self.num_heads, self.query_dim, self.scale)
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
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.row.size,
            head_size_v=0,
            dtype=self.row.storage_dtype,
        )

    def state_shape(self, config: Any) -> tuple[int, int]:
        """Groups on this rank, and the width of one, of the cached state."""
        return self.groups, config.value_head_dim

    def cached_parts(self, config: Any) -> dict[str, tuple[int, int]]:
        return {"v_proj": (config.num_value_groups, config.value_head_dim), "k_rope_proj": (1, config.rope_dim)}

    def state(self, projected: Tensor) -> Tensor:
        return projected

    def forward(self, hidden_states: Tensor, rotation: Rotation) -> Tensor:
        q, state, k_rope = self.in_proj(hidden_states)
        q_nope, q_rope = self.queries(q).split((self.content_dim, self.config.rope_dim), dim=-1)
        q = torch.cat((q_nope, rotate(q_rope, rotation)), dim=-1).flatten(1)
        k_rope = rotate(k_rope[:, None], rotation).flatten(1)
        state, name = self.state(state), _encode_layer_name(self.layer_name)
        out = q.new_empty(q.shape[0], self.num_heads * self.value_dim)
        torch.ops.vllm.unified_attention_with_output(q, k_rope, state, out, name)
        return self.o_proj(out)[0]

    # ---- what the runs of a step ask, eagerly, at every layer: each torch op costs the host microseconds ----

    @property
    def kv_cache(self) -> Tensor:
        return self.bound_cache

    @kv_cache.setter
    def kv_cache(self, cache: Tensor) -> None:
        """vLLM binds the cache, or takes it away again, by assignment: the moment to view it, once."""
        self.bound_cache = cache
        self.pages: Pages | None = self.row.views(cache) if cache.numel() else None

    def absorb(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Queries for the state as it lies, [n, H, width], and their rotated slice, of q [n, H, d_qk]."""
        return fast.absorb(q, self.maps()), q[..., self.content_dim :]

    def maps(self) -> Tensor:
        """M_h^T of every head on this rank, [H, d_n, width]."""
        raise NotImplementedError

    def expand(self, state: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [T, H, d_qk] and values [T, H, d_h] of the state [T, G, width] and k_rope [T, d_r]."""
        return fast.expand(state, k_rope, self.maps())

    def expand_cached(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The same of cached tokens, at slots [T]."""
        return self.expand(*self.row.read(self.kv_cache, slots))

    def values_of(self, attended: Tensor, out: Tensor) -> None:
        """Values [n, H, d_h], into `out`, of what the absorbed form attended, unless that is `out` already."""

    def reserve_expanded(self, device: torch.device, tokens: int) -> None:
        """Hold for a moment what `expand` will give for so many tokens: vLLM measures the peak, then fills the rest."""
        if device.type == "cuda":
            width = self.num_heads * (self.query_dim + self.value_dim)
            torch.empty(tokens, width, dtype=self.row.dtype, device=device)


class GroupedValueAttention(DecoupledAttention):
    def __init__(self, config: Any, vllm_config: Any, prefix: str) -> None:
        super().__init__(config, vllm_config, prefix)
        self.key_map = PerHead(config.num_attention_heads, config.content_dim, config.value_head_dim)

    def maps(self) -> Tensor:
        return self.key_map.weight

    def expand_cached(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        if self.row.fp8 or self.pages is None:
            return super().expand_cached(slots)
        values, rope, _ = self.pages
        return fast.expand(values, rope, self.maps(), slots)  # reads the pages itself


class GroupedTiedAttention(DecoupledAttention):
    """GTA: the map is [I; 0], so a query absorbs it by growing zeros."""

    def absorb(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q_nope, q_rope = q[..., : self.content_dim], q[..., self.content_dim :]
        return nn.functional.pad(q_nope, (0, self.row.width - self.content_dim)), q_rope

    def expand(self, state: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        state = state.repeat_interleave(self.num_heads // self.row.groups, dim=1)
        k_rope = k_rope[:, None].expand(-1, self.num_heads, -1)
        return torch.cat((state[..., : self.content_dim], k_rope), dim=-1), state


class LatentAttention(DecoupledAttention):
    """MLA: one group as wide as the latent, on every rank; what is attended in it becomes values afterwards."""

    attends_in_place = False

    def __init__(self, config: Any, vllm_config: Any, prefix: str) -> None:
        super().__init__(config, vllm_config, prefix)
        self.latent_norm = RMSNorm(config.latent_dim, eps=config.rms_norm_eps)
        self.k_up_proj = PerHead(config.num_attention_heads, config.content_dim, config.latent_dim)
        self.v_up_proj = PerHead(config.num_attention_heads, config.value_head_dim, config.latent_dim)

    def state_shape(self, config: Any) -> tuple[int, int]:
        return 1, config.latent_dim

    def cached_parts(self, config: Any) -> dict[str, tuple[int, int]]:
        return {"latent_proj": (1, config.latent_dim), "k_rope_proj": (1, config.rope_dim)}

    def state(self, projected: Tensor) -> Tensor:
        return self.latent_norm(projected.contiguous())

    def maps(self) -> Tensor:
        return self.k_up_proj.weight

    def expand(self, state: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        k_nope, v = (
            nn.functional.linear(state[:, 0], up.weight.flatten(0, 1)).unflatten(-1, (self.num_heads, -1))
            for up in (self.k_up_proj, self.v_up_proj)
        )
        return torch.cat((k_nope, k_rope[:, None].expand(-1, self.num_heads, -1)), dim=-1), v

    def values_of(self, attended: Tensor, out: Tensor) -> None:
        out.copy_(torch.bmm(attended.transpose(0, 1), self.v_up_proj.weight.transpose(1, 2)).transpose(0, 1))


CLASSES: dict[str, type[ServedAttention]] = {
    "mha": GroupedQueryAttention,
    "mqa": GroupedQueryAttention,
    "gqa": GroupedQueryAttention,
    "mla": LatentAttention,
    "gva": GroupedValueAttention,
    "gta": GroupedTiedAttention,
}
