"""Paged GVA attention in the absorbed form: one kernel that reads the cache, one that merges its partial results.

A *unit* is one block of query tokens of one sequence; its *tiles* are runs of TILE cached tokens. The plan lays all
tiles of all units in a line and cuts the line into equal *shares*, whatever the lengths are; a program reads one share.
A share holds at most one unit that it does not begin (its first) and one that it does not finish (its last): both go
to a workspace, everything else straight to `out`. The merging kernel, one program per output row, folds the parts.

Rows of a program. A tensor-core tile has 16 rows and a group has only R query heads, so GROUPS neighbouring groups
share one program, their queries laid out block-diagonally:

    queries  [GROUPS*ROWS, GROUPS*BLOCK_D]   row (g, r) is non-zero in the columns of group g alone
    values   [TILE,        GROUPS*BLOCK_D]   the groups of one token are neighbours in memory
    scores   = queries @ values^T + q_rope @ k_rope^T      [GROUPS*ROWS, TILE]
    acc     += softmax-numerator(scores) @ values          [GROUPS*ROWS, GROUPS*BLOCK_D], diagonal blocks kept

ROWS >= QUERIES*R rows of a group are (query token, head of the group), token-major.

The schedule, int32: HEADER numbers (length of the line, shares in use), ENTRY numbers per share (unit, first tile in
it, tiles to do, length of its sequence), and the place of every unit's first tile on the line.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HEADER = tl.constexpr(4)
ENTRY = tl.constexpr(4)


@triton.jit
def unit_extent(
    unit, seq_len, cu_seqlens_q, blocks_per_seq,
    UNIFORM_S: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Sequence, first query row, queries in the unit, the newest position + 1 that its first query sees."""
    sequence = unit // blocks_per_seq
    first = (unit % blocks_per_seq) * QUERIES
    if UNIFORM_S > 0:
        row = sequence * UNIFORM_S
        count = UNIFORM_S
    else:
        row = tl.load(cu_seqlens_q + sequence)
        count = tl.load(cu_seqlens_q + sequence + 1) - row
    queries = tl.minimum(count - first, QUERIES)
    visible = seq_len - count + first + 1
    return sequence, row + first, queries, visible


@triton.jit
def unit_tiles(queries, visible, TILE: tl.constexpr):
    """Tiles that hold at least one position seen by the unit's last query."""
    last = tl.where(queries > 0, visible + queries - 1, 0)
    return tl.maximum(tl.cdiv(last, TILE), 0)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """acc + a @ b in float32. WIDEN: Triton's interpreter multiplies bfloat16 as if it were an integer."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def unpack_e4m3(pairs, dtype: tl.constexpr, ASM: tl.constexpr):
    """[n, m] int16, two e4m3 each, as two [n, m] of `dtype`: the low ones and the high ones.

    The assembly takes the two int16 of a register: the hardware widens a pair at once, then halves are swapped so that
    neighbours in the tensor are neighbours in a register. The plain form moves bits, for Triton's interpreter.
    """
    if ASM:
        even, odd = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 first, second;
            .reg .b32 a, b;
            mov.b32 {first, second}, $2;
            cvt.rn.f16x2.e4m3x2 a, first;
            cvt.rn.f16x2.e4m3x2 b, second;
            prmt.b32 $0, a, b, 0x5410;
            prmt.b32 $1, a, b, 0x7632;
            }
            """,
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)  # fmt: skip
    else:
        bits = pairs.to(tl.int32)
        even = (((bits << 7) & 0x3F80) | ((bits << 8) & 0x8000)).to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
        odd = (((bits >> 1) & 0x3F80) | (bits & 0x8000)).to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
    return even.to(dtype), odd.to(dtype)


@triton.jit
def load_page(table, first, last, PAGE: tl.constexpr, TILE: tl.constexpr):
    """int64 page ids of a tile: one where a tile lies inside a page, else one for each of its tokens."""
    if PAGE % TILE == 0:
        page = tl.load(table + first // PAGE)
    else:
        position = first + tl.arange(0, TILE)
        page = tl.load(table + position // PAGE, mask=position < last, other=0)
    return page.to(tl.int64)


@triton.jit
def read_tile(
    b_acc, b_odd, b_max, b_sum, b_ref, b_q, b_q_odd, b_qr, i, values, k_rope, value_scales, table, last, limit,
    row_group, row_real,
    col_offset, col_real, head_block, stride_vp, stride_kp, stride_sp, row_scale,
    stride_vt: tl.constexpr, stride_kt: tl.constexpr, stride_st: tl.constexpr, stride_sg: tl.constexpr,
    D_R: tl.constexpr, BLOCK_R: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    UNIT_V: tl.constexpr, UNIT_K: tl.constexpr, HAS_SCALES: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr, MASKED: tl.constexpr, WHOLE_COLUMNS: tl.constexpr, GROUPS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Tile `i` of a sequence into the running softmax: acc [M, W], max and sum [M], in units of log2.

    MASKED: some position of the tile is not seen by some row. Positions from `last` on are seen by none and may hold
    anything, so they are not read. WHOLE_COLUMNS: every column of the tile is a value.
    """
    M: tl.constexpr = b_acc.shape[0]
    t_index = tl.arange(0, TILE)
    t_offset = t_index.to(tl.int64)
    r_index = tl.arange(0, BLOCK_R)
    position = i * TILE + t_index
    seen = position < last
    page = load_page(table, i * TILE, last, PAGE, TILE)
    if PAGE % TILE == 0:
        in_page = (i % (PAGE // TILE)) * TILE
        p_v = values + (page * (stride_vp * UNIT_V) + in_page * stride_vt)
        p_v = p_v + (t_offset * stride_vt)[:, None] + col_offset[None, :]
        p_k = k_rope + (page * (stride_kp * UNIT_K) + in_page * stride_kt)
        p_k = p_k + (t_offset * stride_kt)[:, None] + r_index[None, :]
        token_scale = page * stride_sp + in_page * stride_st + t_offset * stride_st
    else:
        in_page = position % PAGE
        p_v = values + (page * (stride_vp * UNIT_V) + in_page * stride_vt)[:, None] + col_offset[None, :]
        p_k = k_rope + (page * (stride_kp * UNIT_K) + in_page * stride_kt)[:, None] + r_index[None, :]
        token_scale = page * stride_sp + in_page * stride_st
    r_real = (r_index < D_R)[None, :]
    if MASKED:
        b_v = tl.load(p_v, mask=seen[:, None] & col_real[None, :], other=0.0)  # [TILE, W]
        b_k = tl.load(p_k, mask=seen[:, None] & r_real, other=0.0)  # [TILE, BLOCK_R]
    else:
        if WHOLE_COLUMNS:
            b_v = tl.load(p_v)
        else:
            b_v = tl.load(p_v, mask=tl.broadcast_to(col_real[None, :], p_v.shape), other=0.0)
        b_k = tl.load(p_k) if BLOCK_R == D_R else tl.load(p_k, mask=tl.broadcast_to(r_real, p_k.shape), other=0.0)
    b_s = tl.zeros([M, TILE], tl.float32)
    if HAS_SCALES:
        if GROUPS == 1:  # one scale per token for all rows
            p_scale = value_scales + token_scale + head_block * stride_sg
            b_scale = tl.load(p_scale, mask=seen, other=0.0)[None, :] if MASKED else tl.load(p_scale)[None, :]
        else:
            p_scale = value_scales + token_scale[None, :] + (row_group * stride_sg)[:, None]
            b_scale = tl.load(p_scale, mask=seen[None, :] & row_real[:, None], other=0.0)  # [M, TILE]
        b_v, b_v_odd = unpack_e4m3(b_v, b_q.dtype, ASM)
        b_s = dot(b_q, tl.trans(b_v), b_s, PRECISION, WIDEN)
        b_s = dot(b_q_odd, tl.trans(b_v_odd), b_s, PRECISION, WIDEN) * b_scale
        b_s = dot(b_qr, tl.trans(b_k).to(b_qr.dtype), b_s, PRECISION, WIDEN)
    else:
        b_s = dot(b_qr, tl.trans(b_k), b_s, PRECISION, WIDEN)
        b_s = dot(b_q, tl.trans(b_v), b_s, PRECISION, WIDEN)
    if MASKED:
        b_s = tl.where(position[None, :] < limit[:, None], b_s, float("-inf"))
    b_max_new = tl.maximum(b_max, tl.max(b_s, 1) * row_scale)
    shift = b_max_new
    if MASKED:
        shift = tl.where(b_max_new == float("-inf"), 0.0, b_max_new)
    b_p = tl.exp2(b_s * row_scale[:, None] - shift[:, None])
    fade = tl.exp2(b_max - shift)
    b_sum = b_sum * fade + tl.sum(b_p, 1)
    b_ref_new = b_ref
    if HAS_SCALES:
        # The weight of a value is probability times scale; relative to the largest scale so far it is at most 1 and
        # fits half precision, whatever the scales are. Scales of one group are the same for all rows: [1, TILE].
        b_ref_new = tl.maximum(b_ref, tl.max(b_scale, 1))
        b_p = b_p * (b_scale * (1.0 / b_ref_new)[:, None])
        fade = fade * (b_ref / b_ref_new)
        b_odd = dot(b_p.to(b_v.dtype), b_v_odd, b_odd * fade[:, None], PRECISION, WIDEN)
    b_acc = dot(b_p.to(b_v.dtype), b_v, b_acc * fade[:, None], PRECISION, WIDEN)
    return b_acc, b_odd, b_max_new, b_sum, b_ref_new


@triton.jit
def share_of(tile, total, active):
    """The share that holds `tile`, of `active` that are cut at i * total // active."""
    return (((tile.to(tl.int64) + 1) * active - 1) // tl.maximum(total, 1)).to(tl.int32)


@triton.jit(do_not_specialize=["stride_bt", "G", "units", "head_blocks", "max_shares"])
def decode_kernel(
    q_absorbed, q_rope, values, k_rope, value_scales, block_table, seq_lens, cu_seqlens_q, schedule,
    out, lse, part_out, part_lse,
    stride_qn, stride_qh, stride_rn, stride_rh,
    stride_vp, stride_kp, stride_sp, stride_bt, stride_on, stride_oh, stride_ln,
    scale_log2, G, units, blocks_per_seq, head_blocks, max_shares,
    stride_vt: tl.constexpr, stride_vg: tl.constexpr, stride_kt: tl.constexpr,
    stride_st: tl.constexpr, stride_sg: tl.constexpr,
    R: tl.constexpr, D_H: tl.constexpr, D_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr, UNIFORM_S: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, FIXED_TILES: tl.constexpr,
    UNIT_V: tl.constexpr, UNIT_K: tl.constexpr, WHOLE_COLUMNS: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_LSE: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: max_shares * head_blocks (planned), and units (fixed splits).

    The strides inside a page are constants of the model: known to the compiler, the addresses of a tile's rows are
    one register and immediates. The stride of a page comes in multiples of UNIT elements, so that 16-byte alignment
    is known for rows such as 264 elements too.
    """
    M: tl.constexpr = GROUPS * ROWS
    STEP: tl.constexpr = 2 if HAS_SCALES else 1  # e4m3 is read as pairs: even columns here, odd ones beside
    W: tl.constexpr = GROUPS * BLOCK_D // STEP
    share = tl.program_id(0) // head_blocks
    head_block = tl.program_id(0) % head_blocks
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if FIXED_TILES > 0:
        unit = tl.program_id(1)
        tile = share * FIXED_TILES
        left = FIXED_TILES
        seq_len = tl.load(seq_lens + unit // blocks_per_seq)
    else:
        entry = schedule + HEADER + share * ENTRY
        unit = tl.load(entry)
        tile = tl.load(entry + 1)
        left = tl.load(entry + 2)
        seq_len = tl.load(entry + 3)

    m_index = tl.arange(0, M)
    w_index = tl.arange(0, W)
    r_index = tl.arange(0, BLOCK_R)
    row_group = head_block * GROUPS + m_index // ROWS  # group of a query row
    row_query = (m_index % ROWS) // R
    row_head = row_group * R + (m_index % ROWS) % R
    col_group = head_block * GROUPS + w_index // (BLOCK_D // STEP)  # group of a value column
    col_dim = (w_index % (BLOCK_D // STEP)) * STEP
    row_real = (row_group < G) & (m_index % ROWS < QUERIES * R)
    col_real = (col_group < G) & (col_dim < D_H)
    diagonal = (m_index // ROWS)[:, None] == (w_index // (BLOCK_D // STEP))[None, :]
    col_offset = col_group.to(tl.int64) * stride_vg + w_index % (BLOCK_D // STEP)

    while (left > 0) & (unit < units):
        sequence, row, queries, visible = unit_extent(unit, seq_len, cu_seqlens_q, blocks_per_seq, UNIFORM_S, QUERIES)
        tiles = unit_tiles(queries, visible, TILE)
        tile_end = tl.minimum(tile + left, tiles)
        if tile < tile_end:
            live = row_real & (row_query < queries)
            token = (row + row_query).to(tl.int64)
            b_q = tl.load(
                q_absorbed + (token * stride_qn + row_head * stride_qh)[:, None] + col_dim[None, :],
                mask=live[:, None] & col_real[None, :] & diagonal, other=0.0)  # fmt: skip
            b_qr = tl.load(
                q_rope + (token * stride_rn + row_head * stride_rh)[:, None] + r_index[None, :],
                mask=live[:, None] & (r_index < D_R)[None, :], other=0.0)  # fmt: skip
            b_q_odd = b_q
            row_scale = tl.full([M], 1.0, tl.float32) * scale_log2
            if HAS_SCALES:
                b_q_odd = tl.load(
                    q_absorbed + (token * stride_qn + row_head * stride_qh)[:, None] + col_dim[None, :] + 1,
                    mask=live[:, None] & col_real[None, :] & diagonal, other=0.0)  # fmt: skip
                if b_q.dtype == tl.bfloat16:  # the products are in half precision: bring the queries into its range
                    largest = tl.maximum(
                        tl.max(tl.abs(b_q.to(tl.float32)), 1), tl.max(tl.abs(b_q_odd.to(tl.float32)), 1)
                    )
                    # A power of two, so that nothing is rounded; both parts of a score have it, the exponent undoes it.
                    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
                    power = tl.maximum(power, 2.0**-60)  # or q_rope would leave the range of bfloat16
                    b_q = (b_q.to(tl.float32) / power[:, None]).to(tl.float16)
                    b_q_odd = (b_q_odd.to(tl.float32) / power[:, None]).to(tl.float16)
                    b_qr = (b_qr.to(tl.float32) / power[:, None]).to(tl.bfloat16)
                    row_scale = row_scale * power
            last = visible + queries - 1  # positions past it are seen by no row, and may hold anything
            limit = visible + row_query
            table = block_table + sequence.to(tl.int64) * stride_bt

            b_max = tl.full([M], float("-inf"), tl.float32)
            b_sum = tl.zeros([M], tl.float32)
            b_ref = tl.full([M if GROUPS > 1 else 1], 1e-30, tl.float32)
            b_acc = tl.zeros([M, W], tl.float32)
            b_odd = tl.zeros([M, W if HAS_SCALES else 1], tl.float32)
            # Tiles that every row sees in full need no mask, which is a third of the instructions of the loop.
            full = tl.minimum(tile_end, tl.maximum(visible // TILE, tile))
            for i in tl.range(tile, full, num_stages=STAGES):
                b_acc, b_odd, b_max, b_sum, b_ref = read_tile(
                    b_acc, b_odd, b_max, b_sum, b_ref, b_q, b_q_odd, b_qr, i, values, k_rope, value_scales, table, last,
                    limit, row_group, row_real, col_offset, col_real, head_block, stride_vp, stride_kp,
                    stride_sp, row_scale,
                    stride_vt, stride_kt, stride_st, stride_sg, D_R, BLOCK_R, PAGE, TILE, UNIT_V, UNIT_K, HAS_SCALES,
                    PRECISION, WIDEN, False, WHOLE_COLUMNS, GROUPS, ASM)  # fmt: skip
            for i in tl.range(full, tile_end, num_stages=1):
                b_acc, b_odd, b_max, b_sum, b_ref = read_tile(
                    b_acc, b_odd, b_max, b_sum, b_ref, b_q, b_q_odd, b_qr, i, values, k_rope, value_scales, table, last,
                    limit, row_group, row_real, col_offset, col_real, head_block, stride_vp, stride_kp,
                    stride_sp, row_scale,
                    stride_vt, stride_kt, stride_st, stride_sg, D_R, BLOCK_R, PAGE, TILE, UNIT_V, UNIT_K, HAS_SCALES,
                    PRECISION, WIDEN, True, WHOLE_COLUMNS, GROUPS, ASM)  # fmt: skip

            divisor = tl.where(b_sum == 0.0, 1.0, b_sum)  # a row that sees nothing
            b_norm = 1.0 / divisor
            if HAS_SCALES:
                b_norm = b_norm * b_ref
            b_out = b_acc * b_norm[:, None]
            b_odd = b_odd * b_norm[:, None]
            b_lse = (b_max + tl.log2(divisor)) * 0.6931471805599453
            if (tile == 0) & (tile_end == tiles):
                tl.store(
                    out + (token * stride_on + row_head * stride_oh)[:, None] + col_dim[None, :],
                    b_out.to(out.dtype.element_ty), mask=live[:, None] & col_real[None, :] & diagonal)  # fmt: skip
                if HAS_SCALES:
                    tl.store(
                        out + (token * stride_on + row_head * stride_oh)[:, None] + col_dim[None, :] + 1,
                        b_odd.to(out.dtype.element_ty), mask=live[:, None] & col_real[None, :] & diagonal)  # fmt: skip
                if HAS_LSE:
                    tl.store(lse + token * stride_ln + row_head, b_lse, mask=live)
            else:
                slot = unit * max_shares + share if FIXED_TILES > 0 else share * 2 + (tile == 0).to(tl.int32)
                part_row = (slot.to(tl.int64) * head_blocks + head_block) * (GROUPS * QUERIES * R)
                part_row = part_row + (m_index // ROWS) * (QUERIES * R) + m_index % ROWS
                keep = m_index % ROWS < QUERIES * R
                tl.store(part_out + part_row[:, None] * BLOCK_D + col_dim[None, :], b_out,
                         mask=diagonal & keep[:, None])  # fmt: skip
                if HAS_SCALES:
                    tl.store(part_out + part_row[:, None] * BLOCK_D + col_dim[None, :] + 1, b_odd,
                             mask=diagonal & keep[:, None])  # fmt: skip
                tl.store(part_lse + part_row, b_lse, mask=keep)
        left -= tl.maximum(tile_end - tile, 0)
        tile = 0
        unit += 1
        if FIXED_TILES > 0:
            left = 0
        elif left > 0:
            seq_len = tl.load(seq_lens + tl.minimum(unit, units - 1) // blocks_per_seq)


@triton.jit(do_not_specialize=["G", "head_blocks", "max_shares"])
def merge_kernel(
    part_out, part_lse, schedule, seq_lens, cu_seqlens_q, out, lse,
    stride_on, stride_oh, stride_ln,
    G, blocks_per_seq, head_blocks, max_shares,
    R: tl.constexpr, D_H: tl.constexpr, BLOCK_D: tl.constexpr, GROUPS: tl.constexpr,
    QUERIES: tl.constexpr, UNIFORM_S: tl.constexpr, TILE: tl.constexpr, FIXED_TILES: tl.constexpr,
    HAS_LSE: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Grid: units, head blocks * cdiv(rows of a head block, BLOCK_H). Folds the parts of BLOCK_H output rows.

    Also writes the rows of units that have no tiles.
    """
    HELD: tl.constexpr = GROUPS * QUERIES * R
    CHUNKS: tl.constexpr = (HELD + BLOCK_H - 1) // BLOCK_H
    unit = tl.program_id(0)
    head_block = tl.program_id(1) // CHUNKS
    h_index = (tl.program_id(1) % CHUNKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    d_index = tl.arange(0, BLOCK_D)
    # The lengths and the schedule are older than the reading kernel, so this part may overlap it.
    seq_len = tl.load(seq_lens + unit // blocks_per_seq)
    _, row, queries, visible = unit_extent(unit, seq_len, cu_seqlens_q, blocks_per_seq, UNIFORM_S, QUERIES)
    tiles = unit_tiles(queries, visible, TILE)
    if FIXED_TILES > 0:
        parts = tl.cdiv(tiles, FIXED_TILES)
        first = unit * max_shares
    else:
        total = tl.load(schedule)
        active = tl.load(schedule + 1)
        begin = tl.load(schedule + HEADER + max_shares * ENTRY + unit)
        first = share_of(begin, total, active)
        parts = tl.where(tiles > 0, share_of(begin + tiles - 1, total, active) - first + 1, 0)
    if PDL:
        gdc_wait()  # in every program: the stream's next kernel must not start before the reading kernel has ended
    if parts != 1:
        group = head_block * GROUPS + h_index // (QUERIES * R)
        query = (h_index % (QUERIES * R)) // R
        live = (h_index < HELD) & (group < G) & (query < queries)
        b_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_H], tl.float32)
        b_acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        for i in range(0, parts, PARTS):
            part = i + tl.arange(0, PARTS)
            slot = first + part if FIXED_TILES > 0 else (first + part) * 2 + (part == 0).to(tl.int32)
            index = ((slot.to(tl.int64) * head_blocks + head_block) * HELD)[:, None] + h_index[None, :]
            mask = (part < parts)[:, None] & live[None, :]
            b_lse = tl.load(part_lse + index, mask=mask, other=float("-inf"))
            b_part = tl.load(part_out + (index * BLOCK_D)[:, :, None] + d_index[None, None, :],
                             mask=mask[:, :, None] & (d_index < D_H)[None, None, :], other=0.0)  # fmt: skip
            b_max_new = tl.maximum(b_max, tl.max(b_lse, 0))
            shift = tl.where(b_max_new == float("-inf"), 0.0, b_max_new)
            weight = tl.exp(b_lse - shift[None, :])
            fade = tl.exp(b_max - shift)
            b_sum = b_sum * fade + tl.sum(weight, 0)
            b_acc = b_acc * fade[:, None] + tl.sum(b_part * weight[:, :, None], 0)
            b_max = b_max_new
        divisor = tl.where(b_sum == 0.0, 1.0, b_sum)
        token = (row + query).to(tl.int64)
        head = group * R + (h_index % (QUERIES * R)) % R
        tl.store(
            out + (token * stride_on + head * stride_oh)[:, None] + d_index[None, :],
            (b_acc / divisor[:, None]).to(out.dtype.element_ty),
            mask=live[:, None] & (d_index < D_H)[None, :])  # fmt: skip
        if HAS_LSE:
            tl.store(lse + token * stride_ln + head, b_max + tl.log(divisor), mask=live)


@triton.jit
def line_of_units(
    u, units, offset, seq_lens, cu_seqlens_q, blocks_per_seq,
    UNIFORM_S: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, UNITS: tl.constexpr, COST: tl.constexpr,
):  # fmt: skip
    """Of UNITS units from `u` on: tiles, place of the first one on the line, and the end of the line behind them."""
    u_index = u + tl.arange(0, UNITS)
    unit = tl.minimum(u_index, units - 1)
    seq_len = tl.load(seq_lens + unit // blocks_per_seq)
    _, _, queries, visible = unit_extent(unit, seq_len, cu_seqlens_q, blocks_per_seq, UNIFORM_S, QUERIES)
    tiles = tl.where(u_index < units, unit_tiles(queries, visible, TILE), 0)
    length = tl.where(tiles > 0, tiles + COST, 0)
    return tiles, offset + tl.cumsum(length, 0) - tiles, offset + tl.sum(length, 0)


@triton.jit(do_not_specialize=["units", "normal_shares", "max_shares"])
def plan_kernel(
    schedule, seq_lens, cu_seqlens_q, units, blocks_per_seq, normal_shares, max_shares,
    UNIFORM_S: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, UNITS: tl.constexpr, SHARES: tl.constexpr,
    COST: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(max_shares, SHARES). Every program sums all lengths itself (they are few), then places its shares.

    To begin a unit costs as much time as reading COST tiles, so that is the gap in front of each unit on the line:
    a share of many short sequences gets fewer tiles.
    """
    total = tl.zeros([], tl.int32)
    count = tl.zeros([], tl.int32)
    for u in range(0, units, UNITS):
        tiles, _, total = line_of_units(
            u, units, total, seq_lens, cu_seqlens_q, blocks_per_seq, UNIFORM_S, QUERIES, TILE, UNITS, COST
        )
        count += tl.sum(tiles, 0)
    active = tl.where(count <= max_shares, tl.maximum(count, 1), normal_shares)

    share = tl.program_id(0) * SHARES + tl.arange(0, SHARES)
    wide = share.to(tl.int64)
    begin = (wide * total // active).to(tl.int32)
    end = ((wide + 1) * total // active).to(tl.int32)
    b_unit = tl.zeros([SHARES], tl.int32)  # units that end at or before `begin`
    b_tile = tl.zeros([SHARES], tl.int32)  # tiles of the next unit before `begin`
    b_left = tl.zeros([SHARES], tl.int32)  # tiles between `begin` and `end`
    offset = tl.zeros([], tl.int32)
    starts = schedule + HEADER + max_shares * ENTRY
    for u in range(0, units, UNITS):
        u_index = u + tl.arange(0, UNITS)
        tiles, first, offset = line_of_units(
            u, units, offset, seq_lens, cu_seqlens_q, blocks_per_seq, UNIFORM_S, QUERIES, TILE, UNITS, COST
        )
        if tl.program_id(0) == 0:
            tl.store(starts + u_index, first, mask=u_index < units)
        done = tl.minimum(tl.maximum(begin[:, None] - first[None, :], 0), tiles[None, :])
        over = (first + tiles)[None, :] <= begin[:, None]
        b_unit += tl.sum((over & (u_index < units)[None, :]).to(tl.int32), 1)
        b_tile += tl.sum(tl.where(over, 0, done), 1)
        b_left += tl.sum(tl.minimum(tl.maximum(end[:, None] - first[None, :], 0), tiles[None, :]) - done, 1)
    if tl.program_id(0) == 0:
        tl.store(schedule, total)
        tl.store(schedule + 1, active)
    real = share < max_shares
    entry = schedule + HEADER + share * ENTRY
    tl.store(entry, b_unit, mask=real)
    tl.store(entry + 1, b_tile, mask=real)
    tl.store(entry + 2, tl.where(share < active, b_left, 0), mask=real)
    tl.store(entry + 3, tl.load(seq_lens + tl.minimum(b_unit, units - 1) // blocks_per_seq), mask=real)
