"""One file per attention, the same shape in each; `build` picks the one a config asks for."""

from typing import Any

from gva.attention.base import Attention
from gva.attention.gqa import GroupedQueryAttention
from gva.attention.gta import GroupedTiedAttention
from gva.attention.gva import GroupedValueAttention, RotatedGroupedValueAttention
from gva.attention.mla import LatentAttention
from gva.attention.shared_kv import SharedKeyValueAttention

_CLASSES: dict[str, type[Attention]] = {
    "mha": GroupedQueryAttention,
    "mqa": GroupedQueryAttention,
    "gqa": GroupedQueryAttention,
    "mla": LatentAttention,
    "shared_kv": SharedKeyValueAttention,
    "gva": GroupedValueAttention,
    "gta": GroupedTiedAttention,
}


def build(config: Any, layer_idx: int) -> Attention:
    if config.attention == "gva" and config.positional == "rope":
        return RotatedGroupedValueAttention(config, layer_idx)
    return _CLASSES[config.attention](config, layer_idx)


__all__ = ["Attention", "build"]
