// The epilogues of the grouped GEMM: a tile from registers to memory.
#pragma once

#include "common/activation.cuh"
#include "common/gemm_block.cuh"
#include "common/width.cuh"

// The epilogues; `warp_row` is the first of this warp's 16 rows within the tile.
template <int N>
__device__ __forceinline__ void store_gate_up(const float (&acc)[N / 2], const Gemm& gemm, const TokenTile& tile,
                                              int row_tile, int warp_row) {
    const int lane = volatile_lane();
    const int feature = row_tile * kTileFeatures + gate_up_feature(warp_row, lane / 4);
    float2* out = static_cast<float2*>(gemm.out) + int64_t(tile.first_row) * gemm.out_stride + feature;
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const int token = 8 * j + 2 * (lane % 4) + t;
            if (token < tile.num_rows)
                out[int64_t(token) * gemm.out_stride] = float2{acc[4 * j + 2 + t], acc[4 * j + t]};
        }
}

template <int N, int kEpilogue>
__device__ __forceinline__ void store_down(const float (&acc)[N / 2], const Gemm& gemm, const TokenTile& tile,
                                           int row_tile, int warp_row) {
    const int lane = volatile_lane();
    const int feature = row_tile * BLOCK_M + down_feature(warp_row, lane / 4);
    const int64_t first = (int64_t(tile.first_row) * gemm.out_stride + feature) / 2;
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const int token = 8 * j + 2 * (lane % 4) + t;
            if (token >= tile.num_rows) continue;
            const int64_t index = first + int64_t(token) * (gemm.out_stride / 2);
            if (kEpilogue == EPILOGUE_DOWN_FP32)
                static_cast<float2*>(gemm.out)[index] = float2{acc[4 * j + t], acc[4 * j + 2 + t]};
            else
                static_cast<uint32_t*>(gemm.out)[index] = pack_bf16(acc[4 * j + t], acc[4 * j + 2 + t]);
        }
}

// silu(gate) * up of a row tile's sums, each word two tokens' of one feature, so that sums leave their registers.
template <int N>
__device__ __forceinline__ void activate(uint32_t (&act)[N / 8], const float (&acc)[N / 2], const float* delta) {
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        float value[2];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const int gate = 4 * j + 2 + t;
            const int up = 4 * j + t;
            value[t] = gated_silu(acc[gate], acc[up], LORA ? delta[gate] : 0.0f, LORA ? delta[up] : 0.0f);
        }
        act[j] = pack_bf16(value[0], value[1]);
    }
}

template <int N>
__device__ __forceinline__ void store_activation(const uint32_t (&act)[N / 8], const Gemm& gemm, const TokenTile& tile,
                                                 int row_tile, int warp_row, const Memory& memory) {
    bf16* staging = memory.staging;
    const int lane = volatile_lane();
    const int feature = (row_tile * kTileFeatures) % kBlockK + gate_up_feature(warp_row, lane / 4);
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const int token = 8 * j + 2 * (lane % 4) + t;
            staging[block_major_offset(token, feature, 0)] = bf16{uint16_t(act[j] >> 16 * t)};
        }
    named_barrier_sync(1, kConsumers);
    // Columns of the staging tile are laid out as rows in global memory: copy this tile's chunks of each.
    constexpr int kChunks = kTileFeatures / kChunk;
    const int first_chunk = (row_tile * kTileFeatures) % kBlockK / kChunk;
    bf16* out = static_cast<bf16*>(gemm.out) +
                (int64_t(row_tile * kTileFeatures / kBlockK) * gemm.rows + tile.first_row) * kBlockK;
    for (int i = threadIdx.x; i < tile.num_rows * kChunks; i += kConsumers) {
        const int row = i / kChunks;
        const int column = DIRECT ? memory.direct.token_of(tile, row) : row;
        const int chunk = first_chunk + i % kChunks;
        *reinterpret_cast<uint4*>(out + row * kBlockK + (chunk ^ (row & 7)) * kChunk) =
            *reinterpret_cast<const uint4*>(staging + column * kBlockK + (chunk ^ (column & 7)) * kChunk);
    }
    named_barrier_sync(1, kConsumers);
}
