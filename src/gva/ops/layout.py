"""The row of an fp8 cache, byte by byte.

    G*d_h  bytes   values, float8 e4m3, group after group
    2*d_r  bytes   k_rope, bfloat16
    4*G    bytes   one float32 scale per group: value = e4m3 * scale
    padding to a multiple of 16 bytes

One token is one row, so appending a token is one write and evicting a page one free.
"""

import torch

ROW_ALIGNMENT = 16


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
