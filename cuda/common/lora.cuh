// How the LoRA intermediates and B lie in memory, and the product of one block of B with h.
#pragma once

#include "common/mma.cuh"

constexpr int kRankBlock = 8;                     // ranks of a block
constexpr int kAStepBytes = kRankBlock * 32 * 2;  // eight ranks by 32 elements of K of A: 16 bytes a lane
constexpr int kFragmentBytes = 256;               // 16 output rows by eight ranks of B: eight bytes a lane
constexpr int kHRowBytes = kRankBlock * 2;        // eight ranks of one token

// h is [R/8, rows, PROJECTIONS, 8]: what one block of ranks needs of consecutive tokens is one run of memory.
__device__ __forceinline__ int64_t h_offset(int block, int row, int projection, int rows, int projections) {
    return ((int64_t(block) * rows + row) * projections + projection) * kRankBlock;
}

// For many tokens h is [R/8, PROJECTIONS, rows, 8]: columns that tensor cores read as they lie.
__device__ __forceinline__ int64_t column_offset(int column, int row, int rows) {
    return (int64_t(column) * rows + row) * kRankBlock;
}

// delta[16 x 8] += B block * h of eight tokens. Rows l/4 of gate_up are up, rows l/4 + 8 gate: each kind meets only
// its own h. `b` is this lane's fragment, `h`, or `h_gate` and `h_up`, two ranks of token l/4.
__device__ __forceinline__ void expand_gate_up(float (&delta)[4], uint2 b, uint32_t h_gate, uint32_t h_up) {
    mma_m16n8k8(delta, 0, b.y, h_gate);
    mma_m16n8k8(delta, b.x, 0, h_up);
}
__device__ __forceinline__ void expand_down(float (&delta)[4], uint2 b, uint32_t h) { mma_m16n8k8(delta, b.x, b.y, h); }
