"""Counting: cache, parameters, and the FLOPs and bytes of a decode step. The one place that counts.

Every function takes a GvaConfig, or anything with its fields and derived widths; nothing here loads
transformers. What is counted is what the code of this package does: `tests/test_cost.py` holds each
figure against real modules and real caches.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gva.attention import class_of
from gva.errors import check, check_choice
from gva.ops import packed_row_bytes

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
Windows = Sequence[int | None]  # how many tokens each layer keeps; None: all of them
SIZE_UNITS = {"GiB": 2**30, "MiB": 2**20, "TiB": 2**40, "GB": 10**9, "MB": 10**6, "TB": 10**12, "B": 1}


def cache_scalars_per_token_per_layer(config: Any, ranks: int = 1) -> float:
    """On one of `ranks`; the mean over layers, a whole number where they are alike."""
    total = sum(layer.row.over(ranks).scalars for layer in config.layer_configs)
    return total / config.num_hidden_layers if total % config.num_hidden_layers else total // config.num_hidden_layers


def cache_row_bytes(config: Any, dtype: str = "bfloat16", ranks: int = 1) -> int:
    """Bytes per token of one layer, whose config this is, on one of `ranks`.

    fp8 keeps the positional slice in bfloat16 and adds one float32 scale per token and group (one for MLA's
    latent), the row padded to 16 bytes; without a slice it is FlashAttention's format, e4m3 with scales outside the
    rows.
    """
    check_choice("dtype", dtype, DTYPE_BYTES)
    row = config.row.over(ranks)
    if dtype != "fp8":
        return row.scalars * DTYPE_BYTES[dtype]
    if not row.packs:
        return row.scalars
    (state,) = row.content
    return packed_row_bytes(state.heads, state.width, row.rope.width)


def cache_bytes_per_token(config: Any, dtype: str = "bfloat16", ranks: int = 1) -> int:
    """Bytes per token over all layers, on one of `ranks`."""
    return sum(cache_row_bytes(layer, dtype, ranks) for layer in config.layer_configs)


def cache_bytes(config: Any, context: int, dtype: str = "bfloat16", windows: Windows | None = None) -> int:
    """Bytes of one sequence of `context` tokens over all layers."""
    return sum(kept * cache_row_bytes(layer, dtype) for layer, kept in _kept(config, context, windows))


def _kept(config: Any, context: int, windows: Windows | None) -> list[tuple[Any, int]]:
    """Each layer and how many tokens of the context it keeps."""
    check(context > 0, "context", context, "must be positive")
    bounds = windows or [None] * config.num_hidden_layers
    return [(layer, min(context, bound or context)) for layer, bound in zip(config.layer_configs, bounds, strict=True)]


def attention_parameters(config: Any) -> dict[str, int]:
    """Weights of one layer's attention, whose config this is, by the names of projections, biases, maps and norms."""
    hidden, H, chosen = config.hidden_size, config.num_attention_heads, class_of(config)
    outputs = {"q_proj": H * config.score_dim}
    outputs |= {name: part.size for name, part in chosen.projections(config).items()}
    parts = {name: hidden * width for name, width in outputs.items()}
    parts["o_proj"] = H * config.value_head_dim * hidden
    parts |= {name: H * width * inner for name, (width, inner) in chosen.maps(config).items()}
    parts |= {f"{name}.bias": width for name, width in outputs.items() if config.qkv_bias}
    parts |= {"o_proj.bias": hidden} if config.output_bias else {}
    return parts | chosen.norms(config)


def parameters(config: Any) -> dict[str, int]:
    """Parameters by part, and their total; a tied embedding is counted once."""
    layers, hidden = config.num_hidden_layers, config.hidden_size
    table = config.vocab_size * hidden
    biases = layers * (2 * config.intermediate_size + hidden) if config.mlp_bias else 0
    parts = {
        "embedding": table,
        "attention": sum(sum(attention_parameters(layer).values()) for layer in config.layer_configs),
        "feed_forward": layers * 3 * hidden * config.intermediate_size + biases,
        "norms": (2 * layers + 1) * hidden,
        "lm_head": 0 if config.tie_word_embeddings else table,
    }
    return parts | {"total": sum(parts.values())}


@dataclass(frozen=True)
class DecodeStep:
    """What one token for each sequence of a batch costs at the least."""

    flops: int
    weight_bytes: int
    cache_bytes: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes

    def seconds(self, bytes_per_second: float, flops_per_second: float) -> float:
        """The floor: no implementation is faster on such a machine."""
        return max(self.bytes / bytes_per_second, self.flops / flops_per_second)


def decode_step(
    config: Any,
    batch: int,
    context: int,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    windows: Windows | None = None,
) -> DecodeStep:
    """FLOPs and bytes of one decode step over `context` cached tokens, the new one among them.

    Absorbed where the attention absorbs. Every weight is read once, every cached row once, and the new rows
    are written; where keys are rebuilt (ordinary RoPE), that costs FLOPs, not bytes.
    """
    check_choice("dtype", dtype, ("float32", "bfloat16", "float16"))
    check(batch > 0, "batch", batch, "must be positive")
    weights, hidden, stored = parameters(config), config.hidden_size, cache_dtype or dtype
    products = hidden * (3 * config.num_hidden_layers * config.intermediate_size + config.vocab_size)
    for layer, kept in _kept(config, context, windows):
        new, cached = _multiplications(layer)
        products += new + kept * cached
    read = weights["total"] - (0 if config.tie_word_embeddings else weights["embedding"])
    return DecodeStep(
        flops=2 * batch * products,
        weight_bytes=read * DTYPE_BYTES[dtype],
        cache_bytes=batch * (cache_bytes(config, context, stored, windows) + cache_bytes_per_token(config, stored)),
    )


def _multiplications(config: Any) -> tuple[int, int]:
    """Of one layer's attention in a decode step: per new token, and per cached one."""
    chosen = class_of(config)
    sizes = {k: v for k, v in attention_parameters(config).items() if not k.endswith(("_norm", ".bias"))}
    rebuilding = sum(sizes.pop(name) for name in chosen.maps(config)) if not chosen.absorbs else 0
    return sum(sizes.values()), config.num_attention_heads * sum(chosen.decode_widths(config)) + rebuilding


def train_flops_per_token(config: Any, length: int) -> float:
    """The usual count for MFU: 6 per parameter (a tied embedding once) and 6 L H d_h T of causal attention."""
    widths = sum(layer.value_head_dim for layer in config.layer_configs)
    attention = config.num_attention_heads * widths * length
    return 6 * parameters(config)["total"] + 6 * attention


def largest_batch(
    config: Any,
    context: int,
    memory: int,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    windows: Windows | None = None,
) -> int:
    """How many sequences of `context` tokens fit beside the weights in `memory` bytes; activations not counted."""
    free = memory - parameters(config)["total"] * DTYPE_BYTES[dtype]
    return max(0, free // cache_bytes(config, context, cache_dtype or dtype, windows))


@dataclass(frozen=True)
class Load:
    """What a table counts for: `batch` sequences of `context` tokens in `memory` bytes, and each of `ranks` GPUs."""

    context: int | None = None
    memory: int | None = None
    batch: int = 1
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    windows: Windows | None = None
    ranks: Sequence[int] = ()

    @property
    def stored(self) -> str:
        return self.cache_dtype or self.dtype


NO_LOAD = Load()


def table(
    config: Any, variants: Iterable[str], load: Load = NO_LOAD, before: tuple[Any, Load] | None = None
) -> list[dict[str, Any]]:
    """One row per variant of the config's size. Where somebody changed that, `before` has the first row, 'unchanged'.

    Savings are against `gqa` with as many groups as the config has, or had."""
    check(load.batch > 0, "batch", load.batch, "must be positive")
    for ranks in load.ranks:
        check(ranks > 0, "ranks", ranks, "must be positive")
    original = config if before is None else before[0]
    gqa = cache_bytes_per_token(original.with_variant("gqa"), load.stored)
    rows = [] if before is None else [_row("unchanged", *before, gqa)]
    for variant in variants:
        try:
            alternative = config.with_variant(variant)
        except ValueError as error:  # a head too narrow for a slice, say: the row tells instead of vanishing
            nothing = dict.fromkeys(("cache_scalars_per_token_per_layer", "cache_bytes_per_token", "parameters"))
            rows.append({"variant": variant, **nothing, "error": str(error)})
            continue
        rows.append(_row(variant, alternative, load, gqa))
    return rows


def _row(name: str, config: Any, load: Load, gqa: int) -> dict[str, Any]:
    cached = cache_bytes_per_token(config, load.stored)
    row: dict[str, Any] = {
        "variant": name,
        "num_value_groups": config.num_value_groups,
        "cache_scalars_per_token_per_layer": cache_scalars_per_token_per_layer(config),
        "cache_bytes_per_token": cached,
        "cache_saved_against_gqa": 1 - cached / gqa,
        "parameters": parameters(config)["total"],
        "parameters_by_part": parameters(config),
    }
    if load.ranks:
        row["on_each_rank"] = {
            str(ranks): {
                "cache_scalars_per_token_per_layer": cache_scalars_per_token_per_layer(config, ranks),
                "cache_bytes_per_token": cache_bytes_per_token(config, load.stored, ranks),
            }
            for ranks in load.ranks
        }
    if load.context is None:
        return row
    step = decode_step(config, load.batch, load.context, load.dtype, load.cache_dtype, load.windows)
    row |= {
        "context": load.context,
        "batch": load.batch,
        "cache_bytes": cache_bytes(config, load.context, load.stored, load.windows),
        "decode_flops": step.flops,
        "decode_bytes": step.bytes,
    }
    if load.memory is not None:
        fits = largest_batch(config, load.context, load.memory, load.dtype, load.cache_dtype, load.windows)
        row["largest_batch"] = fits
    return row


def parse_size(text: str) -> int:
    """Bytes of a size such as '80GiB', '512 MB' or '1000000'."""
    text = text.strip()
    unit = next((u for u in SIZE_UNITS if text.endswith(u)), "")
    try:
        return int(float(text.removesuffix(unit)) * SIZE_UNITS.get(unit, 1))
    except ValueError:
        units = ", ".join(SIZE_UNITS)
        raise ValueError(f"size {text!r}: must be a number, with or without one of {units}") from None
