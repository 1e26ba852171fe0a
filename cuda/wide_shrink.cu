// h of down for many tokens: scaling * A x of the activations of every adapter group, as the columns that wide_gemm
// multiplies B with.
//
// A block takes a part of a token tile. Tiles and adapters are older than the kernel before, and so are looked up, and
// A is on its way, before that has ended. Compile-time: MAX_N (rows of the largest token tile).
#include "common/wide_part.cuh"

using Activations = Part<8, 4>;
constexpr int kAsked = 64;  // K-blocks of a column's A that L2 is asked for ahead

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    wide_shrink(const LayerArgs* layer, const uint8_t* act, const TokenTile* tiles, const int* num_tiles,
                const LoraGroup* groups, bf16* h, int num_experts, int k_blocks, int rows, int max_rank) {
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ Columns columns;
    int first_row;
    int num_rows;
    const TokenTile tile = part_of(tiles, *num_tiles, first_row, num_rows);
    if (num_rows == 0) {
        grid_dependency_wait();
        return;
    }

    const uint8_t* source[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i)
        source[i] = act + int64_t(first_row) * kBlockBytes + (threadIdx.x + i * kThreads) * 16;
    ColumnList<1> list{layer, groups, num_experts, max_rank, tile, first_row, num_rows, k_blocks};
    const Activations part{first_row, num_rows, k_blocks, rows, int64_t(rows) * kBlockBytes, shared, columns};
    for (bool first = true;; first = false) {
        if (threadIdx.x < 32) list.fill(columns);
        __syncthreads();
        if (threadIdx.x < columns.count)
            prefetch_bulk(columns.column[threadIdx.x].a, min(k_blocks, kAsked) * kColumnBytes);
        const bool more = columns.more;
        Activations::Ahead ahead;
        part.aim(ahead, 0);
        part.open_a(ahead);
        if (first) {
            grid_dependency_wait();
            grid_dependency_launch();
        }
        if (columns.count == 0) break;
        part.open_rows(source, ahead.wanted);
        part.make(ahead, source, nullptr, h);
        if (!more) break;
    }
}
