/* Attention of a few queries to all that is cached of their sequences, on a processor. Every cached number comes from
 * memory once: TILE tokens at a time, for all query rows of all heads.
 *
 *     score(i, h, t) = (q[i, h] . key[t, h / R] + q_rope[i, h] . k_rope[t]) * scale
 *     out[i, h]      = sum_t softmax(score)[t] value[t, h / R]
 *
 * Absorbed queries meet values, which are then the keys too; other keys lie by themselves, with a slice or without.
 *
 * unit   what a thread takes at a time: `block` queries of a sequence against one piece of its tokens
 * piece  PIECE tokens, so that nothing depends on the number of threads, nor on the batch
 * row    one query of one head; those of a group lie side by side, query after query, up to a multiple of 4
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TILE 32
#define PIECE 1024
#define LOWEST -1e30f /* where a maximum starts: finite, so that a row that sees nothing stays a number */

#if defined(__AVX512F__)
#define LANES 16
#define IN_FOURS(a, b, c, d) \
    a, b, c, d, a + 4, b + 4, c + 4, d + 4, a + 8, b + 8, c + 8, d + 8, a + 12, b + 12, c + 12, d + 12
#elif defined(__AVX__)
#define LANES 8
#define IN_FOURS(a, b, c, d) a, b, c, d, a + 4, b + 4, c + 4, d + 4
#else
#define LANES 4
#define IN_FOURS(a, b, c, d) a, b, c, d
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));

#ifdef __clang__
#define PICK(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define PICK(x, y, ...) __builtin_shuffle(x, y, (bits){__VA_ARGS__})
#endif
#define INLINE static inline __attribute__((always_inline))
#define ALONE static __attribute__((noinline)) /* so that what it works on stays in registers */

typedef struct { /* read.py's class of the same name */
    const char *q, *q_rope, *keys, *k_rope, *values;
    const int32_t *table, *lengths, *starts; /* starts: NULL where every sequence has `queries` of them */
    const uint8_t *mask;                     /* [B, queries, T], what a query sees; NULL: all up to itself */
    char *out;
    float *lse, *parts; /* of each unit its rows: sums of values, padded, then the maxima, then the sums of weights */
    int64_t *next;      /* the unit that nobody has taken yet */
    int64_t q_token, q_head, q_rope_token, q_rope_head;
    int64_t keys_page, keys_token, keys_group, rope_page, rope_token, values_page, values_token, values_group;
    int64_t table_row, mask_sequence, mask_query, out_token, out_head, lse_token;
    int32_t B, H, G, d_k, d_r, d_v, page, queries, block, blocks, pieces, half; /* half: bfloat16, else float32 */
    float scale;
} Arguments;

typedef struct {
    int64_t b, first, count, rows;       /* its sequence, its queries, and rows of a group */
    int64_t begin, end, newest, pieces;  /* its tokens, the newest that its first query sees, pieces of the sequence */
    float *acc, *max, *sum;              /* its part */
} Unit;

typedef struct { /* tokens, and which queries [query, TILE] do not see which, unless all see the whole */
    const char *keys[TILE], *slices[TILE], *values[TILE];
    uint8_t *hidden;
    int64_t found;
    int whole;
} Tile;

typedef struct { /* of a thread; widths are padded to whole vectors */
    float *q, *scores, *keys, *slices, *values;
    Tile tiles[2];
} Room;

static int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* ---- numbers ---- */

INLINE vec load(const void *x) { return *(const loose *)x; }
INLINE vec choose(bits where, vec a, vec b) { return (vec)((where & (bits)a) | (~where & (bits)b)); }

/* `width` numbers as float32, zeros behind them up to whole vectors. */
static void copy(float *to, const char *from, int64_t width, int half) {
    for (int64_t i = 0; i < width && half; i++) ((uint32_t *)to)[i] = (uint32_t)((const uint16_t *)from)[i] << 16;
    if (!half) memcpy(to, from, 4 * width);
    for (int64_t i = width; i < up(width, LANES); i++) to[i] = 0;
}

static void put(char *to, int64_t i, float x, int half) {
    uint32_t wide;
    memcpy(&wide, &x, 4);
    if (half) ((uint16_t *)to)[i] = x != x ? 0x7fc0 : (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
    else ((float *)to)[i] = x;
}

/* 2^x for x <= 0, and 0 where that would not be a normal number. */
INLINE vec power(vec x) {
    static const float terms[] = {1.5252734e-5f, 1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f,
                                  5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f}; /* ln(2)^k / k! */
    bits none = (bits)(x < -126.f);
    vec from = choose(none, (vec){0}, x), whole = from + 12582912.f; /* 1.5 * 2^23: its last bits are whole numbers */
    vec rest = from - (whole - 12582912.f), y = (vec){0} + terms[0];
    for (int k = 1; k < 8; k++) y = y * rest + terms[k];
    return choose(none, (vec){0}, (vec)((bits)y + ((bits)whole << 23)));
}

/* The sums, or the largest numbers, of four vectors. */
#define REDUCE(name, OP)                                                                                       \
    INLINE four name(vec a, vec b, vec c, vec d) {                                                             \
        vec e = OP(PICK(a, b, IN_FOURS(0, LANES, 1, LANES + 1)), PICK(a, b, IN_FOURS(2, LANES + 2, 3, LANES + 3))); \
        vec f = OP(PICK(c, d, IN_FOURS(0, LANES, 1, LANES + 1)), PICK(c, d, IN_FOURS(2, LANES + 2, 3, LANES + 3))); \
        vec g = OP(PICK(e, f, IN_FOURS(0, 1, LANES, LANES + 1)), PICK(e, f, IN_FOURS(2, 3, LANES + 2, LANES + 3))); \
        four part[LANES / 4], result;                                                                          \
        memcpy(part, &g, sizeof g);                                                                            \
        result = part[0];                                                                                      \
        for (int i = 1; i < LANES / 4; i++) result = OP(result, part[i]);                                      \
        return result;                                                                                         \
    }
#define PLUS(x, y) ((x) + (y))
#define LARGER(x, y)                                                                                           \
    ({                                                                                                         \
        __typeof__(x) x_ = (x), y_ = (y);                                                                      \
        __typeof__(x_ > y_) is_ = x_ > y_;                                                                     \
        (__typeof__(x_))((is_ & (__typeof__(is_))x_) | (~is_ & (__typeof__(is_))y_));                          \
    })
REDUCE(sums, PLUS)
REDUCE(largest, LARGER)

/* ---- 4 rows of a group and one tile ---- */

/* Scores [4, TILE] of 4 tokens. The vectors of 4 rows lie side by side in q: each number meets 4 others in registers. */
ALONE void score(float *scores, const float *q, const char **keys, int64_t skip_k, int64_t width_k, const char **slices,
                 int64_t skip_r, int64_t width_r) {
#define ROWS(DO) DO(0) DO(1) DO(2) DO(3)
#define BEGIN(i) vec w##i = {0}, x##i = {0}, y##i = {0}, z##i = {0};
#define MEET(i) own = load(q + i * LANES), w##i += own * w, x##i += own * x, y##i += own * y, z##i += own * z;
#define END(i) *(four *)(scores + i * TILE) = sums(w##i, x##i, y##i, z##i);
    ROWS(BEGIN)
    for (int part = 0; part < 2; part++) {
        const char **tokens = part ? slices : keys;
        int64_t skip = part ? skip_r : skip_k, width = part ? width_r : width_k;
        const char *a = tokens[0] + skip, *b = tokens[1] + skip, *c = tokens[2] + skip, *d = tokens[3] + skip;
        for (int64_t at = 0; at < 4 * width; at += 4 * LANES, q += 4 * LANES) {
            vec w = load(a + at), x = load(b + at), y = load(c + at), z = load(d + at), own;
            ROWS(MEET)
        }
    }
    ROWS(END)
}

/* Scores become weights; returns what all that was summed before is to be multiplied by. */
ALONE four soften(float *scores, int64_t tokens, float *max, float *sum) {
    vec most[4], total[4];
    for (int i = 0; i < 4; i++) {
        most[i] = load(scores + i * TILE), total[i] = (vec){0};
        for (int64_t t = LANES; t < tokens; t += LANES) most[i] = LARGER(most[i], load(scores + i * TILE + t));
    }
    four before = *(four *)max, top = largest(most[0], most[1], most[2], most[3]);
    *(four *)max = top = LARGER(top, before);
    for (int i = 0; i < 4; i++) {
        for (int64_t t = 0; t < tokens; t += LANES) {
            vec weight = power(load(scores + i * TILE + t) - top[i]);
            total[i] += weight, *(loose *)(scores + i * TILE + t) = weight;
        }
        before[i] = exp2f(before[i] - top[i]);
    }
    *(four *)sum = *(four *)sum * before + sums(total[0], total[1], total[2], total[3]);
    return before;
}

/* Rows of acc, `stride` apart, gain weights times values; `columns` vectors of them. */
INLINE void gain(float *acc, int64_t stride, const float *weights, four before, const char **values, int64_t skip,
                 int64_t tokens, int columns) {
    vec held[4][4], value[4];
    for (int i = 0; i < 4; i++)
        for (int c = 0; c < columns; c++) held[i][c] = load(acc + i * stride + c * LANES) * before[i];
    for (int64_t t = 0; t < tokens; t++) {
        for (int c = 0; c < columns; c++) value[c] = load(values[t] + skip + 4 * c * LANES);
        for (int i = 0; i < 4; i++)
            for (int c = 0; c < columns; c++) held[i][c] += value[c] * weights[i * TILE + t];
    }
    for (int i = 0; i < 4; i++)
        for (int c = 0; c < columns; c++) *(loose *)(acc + i * stride + c * LANES) = held[i][c];
}

ALONE void gain_all(float *acc, int64_t stride, const float *weights, four before, const char **values, int64_t skip,
                    int64_t tokens) {
    int64_t at = 0;
    for (; at + 4 * LANES <= stride; at += 4 * LANES)
        gain(acc + at, stride, weights, before, values, skip + 4 * at, tokens, 4);
    for (; at < stride; at += LANES) gain(acc + at, stride, weights, before, values, skip + 4 * at, tokens, 1);
}

/* ---- one tile ---- */

/* The next tokens that any query of the unit sees, and where their parts lie. What none sees is never read. */
static void collect(const Arguments *a, const Unit *u, int64_t *at, Tile *tile) {
    const int32_t *table = a->table + u->b * a->table_row;
    const uint8_t *mask = a->mask ? a->mask + u->b * a->mask_sequence + u->first * a->mask_query : NULL;
    const int size = a->half ? 2 : 4;
    int64_t page = *at / a->page, in_page = *at % a->page, n = 0;
    tile->whole = !mask && *at + TILE <= u->newest + 1;
    for (; *at < u->end && n < TILE; ++*at, ++in_page) {
        int seen = tile->whole;
        if (in_page == a->page) in_page = 0, page++;
        for (int64_t i = 0; i < u->count && !tile->whole; i++) {
            int sees = *at <= u->newest + i && (!mask || mask[i * a->mask_query + *at]);
            tile->hidden[i * TILE + n] = !sees, seen |= sees;
        }
        if (!seen) continue;
        tile->keys[n] = a->keys + (table[page] * a->keys_page + in_page * a->keys_token) * size;
        tile->values[n] = a->values + (table[page] * a->values_page + in_page * a->values_token) * size;
        tile->slices[n++] = a->k_rope + (table[page] * a->rope_page + in_page * a->rope_token) * size;
    }
    tile->found = n;
    for (; n && n % 4; n++) /* weighed by nothing */
        tile->keys[n] = tile->keys[0], tile->values[n] = tile->values[0], tile->slices[n] = tile->slices[0];
}

/* Numbers as `score` and `gain` read them: as they lie, or copied to `room` [TILE, padded width], to which `copied` then
 * points. Returns how far behind the pointers they are. */
static int64_t ready(const Arguments *a, const char ***tokens, const char **copied, float *room, int64_t count,
                     int64_t skip, int64_t width) {
    skip *= a->half ? 2 : 4;
    if (!a->half && width % LANES == 0) return skip;
    for (int64_t t = 0; t < up(count, 4); t++) {
        copied[t] = (const char *)(room + t * up(width, LANES));
        copy(room + t * up(width, LANES), (*tokens)[t] + skip, width, a->half);
    }
    *tokens = copied;
    return 0;
}

INLINE void fetch(const char *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

/* All heads to one tile, while the next one is fetched. */
static void attend(const Arguments *a, const Unit *u, Room *room, Tile *tile, const Tile *next) {
    const int64_t R = a->H / a->G, width_k = up(a->d_k, LANES), width_r = up(a->d_r, LANES), width_v = up(a->d_v, LANES);
    const int64_t n = tile->found, size = a->half ? 2 : 4;
    const char *copied[3][TILE], **slices = tile->slices;
    const int64_t skip_r = ready(a, &slices, copied[0], room->slices, a->d_r ? n : 0, 0, a->d_r);
    for (int64_t g = 0; g < a->G; g++) {
        const char **keys = tile->keys, **values = tile->values;
        int64_t skip_k = ready(a, &keys, copied[1], room->keys, n, g * a->keys_group, a->d_k), skip_v = skip_k;
        if (a->keys == a->values) values = keys;
        else skip_v = ready(a, &values, copied[2], room->values, n, g * a->values_group, a->d_v);
        for (int64_t row = 0, own = g * u->rows; row < u->rows; row += 4, own += 4) {
            for (int64_t t = 0; t < n; t += 4) {
                score(room->scores + t, room->q + own * (width_k + width_r), keys + t, skip_k, width_k, slices + t, skip_r,
                      width_r);
                for (int64_t j = t; row == 0 && j < t + 4 && j < next->found; j++) {
                    fetch(next->keys[j] + g * a->keys_group * size, a->d_k * size);
                    if (a->keys != a->values) fetch(next->values[j] + g * a->values_group * size, a->d_v * size);
                    if (g == 0) fetch(next->slices[j], a->d_r * size);
                }
            }
            for (int i = 0; i < 4; i++) {
                const int64_t query = (row + i) / R;
                float *scores = room->scores + i * TILE;
                for (int64_t t = n; t < up(n, LANES); t++) scores[t] = -INFINITY;
                for (int64_t t = 0; t < n && query < u->count && !tile->whole; t++)
                    if (tile->hidden[query * TILE + t]) scores[t] = -INFINITY;
            }
            four before = soften(room->scores, n, u->max + own, u->sum + own);
            gain_all(u->acc + own * width_v, width_v, room->scores, before, values, skip_v, n);
        }
    }
}

/* ---- one unit ---- */

/* The unit of this number; 0 where there is none: no such query, or no such piece. */
static int unit(const Arguments *a, int64_t number, Unit *u) {
    const int64_t piece = number % a->pieces, rows = up(a->block * (a->H / a->G), 4), width = up(a->d_v, LANES);
    u->b = number / a->pieces / a->blocks, u->first = number / a->pieces % a->blocks * a->block, u->rows = rows;
    u->acc = a->parts + number * a->G * rows * (width + 2);
    u->max = u->acc + a->G * rows * width, u->sum = u->max + a->G * rows;
    const int64_t queries = a->starts ? a->starts[u->b + 1] - a->starts[u->b] : a->queries, length = a->lengths[u->b];
    u->count = queries - u->first < a->block ? queries - u->first : a->block;
    u->newest = length - queries + u->first;
    const int64_t end = u->newest + u->count < length ? u->newest + u->count : length;
    u->pieces = end > PIECE ? up(end, PIECE) / PIECE : 1;
    u->begin = piece * PIECE, u->end = end < u->begin + PIECE ? end : u->begin + PIECE;
    return u->count > 0 && piece < u->pieces;
}

/* The token of a row, and its head; 0 where it only pads. */
static int place(const Arguments *a, const Unit *u, int64_t row, int64_t *token, int64_t *head) {
    const int64_t R = a->H / a->G, query = row % u->rows / R;
    *token = (a->starts ? a->starts[u->b] : u->b * a->queries) + u->first + query;
    *head = row / u->rows * R + row % u->rows % R;
    return query < u->count;
}

static void run_unit(const Arguments *a, const Unit *u, Room *room) {
    const int64_t width_k = up(a->d_k, LANES), width = width_k + up(a->d_r, LANES), size = a->half ? 2 : 4;
    int64_t at = u->begin, token, head;
    Tile *tile = room->tiles, *next = room->tiles + 1, *done;
    memset(room->q, 0, 4 * a->G * u->rows * width), memset(u->acc, 0, 4 * a->G * u->rows * (up(a->d_v, LANES) + 2));
    for (int64_t row = 0; row < a->G * u->rows; row++) {
        float *to = room->q + row / 4 * 4 * width + row % 4 * LANES, *whole = room->scores;
        u->max[row] = LOWEST;
        if (!place(a, u, row, &token, &head)) continue;
        copy(whole, a->q + (token * a->q_token + head * a->q_head) * size, a->d_k, a->half);
        copy(whole + width_k, a->q_rope + (token * a->q_rope_token + head * a->q_rope_head) * size, a->d_r, a->half);
        for (int64_t i = 0; i < width; i++) to[i / LANES * 4 * LANES + i % LANES] = whole[i] * a->scale;
    }
    for (collect(a, u, &at, tile); tile->found; done = tile, tile = next, next = done) {
        collect(a, u, &at, next);
        attend(a, u, room, tile, next);
    }
}

/* ---- what Python calls ---- */

/* Takes units until none is left; any number of threads at once. Returns 0, or 1 without memory. */
int run(const Arguments *a) {
    const int64_t width_k = up(a->d_k, LANES), width_r = up(a->d_r, LANES), rows = a->G * up(a->block * (a->H / a->G), 4);
    const int64_t sizes[] = {rows * (width_k + width_r), 4 * TILE + width_k + width_r, TILE * width_k, TILE * width_r,
                             TILE * up(a->d_v, LANES), a->block * TILE / 2};
    int64_t number, total = 0;
    for (int i = 0; i < 6; i++) total += up(sizes[i], LANES);
    float *memory = aligned_alloc(64, up(4 * total, 64)), *at = memory, *parts[6];
    if (!memory) return 1;
    for (int i = 0; i < 6; i++) parts[i] = at, at += up(sizes[i], LANES);
    Room room = {parts[0], parts[1], parts[2], parts[3], parts[4], {{.found = 0}, {.found = 0}}};
    for (int i = 0; i < 2; i++) room.tiles[i].hidden = (uint8_t *)parts[5] + i * a->block * TILE;
    Unit u;
    while ((number = __atomic_fetch_add(a->next, 1, __ATOMIC_RELAXED)) < (int64_t)a->B * a->blocks * a->pieces)
        if (unit(a, number, &u)) run_unit(a, &u, &room);
    free(memory);
    return 0;
}

/* When all units are done, the pieces of each row become its output; the first part takes the sum. */
void merge(const Arguments *a) {
    const int64_t width = up(a->d_v, LANES);
    int64_t token, head;
    Unit u, other;
    for (int64_t first = 0; first < (int64_t)a->B * a->blocks * a->pieces; first += a->pieces) {
        if (!unit(a, first, &u)) continue;
        for (int64_t row = 0; row < a->G * u.rows; row++) {
            float *acc = u.acc + row * width, max = u.max[row], sum = u.sum[row];
            if (!place(a, &u, row, &token, &head)) continue;
            for (int64_t piece = 1; piece < u.pieces && unit(a, first + piece, &other); piece++) {
                const float top = other.max[row] > max ? other.max[row] : max;
                const float mine = exp2f(max - top), its = exp2f(other.max[row] - top);
                for (int64_t i = 0; i < a->d_v; i++) acc[i] = mine * acc[i] + its * other.acc[row * width + i];
                sum = mine * sum + its * other.sum[row], max = top;
            }
            char *out = a->out + (token * a->out_token + head * a->out_head) * (a->half ? 2 : 4);
            for (int64_t i = 0; i < a->d_v; i++) put(out, i, sum == 0 ? 0 : acc[i] / sum, a->half);
            if (a->lse) a->lse[token * a->lse_token + head] = sum == 0 ? -INFINITY : (max + log2f(sum)) * 0.69314718f;
        }
    }
}
