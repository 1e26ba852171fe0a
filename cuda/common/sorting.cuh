// What the sorts make of the counts of their keys: places of experts, token tiles, adapter groups.
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

// Turns the counts into places: padded starts of the experts, and the buckets' offsets within each.
__device__ __forceinline__ void place_experts(const Rows& rows) {
    const auto [first, last] = dealt_to(threadIdx.x, blockDim.x, rows.num_experts);
    int padded = 0;
    for (int expert = first; expert < last; ++expert) {
        place_buckets(rows, expert);
        padded += round_up(rows.counts[expert], kRowAlign);
    }
    int total;
    int start = block_exclusive_scan(padded, rows.warp_sums, total);
    for (int expert = first; expert < last; ++expert) {
        rows.starts[expert] = start;
        start += round_up(rows.counts[expert], kRowAlign);
    }
    __syncthreads();
}

__device__ __forceinline__ int rows_in_bucket(const Rows& rows, int expert, int bucket) {
    const int* prefix = rows.prefix + expert * rows.buckets;
    return (bucket + 1 < rows.buckets ? prefix[bucket + 1] : rows.counts[expert]) - prefix[bucket];
}

// Tiles of `tile_rows` rows, the last of an expert with what is left; or `balanced`, as many of about equal size.
// Returns how many there are; `note` is told of each expert how many tiles and groups are its own.
template <typename Note>
__device__ __forceinline__ int write_tiles(const Rows& rows, int tile_rows, bool balanced, TokenTile* tiles,
                                           int* num_tiles, Note note) {
    const auto [first, last] = dealt_to(threadIdx.x, blockDim.x, rows.num_experts);
    int num_mine = 0;
    int groups_mine = 0;
    for (int expert = first; expert < last; ++expert) {
        num_mine += ceil_div(rows.counts[expert], tile_rows);
        groups_mine += rows.groups[expert];
    }
    int total;
    int group = block_exclusive_scan(groups_mine, rows.warp_sums, total);
    int index = block_exclusive_scan(num_mine, rows.warp_sums, total);
    for (int expert = first; expert < last; ++expert) {
        const int num_groups = rows.groups[expert];
        int step = tile_rows;
        if (balanced) step = rows_each(rows.counts[expert], max(ceil_div(rows.counts[expert], tile_rows), 1));
        for (int row = 0; row < rows.counts[expert]; row += step)
            tiles[index++] = TokenTile{expert, rows.starts[expert] + row, min(step, rows.counts[expert] - row),
                                       group | num_groups << 16};
        group += num_groups;
        note(expert, ceil_div(rows.counts[expert], tile_rows), num_groups);
    }
    if (threadIdx.x == 0) *num_tiles = total;
    return total;
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

__device__ __forceinline__ void write_groups(const Rows& rows, LoraGroup* groups, int* num_groups) {
    const auto [first, last] = dealt_to(threadIdx.x, blockDim.x, rows.num_experts);
    int mine = 0;
    for (int expert = first; expert < last; ++expert) mine += rows.groups[expert];
    int total;
    int index = block_exclusive_scan(mine, rows.warp_sums, total);
    for (int expert = first; expert < last; ++expert) {
        if (rows.groups[expert] != 0) index = write_groups_of(rows, expert, groups, index);
    }
    if (threadIdx.x == 0) *num_groups = total;
}
