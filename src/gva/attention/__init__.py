"""One file per attention, the same shape in each: `register` makes one known, `build` makes what a config asks for."""

from typing import Any

from gva.attention.base import Attention, Query, RMSNorm
from gva.attention.gqa import GroupedQueryAttention, MultiHeadAttention, MultiQueryAttention
from gva.attention.gta import GroupedTiedAttention
from gva.attention.gva import GroupedValueAttention, RotatedGroupedValueAttention
from gva.attention.look_back import LookBackValueAttention
from gva.attention.mla import LatentAttention
from gva.attention.row import Part, Row
from gva.attention.shared_kv import SharedKeyValueAttention
from gva.attention.untied import UntiedKeyAttention

_CLASSES: dict[str, tuple[type[Attention], ...]] = {}


def register(name: str, *classes: type[Attention]) -> None:
    """Let configs ask for attention=`name`: one class, or one for each value of `positional`, the default first."""
    _CLASSES[name] = classes


def names() -> list[str]:
    return list(_CLASSES)


def choices(name: str) -> tuple[type[Attention], ...]:
    """The classes that are called `name`, the default first."""
    return _CLASSES[name]


def class_of(config: Any) -> type[Attention]:
    return next(c for c in _CLASSES[config.attention] if c.positional == config.positional)


def build(config: Any, layer_idx: int) -> Attention:
    return class_of(config)(config, layer_idx)


register("mha", MultiHeadAttention)
register("mqa", MultiQueryAttention)
register("gqa", GroupedQueryAttention)
register("mla", LatentAttention)
register("shared_kv", SharedKeyValueAttention)
register("gva", GroupedValueAttention, RotatedGroupedValueAttention)
register("gva_look_back", LookBackValueAttention)
register("gva_untied", UntiedKeyAttention)
register("gta", GroupedTiedAttention)

__all__ = ["Attention", "Part", "Query", "RMSNorm", "Row", "build", "choices", "class_of", "names", "register"]
