// act = silu(gate + delta_gate) * (up + delta_up) over the rows of each token tile, into BlockMajorK.
//
// Reads gate and up as bf16 pairs [rows, I], the LoRA delta likewise for rows that have an adapter.
#include "common/activation.cuh"
#include "common/barrier.cuh"
#include "common/layout.cuh"
#include "common/tiles.cuh"

constexpr int kThreads = 256;
constexpr int kChunksPerRow = kBlockK / kChunk;

__device__ __forceinline__ float pair_activation(uint32_t gate_up, uint32_t delta) {
    return gated_silu(low_half(gate_up), high_half(gate_up), low_half(delta), high_half(delta));
}

__device__ __forceinline__ uint4 chunk_activation(const uint4 (&pairs)[2], const uint4 (&deltas)[2]) {
    return uint4{pack_bf16(pair_activation(pairs[0].x, deltas[0].x), pair_activation(pairs[0].y, deltas[0].y)),
                 pack_bf16(pair_activation(pairs[0].z, deltas[0].z), pair_activation(pairs[0].w, deltas[0].w)),
                 pack_bf16(pair_activation(pairs[1].x, deltas[1].x), pair_activation(pairs[1].y, deltas[1].y)),
                 pack_bf16(pair_activation(pairs[1].z, deltas[1].z), pair_activation(pairs[1].w, deltas[1].w))};
}

extern "C" __global__ void __launch_bounds__(kThreads)
    activation(const TokenTile* tiles, const int* num_tiles, const int* row_slots, const uint32_t* gate_up,
               const uint32_t* delta, bf16* act, int intermediate_blocks, int rows) {
    grid_dependency_wait();
    grid_dependency_launch();
    const int num_items = *num_tiles * intermediate_blocks;
    for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
        const TokenTile tile = tiles[item / intermediate_blocks];
        const int block = item % intermediate_blocks;
        for (int i = threadIdx.x; i < tile.num_rows * kChunksPerRow; i += kThreads) {
            const int row = tile.first_row + i / kChunksPerRow;
            const int feature = block * kBlockK + i % kChunksPerRow * kChunk;
            const int64_t source = (int64_t(row) * intermediate_blocks * kBlockK + feature) / 4;
            const uint4 pairs[2] = {reinterpret_cast<const uint4*>(gate_up)[source],
                                    reinterpret_cast<const uint4*>(gate_up)[source + 1]};
            uint4 deltas[2] = {};
            if (row_slots[row] >= 0) {
                deltas[0] = reinterpret_cast<const uint4*>(delta)[source];
                deltas[1] = reinterpret_cast<const uint4*>(delta)[source + 1];
            }
            *reinterpret_cast<uint4*>(act + block_major_offset(row, feature, rows)) = chunk_activation(pairs, deltas);
        }
    }
}
