// What the kernel asks of the hardware (sm90), one function each. tests/ops/emulator.h has the same functions for a CPU.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// --- barriers in shared memory, and the copy engine that signals them

DEVICE void barrier_init(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
DEVICE void barriers_visible() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
DEVICE void barrier_expect(u64* barrier, u32 bytes) {  // arrives, and holds the phase until `bytes` have come
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
DEVICE void barrier_wait(u64* barrier, u32 parity) {
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    }
}
DEVICE void bulk_copy(void* shared, const u8* global, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
// Plain writes to shared memory before it, the copy engine's after it.
DEVICE void plain_writes_before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- threads

#define SHARED_MEMORY(name) extern __shared__ __align__(128) u8 name[]
DEVICE int thread_index() { return threadIdx.x; }
DEVICE int block_x() { return blockIdx.x; }
DEVICE int block_y() { return blockIdx.y; }
DEVICE void block_together() { __syncthreads(); }

// --- warps

DEVICE void warp_together() { __syncwarp(); }
DEVICE bool warp_any(bool x) { return __any_sync(~0u, x); }
DEVICE float warp_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
DEVICE float warp_get(float x, int lane) { return __shfl_sync(~0u, x, lane); }
DEVICE u32 transpose_8x8(u32 x) {  // of 16-bit elements; lane 4 g + t holds (g, 2t) and (g, 2t + 1)
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// --- matrices. Four (or two) of 8 x 8 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.

DEVICE void load_matrices(u32 (&r)[4], const u8* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p))
                 : "memory");
}
DEVICE void load_matrices_transposed(u32 (&r)[4], const u8* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p))
                 : "memory");
}
// c[16, 8] += a[16, 16] b[16, 8]
DEVICE void multiply_half(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void multiply_bfloat(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// --- numbers. A pair lies in one register, the first in its low half.

DEVICE u32 pack_half(float first, float second) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
    return y;
}
DEVICE u32 pack_bfloat(float first, float second) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
    return y;
}
DEVICE float from_half(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
struct Pairs {
    u32 low, high;
};
DEVICE Pairs widen_e4m3(u32 four) {
    Pairs y;
    asm("{\n.reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n}\n"
        : "=r"(y.low), "=r"(y.high)
        : "r"(four));
    return y;
}
DEVICE u32 permute_bytes(u32 x, u32 order) { return __byte_perm(x, 0, order); }
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float bits_to_float(u32 x) { return __uint_as_float(x); }
DEVICE u32 float_to_bits(float x) { return __float_as_uint(x); }

// --- launches: this kernel may start while the one before it ends, and lets the next one do so

DEVICE void wait_for_previous_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_launch_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
