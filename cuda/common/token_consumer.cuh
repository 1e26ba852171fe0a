// The multiplying warps of the token MLP: 16 weight rows by eight columns each, and the sum over a token's choices.
#pragma once

#include "common/activation.cuh"
#include "common/awaited.cuh"
#include "common/token_block.cuh"
#include "common/warp_products.cuh"
#include "common/weighted_sum.cuh"

constexpr int kChunksAhead = 3;                   // 16-byte pieces of an activation that a lane has under way
[[maybe_unused]] constexpr int kBlocksAhead = 4;  // blocks of ranks, of B and h

#if LORA
// A tile's adapters: a row of it a lane, rows of one adapter together; their B of one slice is asked for ahead.
template <bool kDown>
struct Adapters {
    int count;
    GroupSource<kDown> groups;

    Adapters() = default;
    __device__ __forceinline__ Adapters(const Gemm& gemm, const DirectTiles& direct, const int* token_slots, int index,
                                        int slice) {
        const TokenTile tile = direct[index];
        const int row = threadIdx.x % 32;
        count = tile.num_rows;
        const int slot = row < count ? __ldg(token_slots + direct.token_of(tile, row)) : -1;
        if (slot >= 0) groups.find(gemm, tile, slice, LoraGroup{tile.expert, slot, tile.first_row + row, 1});
        groups.join();
        for (int block = 0; block < groups.rank_blocks; ++block) {
            const uint8_t* b = groups.b + int64_t(block) * gemm.row_tiles * kTileFragmentBytes;
            prefetch_line(b);
            prefetch_line(b + 128);
        }
    }
};
#else
template <bool kDown>
struct Adapters {
    Adapters() = default;
    __device__ __forceinline__ Adapters(const Gemm&, const DirectTiles&, const int*, int, int) {}
};
#endif

struct TokenConsumer : WarpProducts {
    int num_tokens;  // rows of hidden states
    const int* token_slots;

#if LORA
    // The delta of a slice: a column's is that of the adapter whose group its row is in.
    template <bool kDown>
    __device__ __forceinline__ void expand(float (&delta)[4], const Gemm& gemm, const Adapters<kDown>& adapters,
                                           const TokenTile& tile, int row) {
        constexpr int kProjections = kDown ? 1 : 2;
        const bf16* of_row =
            gemm.h + h_offset(0, tile.first_row + max(row, 0), 0, gemm.rows, kProjections) + 2 * (lane % 4);
        for (int index = 0; index < adapters.count; ++index) {
            const GroupSource<kDown> group = adapters.groups.of_lane(index);
            const bool mine = row >= group.first_row && row < group.last_row;
            for (int first = 0; first < group.rank_blocks; first += kBlocksAhead) {
                const int count = min(kBlocksAhead, group.rank_blocks - first);
                uint2 b[kBlocksAhead];
                uint32_t h[kBlocksAhead * kProjections];
#pragma unroll
                for (int i = 0; i < kBlocksAhead; ++i)
                    if (i < count)
                        b[i] = __ldg(reinterpret_cast<const uint2*>(
                            group.b + int64_t(first + i) * gemm.row_tiles * kTileFragmentBytes + lane * 8));
                load_until_there(h, [&](int i) {
                    const int block = i / kProjections;
                    const int64_t offset =
                        (int64_t(first + block) * gemm.rows * kProjections + i % kProjections) * kRankBlock;
                    return mine && block < count ? load_awaited(reinterpret_cast<const uint32_t*>(of_row + offset)) : 0;
                });
                __syncwarp();
#pragma unroll
                for (int i = 0; i < kBlocksAhead; ++i) {
                    if (i >= count) break;
                    if constexpr (kDown)
                        expand_down(delta, b[i], h[i]);
                    else
                        expand_gate_up(delta, b[i], h[2 * i], h[2 * i + 1]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) delta[i] = round_to_bf16(delta[i]);
    }
#endif

    // One item of gate_up: each warp a slice, from hidden states to activations.
    __device__ __forceinline__ void activate(int item) {
        const Gemm& gemm = mlp.gate_up;
        const Place place = mlp.place_of(item);
        const TokenTile tile = memory.direct[place.tile];
        const int row_tile = place.row_tile + warp;
        const bool takes = warp < place.row_tiles;
        float acc[4] = {};
        Adapters<false> adapters;
        if (takes) adapters = Adapters<false>(gemm, memory.direct, token_slots, place.tile, row_tile);
        const uint8_t* column =
            memory.hidden + kept(min(lane / 4, num_tokens - 1) * Memory::row_bytes(gemm.k_blocks) + lane % 4 * 4);
        if (takes) multiply_item(acc, lane_slice(warp), place.row_tiles * kSliceBytes, column);
        for (int block = 0; !takes && block < gemm.k_blocks; block += mlp.item_blocks) {
            await_full();  // by all: who released a stage before would be counted twice
            release(1);
        }
        if (!takes) return;
        grid_dependency_wait();
        float delta[4] = {};
#if LORA
        expand(delta, gemm, adapters, tile, memory.direct.row_of_token(tile, lane / 4));
#endif
        bf16* out = static_cast<bf16*>(gemm.out);
        const int feature = gate_up_feature(row_tile * BLOCK_M, lane / 4);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const bf16 act = to_bf16(gated_silu(acc[2 + t], acc[t], delta[2 + t], delta[t]));
            const int token = 2 * (lane % 4) + t;
#pragma unroll 1
            for (int row = 0; row < tile.num_rows; ++row)
                if (memory.direct.token_of(tile, row) == token)
                    store_awaited(out + block_major_offset(tile.first_row + row, feature, gemm.rows), act);
        }
    }
    // Brings a tile's activations to this warp's part of shared memory, by token, as soon as they are there. Rows of
    // one token are alike.
    __device__ __forceinline__ void bring(uint8_t* target, const TokenTile& tile) {
        const Gemm& gemm = mlp.down;
        const int chunks = gemm.k_blocks * (kBlockK / kChunk);
        const bf16* act = reinterpret_cast<const bf16*>(gemm.tokens);
#pragma unroll 1
        for (int row = 0; row < tile.num_rows; ++row) {
            uint8_t* of_token = target + memory.direct.token_of(tile, row) * Memory::row_bytes(gemm.k_blocks);
#pragma unroll 1
            for (int first = lane; first < chunks; first += 32 * kChunksAhead) {
                uint4 value[kChunksAhead];
                load_until_there(value, [&](int i) {
                    const int chunk = min(first + 32 * i, chunks - 1);
                    return load_awaited(reinterpret_cast<const uint4*>(
                        act + block_major_offset(tile.first_row + row, chunk * kChunk, gemm.rows)));
                });
#pragma unroll
                for (int i = 0; i < kChunksAhead; ++i)
                    if (first + 32 * i < chunks) *reinterpret_cast<uint4*>(of_token + (first + 32 * i) * 16) = value[i];
            }
        }
        __syncwarp();
    }
    // What a tile of down waits for; its adapters are looked up meanwhile.
    __device__ __forceinline__ Adapters<true> prepare(int slice, int index, uint8_t* rows) {
        const Adapters<true> adapters(mlp.down, memory.direct, token_slots, index, slice);
        bring(rows, memory.direct[index]);
        return adapters;
    }
    // 16 rows of down of all tiles, each warp a tile of every group.
    __device__ __forceinline__ void descend(int slice) {
        const Gemm& gemm = mlp.down;
        uint8_t* rows = memory.act + warp * num_tokens * Memory::row_bytes(gemm.k_blocks);
        int first = 0;
        int last = mlp.first_group();
        Adapters<true> adapters;
        if (warp < last) adapters = prepare(slice, warp, rows);
        while (first < mlp.num_tiles) {
            const int others = last - first - 1;
            if (warp <= others) {
                cursor.skip(warp, mlp.num_stages);
                descend_tile(slice, first + warp, others, rows, adapters);
            } else {
                cursor.skip((others + 1) * mlp.down_parts, mlp.num_stages);
            }
            first = last;
            last += kConsumerWarps;
            if (first < mlp.num_tiles) adapters = prepare(slice, first + warp, rows);
        }
    }
    // The same of one tile, between whose stages are those of `others`.
    __device__ __forceinline__ void descend_tile(int slice, int index, int others, const uint8_t* rows,
                                                 const Adapters<true>& adapters) {
        const Gemm& gemm = mlp.down;
        const TokenTile tile = memory.direct[index];
        const int feature = down_feature(slice * BLOCK_M, lane / 4);
        const int token = memory.direct.token_of(tile, min(lane / 4, tile.num_rows - 1));
        const uint8_t* column = rows + kept(token * Memory::row_bytes(gemm.k_blocks) + lane % 4 * 4);
        const uint32_t weights = lane_slice(0);
        float acc[4] = {};
        int end;
        for (int block = 0; block < gemm.k_blocks; block = end) {
            end = mlp.down_end(block);
            await_mine();
            multiply(acc, weights, kSliceBytes, end - block, column + block * kBlockBytes);
            release(kConsumerWarps);
            cursor.skip(end < gemm.k_blocks ? others : others - warp, mlp.num_stages);
        }
#if LORA
        float delta[4] = {};
        expand(delta, gemm, adapters, tile, lane / 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[i] = __fadd_rn(acc[i], delta[i]);
#endif
        uint32_t* down = static_cast<uint32_t*>(gemm.out);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const int column = 2 * (lane % 4) + t;
            if (column >= tile.num_rows) continue;
            const uint32_t pair = pack_bf16(acc[t], acc[2 + t]);
            memory.results[(tile.first_row + column) * 8 + lane / 4] = pair;
            down[(int64_t(tile.first_row + column) * gemm.out_stride + feature) / 2] = pair;
        }
        __syncwarp();
    }
    // The sum over the choices of 16 features of every token; a thread two features. What it reads of several choices
    // is under way at once.
    __device__ __forceinline__ void finalize(int slice, int real_tokens, int choices, bf16* out) {
        if (threadIdx.x >= 8 * real_tokens) return;
        constexpr int kBatch = 8;
        const int token = threadIdx.x / 8;
        const int pair = threadIdx.x % 8;
        const uint16_t* places = memory.direct.places + token * choices;
        const float* weights = memory.weights + token * choices;
        float low = 0.0f;
        float high = 0.0f;
#pragma unroll 1
        for (int first = 0; first < choices; first += kBatch) {
            int place[kBatch];
            float weight[kBatch];
            uint32_t value[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int choice = min(first + i, choices - 1);
                place[i] = first + i < choices ? places[choice] : kNoRow;
                weight[i] = weights[choice];
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) value[i] = memory.results[(place[i] == kNoRow ? 0 : place[i]) * 8 + pair];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (place[i] == kNoRow) continue;
                low = __fmaf_rn(weight[i], low_half(value[i]), low);
                high = __fmaf_rn(weight[i], high_half(value[i]), high);
            }
        }
        const int64_t feature = int64_t(token) * mlp.down.out_stride + down_feature(slice * BLOCK_M, pair);
        reinterpret_cast<uint32_t*>(out)[feature / 2] = pack_bf16(low, high);
    }
};
