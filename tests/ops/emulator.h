// src/gva/ops/cuda/device.cuh for a CPU: a kernel runs here as it does on a GPU, block after block, its threads as
// fibers that take turns wherever they wait for one another, in an order drawn by lot. So is the time a copy lands,
// at once or when it is waited for; until then NaN lies in its place. What a GPU would not forgive ends the run.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i64 = int64_t;
using std::max;
using std::min;

#define DEVICE inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define SHARED_MEMORY(name) u8* name = block.shared.data()

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(256 << 10);
    bool done = false;
};
struct Meeting {  // of a warp's or a block's threads
    int size = 0, arrived = 0;
    long round = 0;
    const char* what = nullptr;  // they have come to do
};
struct Copy {
    void* to;
    const void* from;
    u32 bytes;
    u64* barrier;
};
struct Barrier {
    u64* at;
    int arrivals, pending;
    i64 bytes;
    u32 phase;
};
struct Operands {
    u32 a[4], b[2];
};
struct Block {
    int x, y, threads, current = 0;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Meeting> warps;
    std::vector<u32> given;            // what each thread brought to the present warp operation
    std::vector<const u8*> addresses;
    std::vector<Operands> operands;
    Meeting all;
    std::vector<u8> shared;
    std::vector<Copy> copies;
    std::vector<Barrier> barriers;
    std::minstd_rand lot;
    long events = 0;  // that let someone go on
    ucontext_t scheduler;
};
static Block block;

inline void require(bool good, const char* otherwise) {
    if (good) return;
    fprintf(stderr, "%s\n", otherwise);
    abort();
}

inline int thread_index() { return block.current; }
inline int block_x() { return block.x; }
inline int block_y() { return block.y; }
inline void take_turns() { swapcontext(&block.fibers[block.current]->context, &block.scheduler); }
inline void meet(Meeting& m, const char* what) {
    long round = m.round;
    require(m.arrived == 0 || m.what == what, "threads of a warp at different instructions");
    m.what = what;
    if (++m.arrived == m.size) {
        m.arrived = 0;
        ++m.round;
        ++block.events;
    }
    while (m.round == round) take_turns();
}
inline void block_together() { meet(block.all, __func__); }
inline void warp_meets(const char* what) { meet(block.warps[block.current / 32], what); }
inline void warp_together() { warp_meets(__func__); }

// --- barriers and copies

inline Barrier& barrier_of(u64* at) {
    for (auto& b : block.barriers)
        if (b.at == at) return b;
    require(false, "a barrier that was not initialised");
    abort();
}
inline void settle(Barrier& b) {
    require(b.pending >= 0, "more arrivals than a barrier expects");
    if (b.pending == 0 && b.bytes == 0) {
        ++b.phase;
        ++block.events;
        b.pending = b.arrivals;
    }
}
inline void barrier_init(u64* at, int arrivals) { block.barriers.push_back({at, arrivals, arrivals, 0, 0}); }
inline void barriers_visible() {}
inline void barrier_arrive(u64* at) {
    Barrier& b = barrier_of(at);
    --b.pending;
    settle(b);
}
inline void barrier_expect(u64* at, u32 bytes) {
    Barrier& b = barrier_of(at);
    b.bytes += bytes;
    --b.pending;
    settle(b);
}
inline void land(size_t i) {
    Copy c = block.copies[i];
    block.copies.erase(block.copies.begin() + i);
    memcpy(c.to, c.from, c.bytes);
    barrier_of(c.barrier).bytes -= c.bytes;
    settle(barrier_of(c.barrier));
}
inline void barrier_wait(u64* at, u32 parity) {
    while ((barrier_of(at).phase & 1) == parity) {
        for (size_t i = block.copies.size(); i-- > 0;)
            if (block.copies[i].barrier == at && block.lot() % 2) land(i);
        take_turns();
    }
}
inline bool is_shared(const void* p, size_t bytes) {
    return p >= block.shared.data() && (const u8*)p + bytes <= (const u8*)block.barriers[0].at;
}
inline void bulk_copy(void* to, const u8* from, u32 bytes, u64* barrier) {
    bool aligned = (uintptr_t)to % 16 == 0 && (uintptr_t)from % 16 == 0 && bytes % 16 == 0;
    require(aligned && bytes > 0, "a copy that is not aligned to 16 bytes");
    require(is_shared(to, bytes), "a copy to somewhere else");
    memset(to, 0xFF, bytes);
    block.copies.push_back({to, from, bytes, barrier});
    if (block.lot() % 4 == 0) land(block.lot() % block.copies.size());
}
inline void plain_writes_before_copies() {}

// --- warps: everyone brings a number, everyone sees all of them

inline void bring(u32 x, const char* what) {
    block.given[block.current] = x;
    warp_meets(what);
}
inline u32 brought(int lane) { return block.given[block.current / 32 * 32 + lane]; }
inline u32 float_to_bits(float x) {
    u32 y;
    memcpy(&y, &x, 4);
    return y;
}
inline float bits_to_float(u32 x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
inline bool warp_any(bool x) {
    bring(x, __func__);
    bool any = false;
    for (int i = 0; i < 32; ++i) any |= brought(i) != 0;
    warp_together();
    return any;
}
inline float warp_get(float x, int lane) {
    bring(float_to_bits(x), __func__);
    float y = bits_to_float(brought(lane));
    warp_together();
    return y;
}
inline float warp_xor(float x, int mask) { return warp_get(x, (block.current % 32) ^ mask); }
inline u16 element(u32 pair, int i) { return (u16)(pair >> (16 * i)); }
inline u32 transpose_8x8(u32 x) {
    bring(x, __func__);
    int g = block.current % 32 / 4, t = block.current % 4;
    u32 y = 0;
    for (int i = 0; i < 2; ++i) y |= (u32)element(brought((2 * t + i) * 4 + g / 2), g % 2) << (16 * i);
    warp_together();
    return y;
}

// --- matrices

inline void gather(u32 (&r)[4], const u8* p, bool transposed) {
    require((uintptr_t)p % 16 == 0 && is_shared(p, 16), "a row of a matrix that is not in a tile, or not aligned");
    block.addresses[block.current] = p;
    warp_meets(transposed ? "transposed" : "straight");
    int g = block.current % 32 / 4, t = block.current % 4, warp = block.current / 32 * 32;
    for (int m = 0; m < 4; ++m) {
        r[m] = 0;
        for (int i = 0; i < 2; ++i) {
            int row = transposed ? 2 * t + i : g, column = transposed ? g : 2 * t + i;
            u16 x;
            memcpy(&x, block.addresses[warp + m * 8 + row] + 2 * column, 2);
            r[m] |= (u32)x << (16 * i);
        }
    }
    warp_together();
}
inline void load_matrices(u32 (&r)[4], const u8* p) { gather(r, p, false); }
inline void load_matrices_transposed(u32 (&r)[4], const u8* p) { gather(r, p, true); }

inline float from_half(u16 x) {
    int exponent = x >> 10 & 31, fraction = x & 1023;
    float y = exponent == 31  ? (fraction ? NAN : INFINITY)
              : exponent == 0 ? std::ldexp((float)fraction, -24)
                              : std::ldexp((float)(1024 + fraction), exponent - 25);
    return x & 0x8000 ? -y : y;
}
inline u16 to_half(float x) {
    u16 sign = std::signbit(x) ? 0x8000 : 0;
    x = std::fabs(x);
    if (std::isnan(x)) return 0x7FFF;
    if (x >= 65520.0f) return sign | 0x7C00;
    int exponent;
    std::frexp(x, &exponent);
    exponent = std::max(exponent - 1, -14);
    u32 units = (u32)std::nearbyint(std::ldexp(x, 10 - exponent));  // of the last place; 2048 carries by itself
    return sign | (u16)(units + (units >= 1024 ? (exponent + 14) << 10 : 0));
}
inline u16 to_bfloat(float x) {
    u32 bits = float_to_bits(x);
    if (std::isnan(x)) return 0x7FFF;
    return (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline float from_bfloat(u16 x) { return bits_to_float((u32)x << 16); }
inline u32 pack_half(float first, float second) { return to_half(first) | (u32)to_half(second) << 16; }
inline u32 pack_bfloat(float first, float second) { return to_bfloat(first) | (u32)to_bfloat(second) << 16; }

inline void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float (*number)(u16)) {
    int lane = block.current % 32, g = lane / 4, t = lane % 4;
    Operands* all = block.operands.data() + block.current / 32 * 32;
    all[lane] = {{a0, a1, a2, a3}, {b0, b1}};
    warp_meets(__func__);
    for (int i = 0; i < 4; ++i) {
        int row = g + 8 * (i / 2), column = 2 * t + i % 2;
        double sum = c[i];
        for (int k = 0; k < 16; ++k) {
            int inside = k % 8;
            u32 x = all[row % 8 * 4 + inside / 2].a[row / 8 + 2 * (k / 8)], y = all[column * 4 + inside / 2].b[k / 8];
            sum += (double)number(element(x, k % 2)) * number(element(y, k % 2));
        }
        c[i] = (float)sum;
    }
    warp_together();
}
inline void multiply_half(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    multiply(c, a0, a1, a2, a3, b0, b1, from_half);
}
inline void multiply_bfloat(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    multiply(c, a0, a1, a2, a3, b0, b1, from_bfloat);
}
inline u32 widen_pair(u16 pair) {
    u32 y = 0;
    for (int i = 0; i < 2; ++i) {
        u8 x = (u8)(pair >> (8 * i));
        int exponent = x >> 3 & 15, fraction = x & 7;
        float v = exponent == 0 ? std::ldexp((float)fraction, -9) : std::ldexp((float)(8 + fraction), exponent - 10);
        if (exponent == 15 && fraction == 7) v = NAN;
        y |= (u32)to_half(x & 0x80 ? -v : v) << (16 * i);
    }
    return y;
}
struct Pairs {
    u32 low, high;
};
inline Pairs widen_e4m3(u32 four) { return {widen_pair((u16)four), widen_pair((u16)(four >> 16))}; }
inline u32 permute_bytes(u32 x, u32 order) {
    u32 y = 0;
    for (int i = 0; i < 4; ++i) y |= (x >> (8 * (order >> (4 * i) & 3)) & 255) << (8 * i);
    return y;
}
inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }
inline void wait_for_previous_launch() {}
inline void let_next_launch_start() {}

// --- launching

struct Arguments;
extern "C" void read_rows(const Arguments a);
void call(const Arguments* a);

static void thread_main(u32 high, u32 low) {
    call((const Arguments*)((u64)high << 32 | low));
    block.fibers[block.current]->done = true;
    ++block.events;
    take_turns();
}

extern "C" void emulate(const Arguments* a, int grid_x, int grid_y, int threads, int shared_bytes, int seed) {
    for (int y = 0; y < grid_y; ++y)
        for (int x = 0; x < grid_x; ++x) {
            block = Block();
            block.x = x, block.y = y, block.threads = threads;
            block.lot.seed(1 + seed + 1000 * (x + grid_x * y));
            block.warps.resize(threads / 32);
            for (auto& w : block.warps) w.size = 32;
            block.all.size = threads;
            block.given.resize(threads);
            block.addresses.resize(threads);
            block.operands.resize(threads);
            block.shared.assign(shared_bytes, 0xFF);  // NaN in every format
            for (int i = 0; i < threads; ++i) {
                block.fibers.push_back(std::make_unique<Fiber>());
                Fiber& f = *block.fibers.back();
                getcontext(&f.context);
                f.context.uc_stack.ss_sp = f.stack.data();
                f.context.uc_stack.ss_size = f.stack.size();
                f.context.uc_link = nullptr;
                makecontext(&f.context, (void (*)())thread_main, 2, (u32)((u64)a >> 32), (u32)(u64)a);
            }
            long events = 0, rounds = 0;
            int resting = -1;  // a warp, for a while
            for (int left = threads; left > 0;) {
                left = 0;
                int first = block.lot() % threads;
                if (block.lot() % 64 == 0) resting = block.lot() % (2 * threads / 32);
                for (int i = 0; i < threads; ++i) {
                    block.current = (first + i) % threads;
                    Fiber& f = *block.fibers[block.current];
                    if (!f.done && block.current / 32 != resting) swapcontext(&block.scheduler, &f.context);
                    left += !f.done;
                }
                rounds = block.events == events ? rounds + 1 : 0, events = block.events;
                require(rounds < 10000, "a wait that never ends");
            }
            require(block.copies.empty(), "a block that ended before its copies landed");
        }
}
