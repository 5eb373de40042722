"""A cache whose tokens are rows: appending a token is one write, evicting a page one free.

In the model's precision a row is [values of all groups | k_rope], G*d_h + d_r elements. Under fp8 it is packed:

    G*d_h  bytes   values, float8 e4m3, group after group
    2*d_r  bytes   k_rope, bfloat16
    4*G    bytes   one float32 scale per group: value = e4m3 * scale
    padding to a multiple of 16 bytes
"""

import torch

from .call import Pages

ROW_ALIGNMENT = 16


def row_width(G: int, d_h: int, d_r: int, fp8: bool) -> int:
    """Elements of one token's row: bytes of a packed one."""
    return packed_row_bytes(G, d_h, d_r) if fp8 else G * d_h + d_r


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
