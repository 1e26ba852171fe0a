// The tiles of a few tokens, worked out in shared memory by every block for itself.
//
// Experts, places and tiles are those of the sort, so that what one block writes others find.
#pragma once

#include "common/barrier.cuh"
#include "common/layout.cuh"
#include "common/routing.cuh"
#include "common/scan.cuh"
#include "common/tiles.cuh"

constexpr int kDirectRows = 256;  // slot rows at the most
constexpr uint16_t kNoRow = 0xffff;

struct DirectTile {
    int16_t expert;
    int16_t first_row;
    int16_t num_rows;
    int16_t reserved;
};

struct DirectTiles {
    DirectTile* tiles;    // [kDirectRows]
    uint16_t* keys;       // [kDirectRows]
    uint16_t* places;     // [kDirectRows] permuted row of each slot row that has one
    uint16_t* order;      // [kDirectRows] the slot rows that have one, by expert and adapter; kNoRow behind them
    uint8_t* row_tokens;  // [kDirectRows * kRowAlign] the token of each permuted row
    int* num_tiles;       // [32] the first of these
    int* counts;          // [num_experts] slot rows
    int* starts;          // [num_experts] first permuted row

    __device__ __forceinline__ DirectTiles(uint8_t* memory, int num_experts)
        : tiles(reinterpret_cast<DirectTile*>(memory)),
          keys(reinterpret_cast<uint16_t*>(tiles + kDirectRows)),
          places(keys + kDirectRows),
          order(places + kDirectRows),
          row_tokens(reinterpret_cast<uint8_t*>(order + kDirectRows)),
          num_tiles(reinterpret_cast<int*>(row_tokens + kDirectRows * kRowAlign)),
          counts(num_tiles + 32),
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

    // `make` of up to 32 slot rows, one a lane.
    template <typename Meanwhile>
    __device__ __forceinline__ int make_few(const Routing& routing, const int* num_tokens, int max_rows, int tile_rows,
                                            Meanwhile meanwhile) const {
        const int lane = threadIdx.x % 32;
        const int num_rows = *num_tokens * routing.choices;
        const Choice choice = routing.choice_of(min(lane, max_rows - 1));
        const Routed routed = routing.load(choice);
        order[lane] = kNoRow;
        if (lane == 0) meanwhile();
        __syncwarp();
        const uint16_t key = lane < min(num_rows, max_rows) ? routing.key_of(choice, routed) : kNoKey;
        keys[lane] = key;
        const int expert = key != kNoKey ? routing.expert_of(key) : -1;
        const uint32_t alike = __match_any_sync(~0u, expert);
        const int count = __popc(alike);
        const bool leads = expert >= 0 && lane == __ffs(alike) - 1;
        const int share = leads ? ceil_div(count, tile_rows) << 16 | round_up(count, kRowAlign) : 0;
        constexpr int kAtOnce = 8;
        int before = 0;  // tiles in the high half, padded rows in the low half, of earlier experts
#pragma unroll 1
        for (int first = 0; first < max_rows; first += kAtOnce)
#pragma unroll
            for (int i = first; i < first + kAtOnce; ++i) {
                const int other = __shfl_sync(~0u, share, i);
                before += __shfl_sync(~0u, expert, i) < expert ? other : 0;
            }
        const int total = __reduce_add_sync(~0u, share) >> 16;
        if (leads) write_tiles(expert, count, tile_rows, before >> 16, before & 0xffff);
        if (lane == 0) *num_tiles = total;
        __syncwarp();
        return total;
    }

    // One expert's tiles, from number `index` and row `start` on; the number of the next.
    __device__ __forceinline__ int write_tiles(int expert, int count, int tile_rows, int index, int start) const {
        starts[expert] = start;
        for (int tile = 0; tile < count; tile += tile_rows)
            tiles[index++] =
                DirectTile{int16_t(expert), int16_t(start + tile), int16_t(min(tile_rows, count - tile)), 0};
        return index;
    }

    // Makes the tiles of up to `tile_rows` tokens; one warp does it, so that no barrier lies before the first weights.
    // One lane does `meanwhile` while the routing is under way.
    template <typename Meanwhile>
    __device__ __forceinline__ int make(const Routing& routing, const int* num_tokens, int max_tokens, int num_experts,
                                        int tile_rows, Meanwhile meanwhile) const {
        constexpr int kBatch = kDirectRows / 32;
        const int lane = threadIdx.x % 32;
        const int max_rows = max_tokens * routing.choices;
        if (max_rows <= 32) return make_few(routing, num_tokens, max_rows, tile_rows, meanwhile);
        const int num_rows = *num_tokens * routing.choices;
        Choice choices[kBatch];
        Routed routed[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (32 * i >= max_rows) break;
            choices[i] = routing.choice_of(min(lane + 32 * i, max_rows - 1));
            routed[i] = routing.load(choices[i]);
        }
        if (lane == 0) meanwhile();
        for (int expert = lane; expert < num_experts; expert += 32) counts[expert] = 0;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (32 * i >= max_rows) break;
            const int row = lane + 32 * i;
            const uint16_t key = row < min(num_rows, max_rows) ? routing.key_of(choices[i], routed[i]) : kNoKey;
            keys[row] = key;
            order[row] = kNoRow;
            if (key != kNoKey) atomicAdd(&counts[routing.expert_of(key)], 1);
        }
        __syncwarp();

        const auto [first, last] = dealt_to(lane, 32, num_experts);
        int mine = 0;  // tiles in the high half, padded rows in the low half
        for (int expert = first; expert < last; ++expert)
            mine += ceil_div(counts[expert], tile_rows) << 16 | round_up(counts[expert], kRowAlign);
        const int end = warp_inclusive_scan(mine);
        const int total = __shfl_sync(~0u, end, 31) >> 16;
        const int before = end - mine;
        int index = before >> 16;
        int start = before & 0xffff;
        for (int expert = first; expert < last; ++expert) {
            index = write_tiles(expert, counts[expert], tile_rows, index, start);
            start += round_up(counts[expert], kRowAlign);
        }
        if (lane == 0) *num_tiles = total;
        __syncwarp();
        return total;
    }

    __device__ __forceinline__ bool precedes(int other, int row, int key, int first_key) const {
        const int held = keys[other];
        return held >= first_key && (held < key || (held == key && other < row));
    }

    // Notes every slot row at its place: behind the rows of its expert with earlier adapters, and behind earlier rows
    // of its own. `kThreads` threads take part.
    template <int kThreads>
    __device__ __forceinline__ void place_rows(const Routing& routing, int max_tokens) const {
        const int max_rows = max_tokens * routing.choices;
        for (int row = threadIdx.x; row < max_rows; row += kThreads) {
            const uint16_t key = keys[row];
            if (key == kNoKey) continue;
            const int expert = routing.expert_of(key);
            const int first_key = expert * routing.buckets;
            int rank = 0;  // within the expert
            int rows_before = 0;
            for (int other = 0; other < max_rows; ++other) {
                rank += precedes(other, row, key, first_key);
                rows_before += precedes(other, row, key, 0);
            }
            order[rows_before] = uint16_t(row);
            places[row] = uint16_t(starts[expert] + rank);
            row_tokens[starts[expert] + rank] = uint8_t(row / routing.choices);
        }
    }
};

// Starts bringing all hidden states to where `memory` has them; nobody looks at what is there of further tokens.
// `kThreads` threads take part.
template <int kThreads, typename Memory>
__device__ __forceinline__ void load_hidden(const Memory& memory, const bf16* hidden, int k_blocks, int num_tokens) {
    const int num_chunks = k_blocks * (kBlockK / kChunk);
    for (int token = 0; token < num_tokens; ++token) {
        const bf16* source = hidden + int64_t(token) * k_blocks * kBlockK;
        for (int chunk = threadIdx.x; chunk < num_chunks; chunk += kThreads)
            async_copy16(memory.hidden_chunk(token, chunk, k_blocks), source + chunk * kChunk, true);
    }
}
