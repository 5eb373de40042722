// Paged GVA attention in the absorbed form, for sm90: the reading kernel of ../triton/decode.py with the same schedule
// (units, tiles, shares), the same workspace and the same merging kernel behind it.
//
// A block reads whole tokens, all groups. One warp has the copy engine fill a ring of tiles in shared memory, running on
// from one sequence into the next; each of the others computes GROUPS groups of every tile.
//
// Both products have the values as their *left* factor, so that the R queries of a group lie along the side of 8 of the
// 16 x 8 x 16 tensor-core product, and not along that of 16:
//
//     scores [tokens, queries] = values [tokens, d] @ queries^T [d, queries]        (+ k_rope @ q_rope^T)
//     out^T  [d,      queries] = values^T [d, tokens] @ weights [tokens, queries]
//
// Both read the tile by the same addresses, the second one transposed on the way. With e4m3 a pair of values travels as one
// 16-bit element: read straight, the four bytes of a lane are neighbours along d; read transposed, they are two d of two
// tokens, and a permutation of bytes makes pairs of tokens of them. The order of d inside a product is free as long as
// the queries have it too, and so is the order of rows of the output as long as the store knows it.
//
// The running maximum moves only when a weight would exceed 2^8: then, and at the first tile, the sums are rescaled.
// With scales a weight is probability * scale, and it is the weight that is bounded.
//
// Compiled for one shape: D_H, D_R, G, R, QUERIES per unit, UNIFORM_S (0: ragged), PAGE, FIXED_TILES, HAS_LSE, FP8, HALF
// (queries are float16, else bfloat16); and one way to run it: PER_SM blocks per multiprocessor, TILE, STAGES, GROUPS per
// warp, RUN: the tokens of one page that one copy takes; PAD bytes lie between runs, so that the rows of a product fall
// into different banks.

constexpr int ELEMENT = FP8 ? 1 : 2;
constexpr int WARPS = G / GROUPS;
constexpr int ROWS = QUERIES * R;               // query rows of a group
constexpr int COLUMNS = (ROWS + 7) / 8;         // of 8 queries
constexpr int BLOCKS = TILE / 16;               // of 16 tokens
constexpr int SLABS = D_H * ELEMENT / 32;       // of 32 bytes: what one load of matrices takes from a token
constexpr int STEPS = D_H / 16;                 // products along d
constexpr int PRODUCTS_PER_LOAD = 2 / ELEMENT;  // of matrices
constexpr int ROPE_STEPS = (D_R + 15) / 16;
constexpr int BLOCK_D = D_H <= 16 ? 16 : D_H <= 32 ? 32 : D_H <= 64 ? 64 : D_H <= 128 ? 128 : 256;

constexpr int VALUE_BYTES = G * D_H * ELEMENT;
constexpr int ROPE_BYTES = 2 * D_R;
constexpr int SCALES_AT = VALUE_BYTES + ROPE_BYTES;
constexpr int TOKEN_BYTES = (SCALES_AT + (FP8 ? 4 * G : 0) + 15) / 16 * 16;
DEVICE constexpr int place_of(int token) { return token * TOKEN_BYTES + token / RUN * PAD; }  // in a stage
constexpr int STAGE_BYTES = (place_of(TILE) + 127) / 128 * 128, BLOCK_BYTES = 16 * TOKEN_BYTES + 16 / RUN * PAD;

constexpr int HEADER = 4, ENTRY = 4;  // of the schedule
constexpr float HIGHEST_WEIGHT = 256.0f;
constexpr float LOG2_SCALE_RANGE = 60.0f;
constexpr float LEAST_UNIT = 1.0f / (1ull << 60);  // of a row of queries
constexpr float LN2 = 0.6931471805599453f;
#define NOTHING bits_to_float(0xFF800000u)  // minus infinity

static_assert(G % GROUPS == 0 && TILE % 16 == 0 && D_H % 16 == 0 && SLABS * 32 == D_H * ELEMENT);
static_assert(D_R % 8 == 0 && ROPE_BYTES % 16 == 0 && TOKEN_BYTES % 16 == 0 && !(FP8 && HALF));
static_assert(TILE % RUN == 0 && PAGE % RUN == 0 && TILE / RUN <= 32);

struct Arguments {
    const u16* q_absorbed;
    const u16* q_rope;
    const u8* rows;
    const int* block_table;
    const int* seq_lens;
    const int* cu_seqlens_q;
    const int* schedule;
    u16* out;
    float* lse;
    float* part_out;
    float* part_lse;
    i64 q_token, q_head, r_token, r_head;       // strides in elements
    i64 page_bytes, token_bytes, table_row, out_token, out_head, lse_token;
    float scale_log2;
    int units, blocks_per_seq, max_shares;
};

// One block of query tokens of one sequence.
struct Unit {
    int sequence, row, queries, visible, tiles;

    DEVICE static Unit at(const Arguments& a, int unit, int seq_len) {
        Unit u;
        u.sequence = unit / a.blocks_per_seq;
        int first = (unit % a.blocks_per_seq) * QUERIES, count = UNIFORM_S;
        u.row = u.sequence * UNIFORM_S;
        if (UNIFORM_S == 0) {
            u.row = a.cu_seqlens_q[u.sequence];
            count = a.cu_seqlens_q[u.sequence + 1] - u.row;
        }
        u.row += first;
        u.queries = min(count - first, QUERIES);
        u.visible = seq_len - count + first + 1;  // the newest position + 1 that the first query sees
        int last = u.queries > 0 ? u.visible + u.queries - 1 : 0;
        u.tiles = last > 0 ? (last + TILE - 1) / TILE : 0;
        return u;
    }
    DEVICE int last() const { return visible + queries - 1; }
};

// The tile that is fetched next.
struct Fetch {
    int unit, tile, left, end;  // `end` of the tiles to fetch of this unit
    int last;                   // positions of the unit's sequence from here on are not read
    const int* table;
    int page;  // of this lane's run of tokens; looked up one tile before it is needed

    DEVICE void enter(const Arguments& a, int lane, int seq_len) {
        while (true) {
            Unit u = Unit::at(a, unit, seq_len);
            end = min(tile + left, u.tiles);
            last = u.last();
            table = a.block_table + u.sequence * a.table_row;
            if (tile < end) return look_up(lane);
            tile = 0;
            if (FIXED_TILES || ++unit >= a.units) left = 0;
            if (left == 0) return;
            seq_len = a.seq_lens[unit / a.blocks_per_seq];
        }
    }
    DEVICE void look_up(int lane) {
        int position = tile * TILE + lane * RUN;
        page = lane < TILE / RUN && position < last ? table[position / PAGE] : 0;
    }
    DEVICE void advance(const Arguments& a, int lane) {
        --left;
        if (++tile < end) return look_up(lane);
        tile = 0;
        if (FIXED_TILES || ++unit >= a.units) left = 0;
        if (left > 0) enter(a, lane, a.seq_lens[unit / a.blocks_per_seq]);
    }
    DEVICE void issue(const Arguments& a, int lane, u8* stage, u64* full) {
        int count = min(last - tile * TILE, TILE), first = lane * RUN;
        if (lane == 0) barrier_expect(full, count * TOKEN_BYTES);
        warp_together();
        const u8* row = a.rows + page * a.page_bytes + (tile * TILE + first) % PAGE * a.token_bytes;
        if (first < count) bulk_copy(stage + place_of(first), row, min(count - first, RUN) * TOKEN_BYTES, full);
    }
};

DEVICE u32 pack_weights(float first, float second) {
    return FP8 || HALF ? pack_half(first, second) : pack_bfloat(first, second);
}
DEVICE void multiply_values(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    FP8 || HALF ? multiply_half(c, a0, a1, a2, a3, b0, b1) : multiply_bfloat(c, a0, a1, a2, a3, b0, b1);
}
DEVICE void multiply_rope(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    HALF ? multiply_half(c, a0, a1, a2, a3, b0, b1) : multiply_bfloat(c, a0, a1, a2, a3, b0, b1);
}
DEVICE float to_float(u16 x) { return HALF ? from_half(x) : bits_to_float((u32)x << 16); }

// The state of a warp's GROUPS groups while it reads one unit. Lane = 4 g + t; of a block of 16 tokens and a column of 8
// queries it holds the tokens g and g + 8, the queries 2t and 2t + 1.
struct Groups {
    u32 query[GROUPS][COLUMNS][STEPS][2];
    u32 query_rope[GROUPS][COLUMNS][ROPE_STEPS][2];
    float row_scale[GROUPS][COLUMNS][2];
    float highest[GROUPS][COLUMNS][2], sum[GROUPS][COLUMNS][2];  // the sum of this lane's tokens alone
    float acc[GROUPS][COLUMNS][STEPS][4];

    DEVICE void begin(const Arguments& a, const Unit& u, int first_group, int lane) {
        int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int column = 0; column < COLUMNS; ++column) {
                int row = column * 8 + g, head = (first_group + group) * R + row % R;
                bool live = row < ROWS && row / R < u.queries;
                const u16* q = a.q_absorbed + (i64)(u.row + row / R) * a.q_token + head * a.q_head;
                const u16* r = a.q_rope + (i64)(u.row + row / R) * a.r_token + head * a.r_head;
                float numbers[STEPS][4], rope[ROPE_STEPS][4];
#pragma unroll
                for (int i = 0; i < STEPS * 4; ++i) {
                    int at = FP8 ? 4 * t + i % 4 : 2 * t + i % 2 + 8 * (i % 4 / 2);
                    numbers[i / 4][i % 4] = live ? to_float(q[i / 4 * 16 + at]) : 0.0f;
                }
#pragma unroll
                for (int i = 0; i < ROPE_STEPS * 4; ++i) {
                    int at = i / 4 * 16 + 2 * t + i % 2 + 8 * (i % 4 / 2);
                    rope[i / 4][i % 4] = live && at < D_R ? to_float(r[at]) : 0.0f;
                }
                float unit_of_row = 1.0f;
                if (FP8) {  // half precision: a power of two brings the queries into its range, the exponent undoes it
                    float largest = 0.0f;
#pragma unroll
                    for (int i = 0; i < STEPS * 4; ++i) largest = fmaxf(largest, fabsf(numbers[i / 4][i % 4]));
                    largest = fmaxf(largest, warp_xor(largest, 1));
                    largest = fmaxf(largest, warp_xor(largest, 2));
                    // Not smaller than its least, or q_rope would leave the range of bfloat16.
                    unit_of_row = fmaxf(bits_to_float(float_to_bits(largest) & 0x7F800000), LEAST_UNIT);
                }
                float inverse = 1.0f / unit_of_row;
#pragma unroll
                for (int i = 0; i < STEPS; ++i) {
                    query[group][column][i][0] = pack_weights(numbers[i][0] * inverse, numbers[i][1] * inverse);
                    query[group][column][i][1] = pack_weights(numbers[i][2] * inverse, numbers[i][3] * inverse);
                }
#pragma unroll
                for (int i = 0; i < ROPE_STEPS; ++i)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float x = rope[i][2 * half] * inverse, y = rope[i][2 * half + 1] * inverse;
                        query_rope[group][column][i][half] = HALF ? pack_half(x, y) : pack_bfloat(x, y);
                    }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float unit_of_query = FP8 ? warp_get(unit_of_row, (2 * t + i) * 4) : 1.0f;
                    row_scale[group][column][i] = unit_of_query * a.scale_log2;
                    highest[group][column][i] = NOTHING;
                    sum[group][column][i] = 0.0f;
                }
#pragma unroll
                for (int i = 0; i < STEPS * 4; ++i) acc[group][column][i / 4][i % 4] = 0.0f;
            }
        }
    }

    // A tile into the running softmax. MASKED: some position is not seen by some query.
    template <bool MASKED>
    DEVICE void read(const u8* stage, const Unit& u, int tile, int first_group, int lane) {
        int g = lane / 4, t = lane % 4;
        const u8* mine = stage + place_of(lane % 16) + lane / 16 * 16;
        const u8* scales_of_token = stage + place_of(g) + SCALES_AT;
        u32 keys[BLOCKS][ROPE_STEPS][4];
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
            for (int i = 0; i < ROPE_STEPS; ++i) {
                // Where d_r ends in the middle of a step its queries are zero; what they meet must be finite: its first half.
                int half = i * 16 + 8 < D_R ? lane / 16 * 16 : 0;
                load_matrices(keys[block][i], mine - lane / 16 * 16 + half + VALUE_BYTES + block * BLOCK_BYTES + i * 32);
            }
        // Step by step for all groups: what one group waits for, another one fills.
        float score[GROUPS][BLOCKS][COLUMNS][4], scales[GROUPS][BLOCKS][2];
#pragma unroll
        for (int i = 0; i < GROUPS * BLOCKS * COLUMNS * 4; ++i)
            score[i / 4 / COLUMNS / BLOCKS][i / 4 / COLUMNS % BLOCKS][i / 4 % COLUMNS][i % 4] = 0.0f;
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
            for (int group = 0; group < GROUPS; ++group)
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block) {
                    u32 r[4];
                    load_matrices(r, mine + (first_group + group) * D_H * ELEMENT + block * BLOCK_BYTES + slab * 32);
#pragma unroll
                    for (int i = 0; i < PRODUCTS_PER_LOAD; ++i) {
                        Pairs low{r[0], r[2]}, high{r[1], r[3]};
                        if (FP8) low = widen_e4m3(r[2 * i]), high = widen_e4m3(r[2 * i + 1]);
#pragma unroll
                        for (int column = 0; column < COLUMNS; ++column) {
                            auto& q = query[group][column][PRODUCTS_PER_LOAD * slab + i];
                            multiply_values(score[group][block][column], low.low, high.low, low.high, high.high, q[0], q[1]);
                        }
                    }
                }
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float* its = (const float*)(scales_of_token + block * BLOCK_BYTES + i * place_of(8));
                    scales[group][block][i] = FP8 ? its[first_group + group] : 1.0f;
                }
#pragma unroll
                for (int column = 0; column < COLUMNS; ++column) {
                    auto& s = score[group][block][column];
                    if (FP8)
#pragma unroll
                        for (int i = 0; i < 4; ++i) s[i] *= scales[group][block][i / 2];
#pragma unroll
                    for (int i = 0; i < ROPE_STEPS; ++i) {
                        auto& k = keys[block][i];
                        auto& q = query_rope[group][column][i];
                        multiply_rope(s, k[0], k[1], k[2], k[3], q[0], q[1]);
                    }
                }
            }
#pragma unroll
        for (int i = 0; i < GROUPS * BLOCKS * COLUMNS * 4; ++i) {
            int group = i / 4 / COLUMNS / BLOCKS, block = i / 4 / COLUMNS % BLOCKS, column = i / 4 % COLUMNS;
            float& s = score[group][block][column][i % 4];
            int position = tile * TILE + block * 16 + g + 8 * (i % 4 / 2);
            int query_token = (column * 8 + 2 * t + i % 2) / R;
            if (MASKED && position >= u.visible + query_token) s = NOTHING;
        }
        float weight[GROUPS][BLOCKS][COLUMNS][4], mass[GROUPS][COLUMNS][2];
        bool too_high = false;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
            too_high |= weigh<MASKED>(group, score[group], scales[group], weight[group], mass[group]);
        if (warp_any(too_high)) {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                raise(group, score[group], scales[group]);
                weigh<MASKED>(group, score[group], scales[group], weight[group], mass[group]);
            }
        }
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                u32 w[COLUMNS][2];
#pragma unroll
                for (int column = 0; column < COLUMNS; ++column) {
                    auto& x = weight[group][block][column];
                    w[column][0] = transpose_8x8(pack_weights(x[0], x[1]));
                    w[column][1] = transpose_8x8(pack_weights(x[2], x[3]));
                    if (block == 0) {
                        sum[group][column][0] += mass[group][column][0];
                        sum[group][column][1] += mass[group][column][1];
                    }
                }
#pragma unroll
                for (int slab = 0; slab < SLABS; ++slab) {
                    u32 r[4];
                    load_matrices_transposed(
                        r, mine + (first_group + group) * D_H * ELEMENT + block * BLOCK_BYTES + slab * 32);
#pragma unroll
                    for (int i = 0; i < PRODUCTS_PER_LOAD; ++i) {
                        Pairs first{r[0], r[2]}, second{r[1], r[3]};  // of the tokens
                        if (FP8) {
                            first = widen_e4m3(permute_bytes(r[2 * i], 0x3120));
                            second = widen_e4m3(permute_bytes(r[2 * i + 1], 0x3120));
                        }
#pragma unroll
                        for (int column = 0; column < COLUMNS; ++column) {
                            auto& c = acc[group][column][PRODUCTS_PER_LOAD * slab + i];
                            multiply_values(c, first.low, first.high, second.low, second.high, w[column][0], w[column][1]);
                        }
                    }
                }
            }
    }

    // Weights of a tile under the present maximum, and what they add to the sum; whether one of them is too high.
    template <bool MASKED>
    DEVICE bool weigh(int group, float (&score)[BLOCKS][COLUMNS][4], float (&scales)[BLOCKS][2],
                      float (&weight)[BLOCKS][COLUMNS][4], float (&mass)[COLUMNS][2]) {
        bool too_high = false;
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            mass[column][0] = mass[column][1] = 0.0f;
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float x = score[block][column][i];
                    float p = exp2_fast(x * row_scale[group][column][i % 2] - highest[group][column][i % 2]);
                    if (MASKED && x == NOTHING) p = 0.0f;
                    mass[column][i % 2] += p;
                    weight[block][column][i] = p * scales[block][i / 2];
                    too_high |= !(weight[block][column][i] <= HIGHEST_WEIGHT);  // true of NaN
                }
        }
        return too_high;
    }

    // Moves the maximum to that of this tile, where it is higher, and brings what was summed up to it.
    DEVICE void raise(int group, float (&score)[BLOCKS][COLUMNS][4], float (&scales)[BLOCKS][2]) {
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float top = highest[group][column][i];
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float shift = 0.0f;
                        // Bounded: a token whose values are all zero still takes its part of the sum.
                        if (FP8) shift = fminf(fmaxf(log2_fast(scales[block][half]), -LOG2_SCALE_RANGE), LOG2_SCALE_RANGE);
                        top = fmaxf(top, score[block][column][2 * half + i] * row_scale[group][column][i] + shift);
                    }
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2) top = fmaxf(top, warp_xor(top, mask));
                float before = highest[group][column][i];
                float fade = before == top ? 1.0f : exp2_fast(before - top);
                highest[group][column][i] = top;
                sum[group][column][i] *= fade;
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    acc[group][column][step][i] *= fade;
                    acc[group][column][step][i + 2] *= fade;
                }
            }
    }

    // `slot` < 0: the whole unit was read here, straight to the output.
    DEVICE void finish(const Arguments& a, const Unit& u, int first_group, int slot, int lane) {
        int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
#pragma unroll
            for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float total = sum[group][column][i];
#pragma unroll
                    for (int mask = 4; mask < 32; mask *= 2) total += warp_xor(total, mask);
                    float divisor = total == 0.0f ? 1.0f : total;  // a row that sees nothing
                    float norm = 1.0f / divisor;
                    float lse = (highest[group][column][i] + log2_fast(divisor)) * LN2;
                    int row = column * 8 + 2 * t + i;
                    bool live = row < ROWS && row / R < u.queries;
                    int head = (first_group + group) * R + row % R;
                    i64 token = u.row + row / R;
                    i64 part = (i64)slot * (G * ROWS) + (first_group + group) * ROWS + row;
                    if (live && g == 0 && slot >= 0) a.part_lse[part] = lse;
                    if (live && g == 0 && slot < 0 && HAS_LSE) a.lse[token * a.lse_token + head] = lse;
#pragma unroll
                    for (int step = 0; step < STEPS; ++step) {
                        float x = acc[group][column][step][i] * norm, y = acc[group][column][step][i + 2] * norm;
                        int dx = step * 16 + (FP8 ? 2 * g : g), dy = dx + (FP8 ? 1 : 8);
                        if (live && slot >= 0) {
                            a.part_out[part * BLOCK_D + dx] = x;
                            a.part_out[part * BLOCK_D + dy] = y;
                        } else if (live) {
                            u32 pair = HALF ? pack_half(x, y) : pack_bfloat(x, y);
                            u16* out = a.out + token * a.out_token + head * a.out_head;
                            out[dx] = (u16)pair;
                            out[dy] = (u16)(pair >> 16);
                        }
                    }
                }
    }
};

extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32, PER_SM) read_rows(const __grid_constant__ Arguments a) {
    SHARED_MEMORY(shared);  // STAGES tiles, then the barriers of the ring
    u64* full = (u64*)(shared + STAGES * STAGE_BYTES);
    u64* empty = full + STAGES;
    int warp = thread_index() / 32, lane = thread_index() % 32, first_group = warp * GROUPS, share = block_x();
    if (thread_index() == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, WARPS);
        }
        barriers_visible();
    }
    block_together();
    wait_for_previous_launch();
    let_next_launch_start();

    int unit, tile, left, seq_len;
    if (FIXED_TILES) {
        unit = block_y(), tile = share * FIXED_TILES, left = FIXED_TILES;
        seq_len = a.seq_lens[unit / a.blocks_per_seq];
    } else {
        const int* entry = a.schedule + HEADER + share * ENTRY;
        unit = entry[0], tile = entry[1], left = entry[2], seq_len = entry[3];
    }
    if (left <= 0 || unit >= a.units) return;
    if (warp == WARPS) {
        Fetch fetch{unit, tile, left};
        fetch.enter(a, lane, seq_len);
        for (int fetched = 0; fetch.left > 0; ++fetched) {
            int place = fetched % STAGES;
            if (fetched >= STAGES) barrier_wait(empty + place, (fetched / STAGES - 1) & 1);
            fetch.issue(a, lane, shared + place * STAGE_BYTES, full + place);
            fetch.advance(a, lane);
        }
        return;
    }
    int read = 0;
    while (true) {
        Unit u = Unit::at(a, unit, seq_len);
        int end = min(tile + left, u.tiles);
        if (tile < end) {
            Groups groups;
            groups.begin(a, u, first_group, lane);
            for (int i = tile; i < end; ++i, ++read) {
                int place = read % STAGES;
                u8* stage = shared + place * STAGE_BYTES;
                barrier_wait(full + place, read / STAGES & 1);
                if ((i + 1) * TILE <= u.visible) {
                    groups.template read<false>(stage, u, i, first_group, lane);
                } else {
                    // Rows past the length were not fetched: what lies there meets a weight of zero, and must be finite.
                    for (int row = u.last() - i * TILE; row < TILE; ++row)
                        for (int at = lane * 4; at < TOKEN_BYTES; at += 128) *(u32*)(stage + place_of(row) + at) = 0;
                    plain_writes_before_copies();
                    warp_together();
                    groups.template read<true>(stage, u, i, first_group, lane);
                }
                warp_together();
                if (lane == 0) barrier_arrive(empty + place);
            }
            int slot = FIXED_TILES ? unit * a.max_shares + share : share * 2 + (tile == 0);
            groups.finish(a, u, first_group, tile == 0 && end == u.tiles ? -1 : slot, lane);
        }
        left -= max(end - tile, 0);
        tile = 0;
        if (FIXED_TILES || left <= 0 || ++unit >= a.units) return;
        seq_len = a.seq_lens[unit / a.blocks_per_seq];
    }
}
