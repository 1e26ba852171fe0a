// The tiles of a few tokens, worked out in shared memory by every block for itself.
//
// Experts, places and tiles are those of the sort, so that what one block writes others find.
#pragma once

#include "common/barrier.cuh"
#include "common/layout.cuh"
#include "common/routing.cuh"
#include "common/scan.cuh"
#include "common/tiles.cuh"

constexpr int kDirectRows = 256;  // slot rows at the most, one a thread

struct DirectTile {
    int16_t expert;
    int16_t first_row;
    int16_t num_rows;
    int16_t reserved;
};

struct DirectTiles {
    DirectTile* tiles;    // [kDirectRows]
    uint16_t* keys;       // [kDirectRows]
    uint8_t* row_tokens;  // [kDirectRows * kRowAlign] the token of each permuted row
    int* warp_sums;       // [32]
    int* counts;          // [num_experts] slot rows
    int* starts;          // [num_experts] first permuted row

    __device__ __forceinline__ DirectTiles(uint8_t* memory, int num_experts)
        : tiles(reinterpret_cast<DirectTile*>(memory)),
          keys(reinterpret_cast<uint16_t*>(tiles + kDirectRows)),
          row_tokens(reinterpret_cast<uint8_t*>(keys + kDirectRows)),
          warp_sums(reinterpret_cast<int*>(row_tokens + kDirectRows * kRowAlign)),
          counts(warp_sums + 32),
          starts(counts + num_experts) {}

    __device__ __forceinline__ TokenTile operator[](int index) const {
        const DirectTile tile = tiles[index];
        return TokenTile{tile.expert, tile.first_row, tile.num_rows, 0};
    }
    __device__ __forceinline__ int token_of(const TokenTile& tile, int row) const {
        return row_tokens[tile.first_row + row];
    }
    // The first row of `token` within the tile, -1 for none.
    __device__ __forceinline__ int row_of_token(const TokenTile& tile, int token) const {
        int found = -1;
        for (int row = tile.num_rows - 1; row >= 0; --row)
            if (token_of(tile, row) == token) found = row;
        return found;
    }

    // Makes the tiles of up to `tile_rows` tokens and returns how many they are; all threads of the block take part.
    __device__ __forceinline__ int make(const Routing& routing, const int* num_tokens, int max_tokens, int num_experts,
                                        int tile_rows) {
        const int row = threadIdx.x;
        uint16_t key = row < max_tokens * routing.choices ? routing.key_of(row) : kNoKey;
        for (int i = threadIdx.x; i < num_experts; i += blockDim.x) counts[i] = 0;
        if (row >= *num_tokens * routing.choices) key = kNoKey;
        if (row < kDirectRows) keys[row] = key;
        __syncthreads();
        if (key != kNoKey) atomicAdd(&counts[key / routing.buckets], 1);
        __syncthreads();

        const int per_thread = ceil_div(num_experts, blockDim.x);
        const int first = threadIdx.x * per_thread;
        const int last = min(first + per_thread, num_experts);
        int mine = 0;  // tiles in the high half, padded rows in the low half
        for (int expert = first; expert < last; ++expert)
            mine += ceil_div(counts[expert], tile_rows) << 16 | round_up(counts[expert], kRowAlign);
        int total;
        const int before = block_exclusive_scan(mine, warp_sums, total);
        int index = before >> 16;
        int start = before & 0xffff;
        for (int expert = first; expert < last; ++expert) {
            const int count = counts[expert];
            starts[expert] = start;
            for (int tile = 0; tile < count; tile += tile_rows)
                tiles[index++] =
                    DirectTile{int16_t(expert), int16_t(start + tile), int16_t(min(tile_rows, count - tile)), 0};
            start += round_up(count, kRowAlign);
        }
        __syncthreads();
        return total >> 16;
    }

    __device__ __forceinline__ bool precedes(int other, int row, int key, int first_key) const {
        const int held = keys[other];
        return held >= first_key && (held < key || (held == key && other < row));
    }

    // The place of slot row `row`, for all threads of the block, which take part.
    __device__ __forceinline__ int place_of(const Routing& routing, int row, int key) const {
        const int expert = key / routing.buckets;
        const int other = threadIdx.x;
        return starts[expert] + __syncthreads_count(precedes(other, row, key, expert * routing.buckets));
    }

    // Notes this thread's slot row at its place: behind the rows of its expert with earlier adapters, and behind
    // earlier rows of its own.
    __device__ __forceinline__ void place_row(const Routing& routing, int max_tokens) const {
        const int row = threadIdx.x;
        const uint16_t key = keys[row];
        if (key == kNoKey) return;
        const int expert = key / routing.buckets;
        const int first_key = expert * routing.buckets;
        int rank = 0;
        for (int other = 0; other < max_tokens * routing.choices; ++other) rank += precedes(other, row, key, first_key);
        row_tokens[starts[expert] + rank] = uint8_t(row / routing.choices);
    }
};

// Starts bringing all hidden states to shared memory, [k_blocks, kTokens, 64] swizzled; tokens beyond `max_tokens` are
// zero. `kThreads` threads take part.
template <int kTokens, int kThreads>
__device__ __forceinline__ void load_hidden(uint8_t* target, const bf16* hidden, int k_blocks, int max_tokens) {
    const int num_chunks = k_blocks * (kBlockK / kChunk);
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
        const bool real = token < max_tokens;
        const bf16* source = hidden + (real ? int64_t(token) * k_blocks * kBlockK : 0);
        for (int chunk = threadIdx.x; chunk < num_chunks; chunk += kThreads)
            async_copy16(target + block_major_offset(token, chunk * kChunk, kTokens) * 2, source + chunk * kChunk,
                         real);
    }
}
