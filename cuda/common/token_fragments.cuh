// A K-block of weights and tokens in registers, as the token MLP's warps multiply it.
#pragma once

#include "common/layout.cuh"
#include "common/mma.cuh"

// Keeps the compiler from working `value` out anew wherever it is needed.
__device__ __forceinline__ int kept(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

// One K-block of a slice and of eight columns, as `mma_m16n8k16` takes them.
struct Fragments {
    uint32_t a[kBlockK / 16][4];
    uint32_t b[kBlockK / 16][2];

    // Where a lane finds its part of the first instruction's weights, from a slice's begin on; those of the others are
    // two chunks further each, which the swizzle has as bits to flip.
    static __device__ __forceinline__ uint32_t lane_offset(int lane) {
        const int row = lane % 16;
        return row * kBlockBytes + (lane / 16 ^ row % 8) * 16;
    }

    Fragments() = default;
    __device__ __forceinline__ Fragments(uint32_t weights, const uint8_t* column) {
#pragma unroll
        for (int k = 0; k < kBlockK / 16; ++k) {
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(a[k][0]), "=r"(a[k][1]), "=r"(a[k][2]), "=r"(a[k][3])
                         : "r"(weights ^ 32 * k));
            b[k][0] = *reinterpret_cast<const uint32_t*>(column + 32 * k);
            b[k][1] = *reinterpret_cast<const uint32_t*>(column + 32 * k + 16);
        }
    }
    __device__ __forceinline__ void multiply(float (&acc)[4]) const {
#pragma unroll
        for (int k = 0; k < kBlockK / 16; ++k) mma_m16n8k16(acc, a[k][0], a[k][1], a[k][2], a[k][3], b[k][0], b[k][1]);
    }
};
