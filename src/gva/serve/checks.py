"""What is refused before a server starts: each refusal names the reason and what to do. Imports no vLLM."""

import json
from pathlib import Path
from typing import Any

from gva.errors import check
from gva.weights import INDEX, WEIGHTS, verified

ARCHITECTURE = "GvaForCausalLM"
FP8 = ("fp8", "fp8_e4m3")


def read_config(folder: Path) -> Any:
    """The config of a checkpoint folder, which must be one of this package's."""
    from gva.config import GvaConfig

    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; give the folder that `save_pretrained` or `gva train` wrote")
    try:
        source = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error}); copy the checkpoint again") from None
    kind = source.get("model_type") if isinstance(source, dict) else None
    check(kind == GvaConfig.model_type, "model_type", kind, f"{file} is not of this package; try plain `vllm serve`")
    return GvaConfig.from_dict(source)


def check_checkpoint(folder: Path, weights: bool = True) -> Any:
    """The config of a folder that can be served: its attention is one of ours, and all its shards are there, unless the
    `weights` are to be random ones."""
    config = read_config(folder)
    check_servable(config)
    if not weights:
        return config
    if not (folder / INDEX).is_file() and not (folder / WEIGHTS).is_file():
        raise FileNotFoundError(f"{folder}: neither {WEIGHTS} nor {INDEX}; copy the weights beside config.json")
    with verified(folder):  # vLLM will load it
        return config


def check_servable(config: Any) -> None:
    """Refuse what paged kernels cannot read as it lies, in any layer."""
    for layer in config.layer_configs:
        check_layer(layer)


def check_layer(config: Any) -> None:
    """Refuse keys that are rebuilt and rotated at every step, and a state that no query can be brought to."""
    if config.rotates_late:
        name = {"shared_kv": "shared KV", "gva": "ordinary-RoPE GVA"}.get(config.attention, config.attention)
        raise ValueError(
            f"attention={config.attention!r} with positional='rope' ({name}) cannot be served: its cache is V alone, "
            "and every step would rebuild and rotate the keys of the whole context. Train with a decoupled slice "
            "(variant gva-drope-16) to serve, or use `gva generate`"
        )
    row = config.row
    keys_and_values = row.rope is None and len(row.content) == 2 and row.content[0] == row.content[1]
    if not keys_and_values and not (config.absorbs and row.packs):
        raise ValueError(
            f"attention={config.attention!r} cannot be served: it has no absorbed form on pages of one state and one "
            "rotated key, and does not cache keys and values of one shape"
        )


def check_ranks(config: Any, ranks: int) -> None:
    """Refuse tensor parallelism that would cut a head or a group in two. More ranks than groups replicate groups."""
    H = config.num_attention_heads
    check(H % ranks == 0, "tensor_parallel_size", ranks, f"must divide num_attention_heads={H}")
    for layer in config.layer_configs:
        G = layer.num_value_groups
        whole = all(p.shared or p.heads % ranks == 0 or ranks % p.heads == 0 for p in layer.row.parts)
        check(whole, "tensor_parallel_size", ranks, f"must divide num_value_groups={G} or be a multiple of it")


def check_cache_dtype(config: Any, cache_dtype: str, dtype: Any) -> None:
    """Rows are kept in the model's precision, or in the fp8 row of `gva.ops.layout`."""
    if not any(layer.row.packs for layer in config.layer_configs):
        return  # vLLM's own attention decides
    own = str(dtype).removeprefix("torch.")
    allowed = ("auto", own, *FP8)
    check(cache_dtype in allowed, "kv_cache_dtype", cache_dtype, f"must be one of {', '.join(allowed)}")
