// The lists that sorts make of their counts with few barriers: token tiles and adapter groups, expert by expert.
#pragma once

#include "common/expected.cuh"
#include "common/row_batch.cuh"

// How an expert's rows are cut into token tiles.
struct Tiling {
    Divisor rows;   // of a tile
    bool balanced;  // whether an expert's tiles have about equally many instead, and no more
    int* first;     // [num_experts] the number of an expert's first tile

    __device__ __forceinline__ int tiles_of(int count) const { return rows.divide(count + rows.divisor - 1); }
};

// Where an expert's tiles and groups begin in their lists, and its rows in memory. The sums over all threads' experts
// take one barrier, and another makes them known. Returns the tiles in the low half and the groups in the high one.
template <int kThreads>
__device__ __forceinline__ int begin_experts(const Rows& rows, const Tiling& tiling) {
    constexpr int kWarps = kThreads / 32;
    static_assert(kWarps <= 16, "two sums a warp");
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const auto [first, last] = dealt_to(threadIdx.x, kThreads, rows.num_experts);
    int padded = 0;
    int listed = 0;
#pragma unroll 1
    for (int expert = first; expert < last; ++expert) {
        place_buckets(rows, expert);
        padded += round_up(rows.counts[expert], kRowAlign);
        listed += tiling.tiles_of(rows.counts[expert]) | rows.groups[expert] << 16;
    }
    int* const padded_sums = rows.warp_sums;
    int* const listed_sums = rows.warp_sums + kWarps;
    const int padded_end = warp_inclusive_scan(padded);
    const int listed_end = warp_inclusive_scan(listed);
    if (lane == 31) {
        padded_sums[warp] = padded_end;
        listed_sums[warp] = listed_end;
    }
    __syncthreads();
    const int other_padded = lane < warp ? padded_sums[lane] : 0;
    const int other_listed = lane < kWarps ? listed_sums[lane] : 0;
    int start = padded_end - padded + __reduce_add_sync(~0u, other_padded);
    int listing = listed_end - listed + __reduce_add_sync(~0u, lane < warp ? other_listed : 0);
#pragma unroll 1
    for (int expert = first; expert < last; ++expert) {
        const int groups = rows.groups[expert];
        rows.starts[expert] = start;
        tiling.first[expert] = listing & 0xffff;
        rows.groups[expert] = listing >> 16 | groups << 16;
        start += round_up(rows.counts[expert], kRowAlign);
        listing += tiling.tiles_of(rows.counts[expert]) | groups << 16;
    }
    __syncthreads();
    return __reduce_add_sync(~0u, other_listed);
}

// By threads from number `thread` of kThreads on, an expert each.
template <int kThreads>
__device__ __forceinline__ void list_tiles(const Rows& rows, const Tiling& tiling, int thread, TokenTile* tiles,
                                           const Pending& to_come) {
#pragma unroll 1
    for (int expert = thread; expert < rows.num_experts; expert += kThreads) {
        const int count = rows.counts[expert];
        const int num_tiles = tiling.tiles_of(count);
        const int step = tiling.balanced && num_tiles > 1 ? rows_each(count, num_tiles) : tiling.rows.divisor;
        int index = tiling.first[expert];
#pragma unroll 1
        for (int row = 0; row < count; row += step)
            tiles[index++] = TokenTile{expert, rows.starts[expert] + row, min(step, count - row), rows.groups[expert]};
        to_come.write(rows, expert, num_tiles, rows.groups[expert] >> 16);
    }
}
template <int kThreads>
__device__ __forceinline__ void list_groups(const Rows& rows, int thread, LoraGroup* groups) {
#pragma unroll 1
    for (int expert = thread; expert < rows.num_experts; expert += kThreads) {
        const int index = rows.groups[expert] & 0xffff;
        if (rows.groups[expert] >> 16 != 0) write_groups_of(rows, expert, groups, index);
    }
}
