// The tile that a block begins with, counted from the routing while the sort still runs.
#pragma once

#include "common/layout.cuh"
#include "common/routing.cuh"
#include "common/scan.cuh"
#include "common/tiles.cuh"

// The token tiles of all experts, each expert's in turn, as a warp counts them: every lane those of a few experts.
// Their numbers are those of `write_tiles` in common/sorting.cuh.
struct TileCount {
    const int* counts;  // tokens by expert
    int tile_rows;
    Range mine;  // experts of this lane
    int begin;   // number of their first tile
    int end;
    int total;

    __device__ __forceinline__ TileCount(const int* counts, int num_experts, int tile_rows)
        : counts(counts), tile_rows(tile_rows), mine(dealt_to(threadIdx.x % 32, 32, num_experts)) {
        int tiles = 0;
        for (int expert = mine.first; expert < mine.last; ++expert) tiles += tiles_of(expert);
        end = warp_inclusive_scan(tiles);
        begin = end - tiles;
        total = __shfl_sync(~0u, end, 31);
    }
    __device__ __forceinline__ int tiles_of(int expert) const { return ceil_div(counts[expert], tile_rows); }
    // Tile number `index`: its expert, -1 for none, and how many tokens it has; where they are is not known yet.
    __device__ __forceinline__ TokenTile find(int index) const {
        int expert = -1;
        int num_rows = 0;
        if (index >= begin && index < end) {
            int before = begin;
            for (expert = mine.first; before + tiles_of(expert) <= index; ++expert) before += tiles_of(expert);
            num_rows = min(counts[expert] - (index - before) * tile_rows, tile_rows);
        }
        return TokenTile{__reduce_max_sync(~0u, expert), 0, __reduce_max_sync(~0u, num_rows), 0};
    }
};

// Counts the tokens of every expert in shared memory. All threads of the block take part, `kCounting` of them count;
// the first barrier waits for none of the loads.
template <int kCounting>
__device__ __forceinline__ void count_tokens(const Routing& routing, int num_tokens, int max_tokens, int* counts) {
    constexpr int kBatch = 8;  // ids in flight a thread
    const int max_rows = max_tokens * routing.top_k;
    const int num_shared = routing.choices - routing.top_k;
    const bool counting = threadIdx.x < kCounting;
#pragma unroll 1
    for (int start = 0; start < max_rows; start += kBatch * kCounting) {
        int ids[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int row = start + i * kCounting + threadIdx.x;
            ids[i] = counting && row < max_rows ? __ldg(routing.topk_ids + row) : -1;
        }
        if (start == 0) {
#pragma unroll 1
            for (int i = threadIdx.x; i < routing.num_local + num_shared; i += blockDim.x) counts[i] = 0;
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int row = start + i * kCounting + threadIdx.x;
            const int expert = ids[i] - routing.local_offset;
            if (row < num_tokens * routing.top_k && expert >= 0 && expert < routing.num_local)
                atomicAdd(&counts[expert], 1);
        }
    }
    for (int i = threadIdx.x; i < num_shared; i += blockDim.x) counts[routing.num_local + i] = num_tokens;
    __syncthreads();
}
