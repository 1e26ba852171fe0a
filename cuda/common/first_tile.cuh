// The tile that a block begins with, counted from the routing while the sort still runs.
#pragma once

#include "common/layout.cuh"
#include "common/routing.cuh"
#include "common/scan.cuh"
#include "common/tiles.cuh"

// The token tiles of all experts, each expert's in turn, as a warp counts them: every lane those of a few experts.
// Their numbers and rows are those of the sort.
struct TileCount {
    const int* counts;  // tokens by expert
    int tile_rows;
    Range mine;  // experts of this lane
    int begin;   // number of their first tile in the high half, padded rows before theirs in the low half
    int end;
    int total;  // tiles
    int rows;   // of all of them, padded

    __device__ __forceinline__ TileCount(const int* counts, int num_experts, int tile_rows)
        : counts(counts), tile_rows(tile_rows), mine(dealt_to(threadIdx.x % 32, 32, num_experts)) {
        int sum = 0;
#pragma unroll 4
        for (int expert = mine.first; expert < mine.last; ++expert) sum += share_of(counts[expert]);
        end = warp_inclusive_scan(sum);
        begin = end - sum;
        const int all = __shfl_sync(~0u, end, 31);
        total = all >> 16;
        rows = all & 0xffff;
    }
    __device__ __forceinline__ int share_of(int count) const {
        return ceil_div(count, tile_rows) << 16 | round_up(count, kRowAlign);
    }
    // Whether tiles have more than `most` rows on average.
    __device__ __forceinline__ bool is_crowded(int most) const { return rows > most * total; }
    // Tile number `index`, less its adapter groups; expert -1 for none.
    __device__ __forceinline__ TokenTile find(int index) const {
        int expert = -1;
        int first_row = 0;
        int num_rows = 0;
        if (index >= begin >> 16 && index < end >> 16) {
            int before = begin;
            expert = mine.first;
#pragma unroll 1
            while (true) {
                const int behind = before + share_of(counts[expert]);
                if (behind >> 16 > index) break;
                before = behind;
                ++expert;
            }
            const int row = (index - (before >> 16)) * tile_rows;
            first_row = (before & 0xffff) + row;
            num_rows = min(counts[expert] - row, tile_rows);
        }
        return TokenTile{__reduce_max_sync(~0u, expert), __reduce_max_sync(~0u, first_row),
                         __reduce_max_sync(~0u, num_rows), 0};
    }
};

__device__ __forceinline__ void load_ids(int (&ids)[1], const int* source) { ids[0] = __ldg(source); }
__device__ __forceinline__ void load_ids(int (&ids)[4], const int* source) {
    const int4 four = __ldg(reinterpret_cast<const int4*>(source));
    ids[0] = four.x;
    ids[1] = four.y;
    ids[2] = four.z;
    ids[3] = four.w;
}

// Counts the tokens of every expert in shared memory. All threads of the block take part, `kCounting` of them count,
// each `kEach` ids by one load; the first barrier waits for none of the loads. Ids lie in memory of whole 16 bytes,
// with whatever behind them.
template <int kCounting, int kEach>
__device__ __forceinline__ void count_tokens(const Routing& routing, int num_tokens, int max_tokens, int* counts) {
    constexpr int kBatch = 8;  // loads in flight a thread
    constexpr int kStep = kEach * kCounting;
    const int max_rows = max_tokens * routing.top_k;
    const int num_shared = routing.choices - routing.top_k;
    const bool counting = threadIdx.x < kCounting;
#pragma unroll 1
    for (int start = 0; start < max_rows; start += kBatch * kStep) {
        int ids[kBatch][kEach];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (start + i * kStep >= max_rows) break;
            const int row = start + i * kStep + kEach * threadIdx.x;
#pragma unroll
            for (int j = 0; j < kEach; ++j) ids[i][j] = -1;
            if (counting && row < max_rows) load_ids(ids[i], routing.topk_ids + row);
        }
        if (start == 0) {
#pragma unroll 1
            for (int i = threadIdx.x; i < routing.num_local + num_shared; i += blockDim.x) counts[i] = 0;
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (start + i * kStep >= max_rows) break;
            const int row = start + i * kStep + kEach * threadIdx.x;
#pragma unroll
            for (int j = 0; j < kEach; ++j) {
                const int expert = ids[i][j] - routing.local_offset;
                if (row + j < num_tokens * routing.top_k && expert >= 0 && expert < routing.num_local)
                    atomicAdd(&counts[expert], 1);
            }
        }
    }
    for (int i = threadIdx.x; i < num_shared; i += blockDim.x) counts[routing.num_local + i] = num_tokens;
    __syncthreads();
}
