// Brings the hidden states of many tokens to their places in BlockMajorK, and on the way makes h of gate and up.
//
// A block takes a part of a token tile: its rows come from the input in stages of one K-block, meet the A of their
// adapters there, and leave as whole runs of memory. Compile-time: MAX_N (tokens of the largest tile).
#include "common/wide_columns.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kAlike ? 2 : 3)
    wide_gather_shrink(const LayerArgs* layer, const bf16* hidden, const int* place_tokens, const TokenTile* tiles,
                       const int* num_tiles, const LoraGroup* groups, uint8_t* tokens, bf16* h, int num_experts,
                       int k_blocks, int rows, int max_rank) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Column columns[kColumns];
    __shared__ int num_columns;
    grid_dependency_wait();
    grid_dependency_launch();
    int first_row;
    int num_rows;
    const TokenTile tile = part_of(tiles, *num_tiles, first_row, num_rows);
    if (num_rows == 0) return;

    const uint8_t* source[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
        const int row = min(int(threadIdx.x) / kChunksPerRow + i * (kThreads / kChunksPerRow), num_rows - 1);
        source[i] =
            reinterpret_cast<const uint8_t*>(hidden + int64_t(place_tokens[first_row + row]) * k_blocks * kBlockK +
                                             threadIdx.x % kChunksPerRow * kChunk);
    }
    const WideLora lora{layer, groups, h, num_experts, max_rank};
    ColumnList list{lora, tile, first_row, num_rows, k_blocks};
    const Part part{first_row, num_rows, k_blocks, rows, shared, columns};
    for (bool first = true;; first = false) {
        if (threadIdx.x < 32) {
            const int filled = list.fill(columns);
            if (threadIdx.x == 0) num_columns = filled;
        }
        __syncthreads();
        if (!first && num_columns == 0) break;
        part.pass(source, first ? tokens : nullptr, h, num_columns);
    }
}
