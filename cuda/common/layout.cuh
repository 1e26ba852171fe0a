// The BlockMajorK layout and its row orders; the twin of layer/layout.py, tied to it by a test.
#pragma once

#include "common/types.cuh"

constexpr int kBlockK = 64;   // elements of one K-block: 128 bytes
constexpr int kChunk = 8;     // elements of a 16-byte chunk, the unit of the swizzle
constexpr int kRowAlign = 8;  // permuted rows of an expert are padded to this
constexpr int kBlockBytes = kBlockK * 2;

// Rows of each of `parts` about equal parts of an expert's `num_rows`, but the last.
__device__ __forceinline__ int rows_each(int num_rows, int parts) {
    return round_up(ceil_div(num_rows, parts), kRowAlign);
}

// Element offset of (row, k) in a swizzled BlockMajorK matrix of `rows` rows: [K/64, rows, 64],
// 16-byte chunk c of a row stored at chunk c ^ (row % 8).
__device__ __forceinline__ int64_t block_major_offset(int row, int k, int rows) {
    const int chunk = (k % kBlockK) / kChunk;
    return (int64_t(k / kBlockK) * rows + row) * kBlockK + ((chunk ^ (row & 7)) * kChunk) + k % kChunk;
}

// Row orders of FlashInfer's shuffled weights (epilogue tile 128, blocks of 32 rows). In an m64nN or
// m16n8 accumulator a thread owns rows l/4 and l/4 + 8 of its warp's 16. `warp_row` is the first of
// those 16 within the matrix, `lane_row` is l/4.
// gate_up: the two rows are up and gate of this feature.
__device__ __forceinline__ int gate_up_feature(int warp_row, int lane_row) {
    return (warp_row / 32) * 16 + 2 * lane_row + (warp_row / 16) % 2;
}
// down: the two rows are this output feature and the next.
__device__ __forceinline__ int down_feature(int warp_row, int lane_row) {
    return (warp_row / 32) * 32 + 4 * lane_row + 2 * ((warp_row / 16) % 2);
}
