"""Grouped Value Attention: language models whose KV cache holds values and one small positional key.

Names load when they are touched: `gva.ops`, `gva.nn` and `gva.cost` need torch alone, the model classes import
transformers and register themselves with its Auto classes.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gva import cost, diagnostics, nn, ops
    from gva.config import PRESETS, VARIANTS
    from gva.model import GvaConfig, GvaForCausalLM, GvaModel
    from gva.paged.cache import PagedCache
    from gva.paged.generator import PagedGenerator

try:
    __version__ = version("grouped-value-attention")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"

# `gva.model` is what registers with the Auto classes, so the config is reached through it too.
_HOME = {
    "GvaConfig": "gva.model",
    "GvaForCausalLM": "gva.model",
    "GvaModel": "gva.model",
    "PagedCache": "gva.paged.cache",
    "PagedGenerator": "gva.paged.generator",
    "PRESETS": "gva.config",
    "VARIANTS": "gva.config",
}
_SUBMODULES = ("cost", "diagnostics", "nn", "ops")

__all__ = [
    "PRESETS",
    "VARIANTS",
    "GvaConfig",
    "GvaForCausalLM",
    "GvaModel",
    "PagedCache",
    "PagedGenerator",
    "cost",
    "diagnostics",
    "nn",
    "ops",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"gva.{name}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'gva' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
