// The multiplying warps of the token MLP: 16 weight rows by eight columns each, and the sum over a token's choices.
#pragma once

#include "common/activation.cuh"
#include "common/awaited.cuh"
#include "common/mma.cuh"
#include "common/token_block.cuh"
#include "common/weighted_sum.cuh"

constexpr int kChunksAhead = 3;                   // 16-byte pieces of an activation that a lane has under way
[[maybe_unused]] constexpr int kBlocksAhead = 4;  // blocks of ranks, of B and h

// One K-block of a slice and of eight columns, as `mma_m16n8k16` takes them.
struct Fragments {
    uint32_t a[kBlockK / 16][4];
    uint32_t b[kBlockK / 16][2];

    __device__ __forceinline__ Fragments(uint32_t slice, const uint8_t* column) {
        const int lane = threadIdx.x % 32;
        const int row = lane % 16;
#pragma unroll
        for (int k = 0; k < kBlockK / 16; ++k) {
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(a[k][0]), "=r"(a[k][1]), "=r"(a[k][2]), "=r"(a[k][3])
                         : "r"(slice + row * kBlockBytes + ((2 * k + lane / 16) ^ row % 8) * 16));
            b[k][0] = *reinterpret_cast<const uint32_t*>(column + 32 * k);
            b[k][1] = *reinterpret_cast<const uint32_t*>(column + 32 * k + 16);
        }
    }
    __device__ __forceinline__ void multiply(float (&acc)[4]) const {
#pragma unroll
        for (int k = 0; k < kBlockK / 16; ++k) mma_m16n8k16(acc, a[k][0], a[k][1], a[k][2], a[k][3], b[k][0], b[k][1]);
    }
};

#if LORA
// A tile's adapter groups, one a lane, by the sort's word; their B of one slice is asked for ahead.
template <bool kDown>
struct Adapters {
    int count;
    GroupSource<kDown> groups;

    Adapters() = default;
    __device__ __forceinline__ Adapters(const Gemm& gemm, int index, int slice) {
        grid_dependency_wait();
        const TokenTile tile = gemm.tiles[index];
        count = tile.num_groups();
        groups = GroupSource<kDown>(gemm, tile, slice, threadIdx.x % 32);
        for (int block = 0; block < groups.rank_blocks; ++block) {
            const uint8_t* b = groups.b + int64_t(block) * gemm.row_tiles * kTileFragmentBytes;
            prefetch_line(b);
            prefetch_line(b + 128);
        }
    }
};
#endif

struct TokenConsumer {
    const Mlp& mlp;
    const Memory& memory;
    int num_tokens;  // rows of hidden states
    TokenCursor cursor;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;

    __device__ __forceinline__ void await_full() { barrier_wait(&memory.ring.full[cursor.stage], cursor.parity); }
    // The stage is done with, by this warp or for all of them.
    __device__ __forceinline__ void release(int warps) {
        __syncwarp();
        if (lane == 0) barrier_arrive(&memory.ring.empty[cursor.stage], warps);
        cursor.advance(mlp.num_stages);
    }
    // Waits for a stage that is this warp's alone, while those of others come and go: only once it has been begun does
    // its parity tell whether it is full.
    __device__ __forceinline__ void await_mine() {
        if (lane == 0)
            while (atomicAdd(&memory.ring.begun, 0) <= cursor.before) {
            }
        __syncwarp();
        await_full();
    }
    // acc += the stage's K-blocks of a slice by the columns' tokens: this warp's slice lies at `offset` and every
    // `bytes` from there, `column` is this lane's.
    __device__ __forceinline__ void multiply(float (&acc)[4], int offset, int bytes, int k_blocks,
                                             const uint8_t* column) {
        uint32_t slice = shared_address(memory.stages) + cursor.stage * mlp.stage_bytes + offset;
        Fragments ahead(slice, column);
        for (int block = 1; block < k_blocks; ++block) {
            const Fragments now = ahead;
            slice += bytes;
            column += kBlockBytes;
            ahead = Fragments(slice, column);
            now.multiply(acc);
        }
        ahead.multiply(acc);
    }

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
#if LORA
        Adapters<false> adapters;
        if (takes) adapters = Adapters<false>(gemm, place.tile, row_tile);
#endif
        const int most = mlp.stage_blocks(place.row_tiles);
        const uint8_t* column =
            memory.hidden + min(lane / 4, num_tokens - 1) * Memory::row_bytes(gemm.k_blocks) + lane % 4 * 4;
        for (int block = 0; block < gemm.k_blocks; block += most) {
            await_full();  // by all: who released a stage before would be counted twice
            if (takes)
                multiply(acc, warp * kSliceBytes, place.row_tiles * kSliceBytes, min(most, gemm.k_blocks - block),
                         column + block * kBlockBytes);
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
        for (int row = 0; row < tile.num_rows; ++row) {
            uint8_t* of_token = target + memory.direct.token_of(tile, row) * Memory::row_bytes(gemm.k_blocks);
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
    // 16 rows of down of all tiles, each warp every eighth tile.
    __device__ __forceinline__ void descend(int slice) {
        const Gemm& gemm = mlp.down;
        uint8_t* rows = memory.act + warp * num_tokens * Memory::row_bytes(gemm.k_blocks);
        const int feature = down_feature(slice * BLOCK_M, lane / 4);
        const int most = mlp.stage_blocks(1);
        if (warp < mlp.num_tiles) bring(rows, memory.direct[warp]);
        for (int index = 0; index < mlp.num_tiles; ++index) {
            if (index % kConsumerWarps != warp) {
                cursor.skip(ceil_div(gemm.k_blocks, most), mlp.num_stages);
                continue;
            }
            const TokenTile tile = memory.direct[index];
            const int token = memory.direct.token_of(tile, min(lane / 4, tile.num_rows - 1));
            const uint8_t* column = rows + token * Memory::row_bytes(gemm.k_blocks) + lane % 4 * 4;
            float acc[4] = {};
#if LORA
            const Adapters<true> adapters(gemm, index, slice);
#endif
            for (int block = 0; block < gemm.k_blocks; block += most) {
                await_mine();
                multiply(acc, 0, kSliceBytes, min(most, gemm.k_blocks - block), column + block * kBlockBytes);
                release(kConsumerWarps);
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
            if (index + kConsumerWarps < mlp.num_tiles) bring(rows, memory.direct[index + kConsumerWarps]);
        }
    }
    // The sum over the choices of 16 features of every token; a thread two features.
    __device__ __forceinline__ void finalize(int slice, int real_tokens, int choices, bf16* out) {
        if (threadIdx.x >= 8 * real_tokens) return;
        const int token = threadIdx.x / 8;
        const int pair = threadIdx.x % 8;
        float low = 0.0f;
        float high = 0.0f;
        for (int choice = 0; choice < choices; ++choice) {
            const int row = token * choices + choice;
            if (memory.direct.keys[row] == kNoKey) continue;
            const uint32_t value = memory.results[memory.direct.places[row] * 8 + pair];
            low = __fmaf_rn(memory.weights[row], low_half(value), low);
            high = __fmaf_rn(memory.weights[row], high_half(value), high);
        }
        const int64_t feature = int64_t(token) * mlp.down.out_stride + down_feature(slice * BLOCK_M, pair);
        reinterpret_cast<uint32_t*>(out)[feature / 2] = pack_bf16(low, high);
    }
};
