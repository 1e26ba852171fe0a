// Sums over a warp, prefix sums over a warp and a block, and how things are dealt to lanes and threads for them.
#pragma once

#include "common/types.cuh"

// Sum of `value` over the lanes of the warp, in an order of its own, for all of them.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

struct Range {
    int first;
    int last;
};
// Which of `count` things in a row `taker` gets, where `takers` get equally many: the last of them fewer, or none.
__device__ __forceinline__ Range dealt_to(int taker, int takers, int count) {
    const int each = ceil_div(count, takers);
    const int first = taker * each;
    return Range{first, min(first + each, count)};
}

// Sum of `value` over the lanes of the warp up to this one.
__device__ __forceinline__ int warp_inclusive_scan(int value) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(~0u, value, step);
        if (threadIdx.x % 32 >= step) value += before;
    }
    return value;
}

// The lane that number `index` belongs to, where the lanes have numbers in turn, each those before its `end`; lanes
// from `lanes` on have none.
__device__ __forceinline__ int lane_that_has(int index, int end, int lanes) {
    int owner = 0;
    for (int lane = 0; lane < min(lanes, 32) - 1; ++lane) owner += __shfl_sync(~0u, end, lane) <= index;
    return owner;
}

// Sum of `value` over the threads before this one; `total` gets the sum over all. `warp_sums` holds 32 ints of
// shared memory; every thread of the block takes part.
__device__ __forceinline__ int block_exclusive_scan(int value, int* warp_sums, int& total) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int inclusive = warp_inclusive_scan(value);
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    int offset = 0;
    total = 0;
    for (int w = 0; w < blockDim.x / 32; ++w) {
        if (w < warp) offset += warp_sums[w];
        total += warp_sums[w];
    }
    __syncthreads();
    return offset + inclusive - value;
}
