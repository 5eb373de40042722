"""What a call is made of. Named tuples, since an engine makes them at every layer of every step; nothing is checked."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Pages(NamedTuple):
    """The cache of one layer, P pages of `page` tokens; any strides, the last dimension contiguous.

    values  [P, page, G, d_h]  in the dtype of the queries, or float8_e4m3fn
    k_rope  [P, page, d_r]     beside fp8 values bfloat16
    scales  [P, page, G]       of fp8 values alone, float32: value = e4m3 * scale
    """

    values: Tensor
    k_rope: Tensor
    scales: Tensor | None = None
