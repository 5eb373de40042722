"""A cache whose tokens are rows: appending a token is one write, evicting a page one free.

In the model's precision a row is [values of all groups | k_rope], G*d_h + d_r elements. Under fp8 it is packed:

    G*d_h  bytes   values, float8 e4m3, group after group
    2*d_r  bytes   k_rope, bfloat16
    4*G    bytes   one float32 scale per group: value = e4m3 * scale
    padding to a multiple of 16 bytes
"""

from __future__ import annotations

import torch

from .backend import FP8
from .call import Pages

ROW_ALIGNMENT = 16


def row_width(G: int, d_h: int, d_r: int, fp8: bool) -> int:
    """Elements of one token's row: bytes of a packed one."""
    return packed_row_bytes(G, d_h, d_r) if fp8 else G * d_h + d_r


def row_bytes(value_dtype: torch.dtype, G: int, d_h: int, d_r: int) -> int:
    """The same in bytes."""
    return row_width(G, d_h, d_r, value_dtype == FP8) * value_dtype.itemsize


def row_views(rows: torch.Tensor, G: int, d_h: int, d_r: int) -> Pages:
    """Views of `rows` [P, page, row_width]: uint8 is the packed row, any other dtype the plain one."""
    if rows.dtype == torch.uint8:
        return Pages(*packed_views(rows, G, d_h, d_r))
    if rows.dim() != 3 or rows.shape[2] != G * d_h + d_r:
        raise ValueError(f"rows: got {rows.dtype} {tuple(rows.shape)}, need [P, page, {G * d_h + d_r}]")
    values, k_rope = rows.split((G * d_h, d_r), dim=-1)
    return Pages(values.unflatten(-1, (G, d_h)), k_rope)


def packed_row_bytes(G: int, d_h: int, d_r: int) -> int:
    """Bytes of one token's row, padding included."""
    payload = G * d_h + 2 * d_r + 4 * G
    return -(-payload // ROW_ALIGNMENT) * ROW_ALIGNMENT


def packed_views(rows: torch.Tensor, G: int, d_h: int, d_r: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of `rows` [P, page, packed_row_bytes] uint8.

    values [P, page, G, d_h], k_rope [P, page, d_r], scales [P, page, G]
    """
    width = packed_row_bytes(G, d_h, d_r)
    if rows.dtype != torch.uint8 or rows.dim() != 3 or rows.shape[2] != width:
        raise ValueError(f"rows: got {rows.dtype} {tuple(rows.shape)}, need torch.uint8 [P, page, {width}]")
    if (G * d_h) % 4 or d_r % 2:
        raise ValueError(f"G*d_h={G * d_h}, d_r={d_r}: a packed row needs G*d_h divisible by 4 and d_r by 2")
    P, page, _ = rows.shape
    rope_at, scale_at = G * d_h, G * d_h + 2 * d_r
    values = rows[..., :rope_at].view(torch.float8_e4m3fn).view(P, page, G, d_h)
    k_rope = rows[..., rope_at:scale_at].view(torch.bfloat16)
    scales = rows[..., scale_at : scale_at + 4 * G].view(torch.float32)
    return values, k_rope, scales


def _steps(pages: torch.Tensor) -> list[int]:
    """Bytes from page to page and from token to token, where there is more than one."""
    return [pages.stride(i) * pages.element_size() if pages.shape[i] > 1 else 0 for i in range(2)]


def _in_rows(pages: Pages) -> bool:
    """Whether k_rope (and the scales) of a token lie right behind its values, in one row."""
    values = pages.values
    at = values.data_ptr() + values.shape[2] * values.shape[3] * values.element_size()
    for beside in pages[1:]:
        if beside is None:
            continue
        if beside.data_ptr() != at or beside.stride(2) != 1 or _steps(beside) != _steps(values):
            return False
        at += beside.shape[2] * beside.element_size()
    return True


def misfit(pages: Pages) -> str | None:
    """What keeps the Hopper kernel from reading these pages, or None. Which shapes it takes, `config.choose_hopper`
    says."""
    values = pages.values
    _, page, G, d_h = values.shape
    if values.stride(2) != d_h or not _in_rows(pages):
        return "all that belongs to a token in one row: values, k_rope and scales, one right behind the other"
    if page > 1 and _steps(values)[1] != row_bytes(values.dtype, G, d_h, pages.k_rope.shape[2]):
        return "rows of a page one right behind the other"
    if values.data_ptr() % 16 or any(step % 16 for step in _steps(values)):
        return "rows that begin at multiples of 16 bytes"
    return None
