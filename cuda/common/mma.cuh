// Warp matrix multiply on registers, bf16 operands and fp32 accumulators.
#pragma once

#include "common/types.cuh"

// d[16 x 8] += a[16 x 16] * b[16 x 8]. Lane l holds a rows l/4 and l/4 + 8 at k = 2(l%4) (a0, a1) and that + 8
// (a2, a3); b column l/4 at the same k (b0, b1); d rows l/4 (d0, d1) and l/4 + 8 (d2, d3), columns 2(l%4), + 1.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// d[16 x 8] += a[16 x 32] * b[32 x 8] of 16 consecutive bytes a lane, elements 8(l%4) and on: `low` of row l/4, `high`
// of row l/4 + 8, `b` of column l/4. Which of K meet in an instruction does not matter, as long as both operands agree.
__device__ __forceinline__ void mma_m16n8k32(float (&d)[4], const uint4& low, const uint4& high, const uint4& b) {
    mma_m16n8k16(d, low.x, high.x, low.y, high.y, b.x, b.y);
    mma_m16n8k16(d, low.z, high.z, low.w, high.w, b.z, b.w);
}

// d[16 x 8] += a[16 x 8] * b[8 x 8], fragments as above with k = 2(l%4) only.
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b0));
}
