// The multiplying warpgroups of the wide grouped GEMM: a tile's sums, its LoRA delta among them, and their way out.
#pragma once

#include "common/activation.cuh"
#include "common/wgmma.cuh"
#include "common/wide_block.cuh"

// Calls `run` with the smallest width that holds `num_rows` tokens.
template <typename Run>
__device__ __forceinline__ void with_wide_width(int num_rows, Run run) {
#if MAX_N > 160
    if (num_rows > 240) return run(Width<256>{});
    if (num_rows > 224) return run(Width<240>{});
    if (num_rows > 208) return run(Width<224>{});
    if (num_rows > 192) return run(Width<208>{});
    if (num_rows > 176) return run(Width<192>{});
    if (num_rows > 160) return run(Width<176>{});
#endif
#if MAX_N > 128
    if (num_rows > 144) return run(Width<160>{});
    if (num_rows > 128) return run(Width<144>{});
#endif
    if (num_rows > 112) return run(Width<128>{});
    if (num_rows > 96) return run(Width<112>{});
    if (num_rows > 64) return run(Width<96>{});
    if (num_rows > 32) return run(Width<64>{});
    run(Width<32>{});
}

// The same with two widths alone, for which there is less code to be fetched.
template <typename Run>
__device__ __forceinline__ void with_half_or_whole(int num_rows, Run run) {
    if (num_rows > kHalfWidth) return run(Width<MAX_N>{});
    run(Width<kHalfWidth>{});
}

struct WideConsumer {
    const Gemm& gemm;
    const WideMemory& memory;
    Cursor<STAGES> cursor;
    float sums[MAX_N / 2];
    // LORA: whether the sums have begun. Without they begin as zeros: either way is what keeps ptxas from making one
    // wgmma wait for the other.
    bool adds;
    const int warpgroup = threadIdx.x / kWarpgroup;
    const int warp = threadIdx.x % kWarpgroup / 32;
    const int lane = threadIdx.x % 32;
    const int rank = cluster_rank();

    // Tokens lie in both blocks: each lets both know.
    __device__ __forceinline__ void release(int stage) {
        if (lane < kCluster) barrier_arrive_at(&memory.ring.empty[stage], lane);
    }
    __device__ __forceinline__ uint32_t stage_address() const {
        return shared_address(memory.stages) + cursor.stage * kStageBytes;
    }

    template <int N>
    __device__ __forceinline__ void multiply() {
        int previous = -1;
        for (int block = 0; block < gemm.k_blocks; ++block) {
            barrier_wait(&memory.ring.full[cursor.stage], cursor.parity);
            const uint64_t a = operand_descriptor(stage_address() + warpgroup * 64 * kBlockBytes);
            const uint64_t b = operand_descriptor(stage_address() + kWeightBytes);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kBlockK / 16; ++k) {
#if LORA
                Wgmma<N>::multiply(sums, a + 2 * k, b + 2 * k, adds || k > 0);
#else
                Wgmma<N>::multiply(sums, a + 2 * k, b + 2 * k);
#endif
            }
            if (LORA) adds = true;
            wgmma_commit();
            wgmma_wait<1>();
            if (previous >= 0) release(previous);
            previous = cursor.stage;
            cursor.advance();
        }
        wgmma_wait<0>();
        release(previous);
    }

    // This lane's part of a stage's B, as A fragments of 16 elements of K each: eight ranks of gate and eight of up,
    // each kind zero for the other's rows; or 16 ranks of down.
    __device__ __forceinline__ uint4 fragment(int step, int blocks) const {
        const uint8_t* mine = memory.stages + cursor.stage * kStageBytes + threadIdx.x / 32 * kFragmentBytes + lane * 8;
        const int block = step * kStepBlocks;
        const uint2 b = *reinterpret_cast<const uint2*>(mine + block * kTileFragmentBytes);
        if (!IS_DOWN) return uint4{0, b.y, b.x, 0};
        if (block + 1 >= blocks) return uint4{b.x, b.y, 0, 0};
        const uint2 next = *reinterpret_cast<const uint2*>(mine + (block + 1) * kTileFragmentBytes);
        return uint4{b.x, b.y, next.x, next.y};
    }
    // Half a step has no second column: its zeros meet the first one again.
    __device__ __forceinline__ uint64_t step_columns(int step, int blocks) const {
        const uint32_t first = stage_address() + kWeightBytes + step * kColumnsPerStep * kColumnBytes;
        return column_descriptor(first, (step + 1) * kStepBlocks <= blocks ? kColumnBytes : 0);
    }
    // Adds B h of one step, or of two.
    template <int N, int kSteps>
    __device__ __forceinline__ void expand_steps(int step, int blocks) {
        uint4 a[kSteps];
#pragma unroll
        for (int i = 0; i < kSteps; ++i) a[i] = fragment(step + i, blocks);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kSteps; ++i) Wgmma<N>::multiply(sums, a[i], step_columns(step + i, blocks), adds || i > 0);
        adds = true;
        wgmma_commit();
        wgmma_wait<0>();
    }
    // sums = B h over the tile's LoRA stages, each step as far as it has rows.
    __device__ __forceinline__ void expand() {
        for (bool last = false; !last;) {
            barrier_wait(&memory.ring.full[cursor.stage], cursor.parity);
            const LoraStage stage = memory.ring.lora[cursor.stage];
            const int blocks = stage.blocks;
            last = stage.last;
#pragma unroll 1
            for (int step = 0; step * kStepBlocks < blocks; step += 2) {
                with_half_or_whole(step == 0 ? stage.rows[0] : stage.rows[1], [&]<int N>(Width<N>) {
                    if ((step + 1) * kStepBlocks < blocks)
                        expand_steps<N, 2>(step, blocks);
                    else
                        expand_steps<N, 1>(step, blocks);
                });
            }
            __syncwarp();
            release(cursor.stage);
            cursor.advance();
        }
    }

    __device__ __forceinline__ void sync() { named_barrier_sync(1 + warpgroup, kWarpgroup); }

    // The activation of this warpgroup's 32 features: half of each token's K-block.
    __device__ __forceinline__ void store_activation(const TokenTile& tile, int row_tile) {
        bf16* staging = reinterpret_cast<bf16*>(memory.staging + warpgroup * kStagingBytes);
        constexpr int kStride = kBlockK / 2;
        const int feature = gate_up_feature(warp * 16, lane / 4);
        // Chunks are swizzled by token / 2 % 4, which is lane % 4 in this lane's writes.
        bf16* mine = staging + lane % 4 * 2 * kStride + ((feature / kChunk) ^ (lane % 4)) * kChunk + feature % kChunk;
        sync();
#pragma unroll
        for (int j = 0; j < MAX_N / 8; ++j) {
            if (8 * j >= tile.num_rows) break;
#pragma unroll
            for (int t = 0; t < 2; ++t)
                mine[(8 * j + t) * kStride] = to_bf16(gated_silu(sums[4 * j + 2 + t], sums[4 * j + t], 0.0f, 0.0f));
        }
        sync();
        if (row_tile >= gemm.row_tiles) return;
        constexpr int kChunks = kStride / kChunk;
        bf16* out = static_cast<bf16*>(gemm.out) + (int64_t(row_tile) * gemm.rows + tile.first_row) * kBlockK;
        for (int i = threadIdx.x % kWarpgroup; i < tile.num_rows * kChunks; i += kWarpgroup) {
            const int row = i / kChunks;
            const int chunk = i % kChunks;
            *reinterpret_cast<uint4*>(out + row * kBlockK + ((warpgroup * kChunks + chunk) ^ (row & 7)) * kChunk) =
                *reinterpret_cast<const uint4*>(staging + row * kStride + (chunk ^ (row / 2 & 3)) * kChunk);
        }
    }

    // The down rows of this warpgroup's 64 features, [P, H], piece by piece: 128 bytes a row.
    __device__ __forceinline__ void store_down(const TokenTile& tile, int row_tile) {
        bf16* staging = reinterpret_cast<bf16*>(memory.staging + warpgroup * kStagingBytes);
        constexpr int kChunks = kBlockK / kChunk;
        const int feature = down_feature(warp * 16, lane / 4);
        const int token = lane % 4 * 2;
        bf16* out = static_cast<bf16*>(gemm.out) + int64_t(tile.first_row) * gemm.out_stride + row_tile * BLOCK_M +
                    warpgroup * kBlockK;
        sync();
#pragma unroll
        for (int piece = 0; piece < ceil_div(MAX_N, kPiece); ++piece) {
            const int first = piece * kPiece;
            if (first >= tile.num_rows) break;
            bf16* target = staging + piece % 2 * kPiece * kBlockK;
#pragma unroll
            for (int j = 0; j < kPiece / 8; ++j)
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    const int i = 4 * (first / 8 + j) + t;
                    if (first + 8 * j < MAX_N)
                        *reinterpret_cast<uint32_t*>(target + block_major_offset(8 * j + token + t, feature, 0)) =
                            pack_bf16(sums[i], sums[i + 2]);
                }
            sync();
            if (row_tile >= gemm.row_tiles) continue;
            const int end = min(kPiece, tile.num_rows - first) * kChunks;
            for (int i = threadIdx.x % kWarpgroup; i < end; i += kWarpgroup) {
                const int row = i / kChunks;
                const int chunk = i % kChunks;
                *reinterpret_cast<uint4*>(out + int64_t(first + row) * gemm.out_stride + chunk * kChunk) =
                    *reinterpret_cast<const uint4*>(target + row * kBlockK + (chunk ^ (row & 7)) * kChunk);
            }
        }
    }

    __device__ __forceinline__ void run() {
        while (true) {
            barrier_wait(&memory.ring.full[cursor.stage], cursor.parity);
            const int item = memory.ring.item[cursor.stage];
            if (item == kNoItem) break;
            const TokenTile tile = memory.ring.tile[cursor.stage];
#if LORA
            adds = false;
#else
#pragma unroll
            for (int i = 0; i < MAX_N / 2; ++i) sums[i] = 0.0f;
#endif
            if (LORA && tile.num_groups() != 0) expand();
            with_wide_width(tile.num_rows, [&]<int N>(Width<N>) { multiply<N>(); });
            const int row_tile = row_tile_of(gemm, item, rank);
            if (IS_DOWN)
                store_down(tile, row_tile);
            else
                store_activation(tile, row_tile);
        }
    }
};
