// What all sorts make of the counts of their keys: offsets of buckets, and adapter groups.
#pragma once

#include "common/layout.cuh"
#include "common/routing.cuh"
#include "common/scan.cuh"
#include "common/tiles.cuh"

constexpr int kTickets = 2;  // of the two GEMMs that follow; who sorts resets them

struct Rows {
    int num_rows;     // num_tokens * choices
    int max_rows;     // of the captured shape
    int num_experts;  // local experts, then shared ones
    int buckets;      // adapter slots + 1: bucket 0 is "no adapter"
    uint16_t* keys;   // [num_rows] expert * buckets + bucket, where a block looks through all of them
    int* prefix;      // [num_experts, buckets] rows of the expert in earlier buckets
    int* counts;      // [num_experts]
    int* starts;      // [num_experts] first permuted row
    int* groups;      // [num_experts] adapter groups
    int group_rows;   // that one of those has at the most
    int* warp_sums;   // [32]
};

// Where the counts lie in a block's shared memory, the keys or what else there is behind them.
__device__ __forceinline__ void carve(Rows& rows, uint8_t* shared, int num_experts, int buckets) {
    rows.num_experts = num_experts;
    rows.buckets = buckets;
    rows.warp_sums = reinterpret_cast<int*>(shared);
    rows.counts = rows.warp_sums + 32;
    rows.starts = rows.counts + rows.num_experts;
    rows.groups = rows.starts + rows.num_experts;
    rows.prefix = rows.groups + rows.num_experts;
}

// Turns an expert's counts into offsets of its buckets, and notes its rows and adapter groups.
__device__ __forceinline__ void place_buckets(const Rows& rows, int expert) {
    constexpr int kAhead = 4;  // counts read together
    int* const prefix = rows.prefix + expert * rows.buckets;
    int count = prefix[0];
    int groups = 0;
    prefix[0] = 0;
#pragma unroll 1
    for (int first = 1; first < rows.buckets; first += kAhead) {
        int held[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) held[i] = first + i < rows.buckets ? prefix[first + i] : 0;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (first + i < rows.buckets) prefix[first + i] = count;
            count += held[i];
            groups += ceil_div(held[i], rows.group_rows);
        }
    }
    rows.counts[expert] = count;
    rows.groups[expert] = groups;
}

__device__ __forceinline__ int rows_in_bucket(const Rows& rows, int expert, int bucket) {
    const int* prefix = rows.prefix + expert * rows.buckets;
    return (bucket + 1 < rows.buckets ? prefix[bucket + 1] : rows.counts[expert]) - prefix[bucket];
}

// An expert's adapter groups, from number `index` on; the number of the next.
__device__ __forceinline__ int write_groups_of(const Rows& rows, int expert, LoraGroup* groups, int index) {
#pragma unroll 1
    for (int slot = 0; slot < rows.buckets - 1; ++slot) {
        const int count = rows_in_bucket(rows, expert, slot + 1);
        const int start = rows.starts[expert] + rows.prefix[expert * rows.buckets + slot + 1];
#pragma unroll 1
        for (int row = 0; row < count; row += rows.group_rows)
            groups[index++] = LoraGroup{expert, slot, start + row, min(rows.group_rows, count - row)};
    }
    return index;
}
