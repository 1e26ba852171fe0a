// act = silu(gate + delta_gate) * (up + delta_up) over the rows of each token tile, into BlockMajorK.
//
// Reads gate and up as fp32 pairs [rows, I], and as bf16 pairs the LoRA delta of rows that have an adapter.
#include "common/activation.cuh"
#include "common/barrier.cuh"
#include "common/layout.cuh"
#include "common/tiles.cuh"

constexpr int kThreads = 256;
constexpr int kChunksPerRow = kBlockK / kChunk;

// Two features: their gate and up, and their deltas (gate in the low half of each pair).
__device__ __forceinline__ uint32_t two_features(const float4& pairs, uint32_t first_delta, uint32_t second_delta) {
    return pack_bf16(gated_silu(pairs.x, pairs.y, low_half(first_delta), high_half(first_delta)),
                     gated_silu(pairs.z, pairs.w, low_half(second_delta), high_half(second_delta)));
}

extern "C" __global__ void __launch_bounds__(kThreads)
    activation(const TokenTile* tiles, const int* num_tiles, const int* row_slots, const float4* gate_up,
               const uint4* delta, bf16* act, int intermediate_blocks, int rows) {
    grid_dependency_wait();
    grid_dependency_launch();
    const int num_items = *num_tiles * intermediate_blocks;
    for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
        const TokenTile tile = tiles[item / intermediate_blocks];
        const int block = item % intermediate_blocks;
        for (int i = threadIdx.x; i < tile.num_rows * kChunksPerRow; i += kThreads) {
            const int row = tile.first_row + i / kChunksPerRow;
            const int feature = block * kBlockK + i % kChunksPerRow * kChunk;
            const int64_t source = int64_t(row) * intermediate_blocks * kBlockK + feature;
            uint4 deltas[2] = {};
            if (row_slots[row] >= 0) {
                deltas[0] = delta[source / 4];
                deltas[1] = delta[source / 4 + 1];
            }
            const float4* pairs = gate_up + source / 2;
            *reinterpret_cast<uint4*>(act + block_major_offset(row, feature, rows)) = uint4{
                two_features(pairs[0], deltas[0].x, deltas[0].y), two_features(pairs[1], deltas[0].z, deltas[0].w),
                two_features(pairs[2], deltas[1].x, deltas[1].y), two_features(pairs[3], deltas[1].z, deltas[1].w)};
        }
    }
}
