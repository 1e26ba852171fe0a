// Brings the hidden states of many tokens to their places in BlockMajorK, and on the way makes h of gate and up.
//
// A block takes a part of a token tile: its rows come from the input in stages of one K-block, meet the A of their
// adapters there, and leave as whole runs of memory. Compile-time: MAX_N (tokens of the largest tile).
#include "common/wide_part.cuh"

using Gathered = Part<16, 3>;

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    wide_gather_shrink(const LayerArgs* layer, const bf16* hidden, const int* place_tokens, const TokenTile* tiles,
                       const int* num_tiles, const LoraGroup* groups, uint8_t* tokens, bf16* h, int num_experts,
                       int k_blocks, int rows, int max_rank) {
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ Columns columns;
    grid_dependency_wait();
    grid_dependency_launch();
    int first_row;
    int num_rows;
    const TokenTile tile = part_of(tiles, *num_tiles, first_row, num_rows);
    if (num_rows == 0) return;

    const uint8_t* source[kRowsPerThread];
    const int chunk = threadIdx.x % kChunksPerRow ^ threadIdx.x / kChunksPerRow % 8;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
        const int row = min(int(threadIdx.x) / kChunksPerRow + i * kRowStep, num_rows - 1);
        source[i] = reinterpret_cast<const uint8_t*>(
            hidden + int64_t(place_tokens[first_row + row]) * k_blocks * kBlockK + chunk * kChunk);
    }
    ColumnList<2> list{layer, groups, num_experts, max_rank, tile, first_row, num_rows, k_blocks};
    const Gathered part{first_row, num_rows, k_blocks, rows, kBlockBytes, shared, columns};
    part.open_rows(source, part.all_rows());
    for (bool first = true;; first = false) {
        if (threadIdx.x < 32) list.fill(columns);
        __syncthreads();
        const bool more = columns.more;
        if (!first && columns.count == 0) break;
        Gathered::Ahead ahead;
        part.aim(ahead, 0);
        if (first)
            ahead.wanted = part.all_rows();
        else
            part.open_rows(source, ahead.wanted);
        part.open_a(ahead);
        part.make(ahead, source, first ? tokens : nullptr, h);
        if (!more) break;
    }
}
