// delta = B h for every adapter group: gate and up pairs [rows, I], or the down delta [rows, H], bf16.
//
// B is stored as the fragments of m16n8k8, so that a warp reads 256 consecutive bytes for 16 output rows by
// eight ranks. Sums run over the live ranks in order, in fp32, and are rounded once.
//
// Compile-time: PROJECTIONS (2: gate and up; 1: down).
#include "common/barrier.cuh"
#include "common/layer_args.cuh"
#include "common/layout.cuh"
#include "common/lora.cuh"
#include "common/tiles.cuh"

constexpr int kWarps = 8;
constexpr int kTokenTiles = 2;     // of eight tokens each, kept in registers together
constexpr int kBlocksPerWarp = 2;  // blocks of 16 output rows
constexpr int kRankUnroll = 2;

struct Fragments {
    const uint8_t* b;     // first block of 16 rows of this warp
    int64_t rank_stride;  // bytes from one block of eight ranks to the next
    int num_blocks;       // blocks of 16 rows that lie inside the matrix, at most kBlocksPerWarp
};

using Accumulators = float[kBlocksPerWarp][kTokenTiles][4];

struct Hidden {
    const bf16* h;  // [R/8, rows, PROJECTIONS, 8]
    int rows;
    int first_row;
    int num_rows;
    // Lane l's two values of token l/4 of tile `tile`: ranks 8 * block + 2 * (l % 4) and the next.
    __device__ __forceinline__ uint32_t load(int tile, int block, int projection) const {
        const int lane = threadIdx.x % 32;
        const int token = tile * 8 + lane / 4;
        const int64_t offset = h_offset(block, first_row + token, projection, rows, PROJECTIONS) + lane % 4 * 2;
        return token < num_rows ? *reinterpret_cast<const uint32_t*>(h + offset) : 0;
    }
};

__device__ __forceinline__ void accumulate(Accumulators& acc, const Fragments& fragments, const Hidden& hidden,
                                           const int (&live)[PROJECTIONS]) {
    const int lane = threadIdx.x % 32;
    const int blocks = PROJECTIONS == 2 ? max(live[0], live[PROJECTIONS - 1]) : live[0];
    for (int first = 0; first < blocks; first += kRankUnroll) {
        uint2 b[kRankUnroll][kBlocksPerWarp];
        uint32_t x[kRankUnroll][kTokenTiles][PROJECTIONS];
#pragma unroll
        for (int u = 0; u < kRankUnroll; ++u) {
            const int block = first + u;
#pragma unroll
            for (int m = 0; m < kBlocksPerWarp; ++m)
                b[u][m] = block < blocks && m < fragments.num_blocks
                              ? *reinterpret_cast<const uint2*>(fragments.b + block * fragments.rank_stride +
                                                                m * kFragmentBytes + lane * 8)
                              : uint2{0, 0};
#pragma unroll
            for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
                for (int p = 0; p < PROJECTIONS; ++p) x[u][t][p] = block < live[p] ? hidden.load(t, block, p) : 0;
        }
#pragma unroll
        for (int u = 0; u < kRankUnroll; ++u)
#pragma unroll
            for (int m = 0; m < kBlocksPerWarp; ++m)
#pragma unroll
                for (int t = 0; t < kTokenTiles; ++t) {
#if PROJECTIONS == 2
                    expand_gate_up(acc[m][t], b[u][m], x[u][t][0], x[u][t][1]);
#else
                    expand_down(acc[m][t], b[u][m], x[u][t][0]);
#endif
                }
    }
}

__device__ __forceinline__ void store(const Accumulators& acc, uint32_t* delta, int stride, int first_block,
                                      int num_blocks, int num_rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kBlocksPerWarp; ++m) {
        if (m >= num_blocks) break;
        const int block = first_block + m;
        const int column =
            PROJECTIONS == 2 ? gate_up_feature(block * 16, lane / 4) : down_feature(block * 16, lane / 4) / 2;
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = t * 8 + lane % 4 * 2 + i;
                // gate in the low half and up in the high one; or an output feature and the next.
                const float low = PROJECTIONS == 2 ? acc[m][t][2 + i] : acc[m][t][i];
                const float high = PROJECTIONS == 2 ? acc[m][t][i] : acc[m][t][2 + i];
                if (token < num_rows) delta[int64_t(token) * stride + column] = pack_bf16(low, high);
            }
    }
}

extern "C" __global__ void __launch_bounds__(kWarps * 32, 2)
    lora_expand(const LayerArgs* layer, const LoraGroup* groups, const int* num_groups, const bf16* h, uint32_t* delta,
                int num_experts, int row_blocks, int rows, int max_rank) {
    grid_dependency_wait();
    grid_dependency_launch();
    const int warp = threadIdx.x / 32;
    const int chunks = ceil_div(row_blocks, kWarps * kBlocksPerWarp);
    const int num_items = *num_groups * chunks;
    const int delta_stride = row_blocks * 8;
    const int64_t rank_stride = int64_t(row_blocks) * kFragmentBytes;
    const int64_t expert_bytes = rank_stride * (max_rank / 8);

    for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
        const LoraGroup group = groups[item / chunks];
        const int first_block = (item % chunks * kWarps + warp) * kBlocksPerWarp;
        const int num_blocks = min(kBlocksPerWarp, row_blocks - first_block);
        if (num_blocks <= 0) continue;
        const LoraEntry& entry = layer->entry_of(group.slot, group.expert, num_experts);
        int live[PROJECTIONS];
#pragma unroll
        for (int p = 0; p < PROJECTIONS; ++p) live[p] = ceil_div(PROJECTIONS == 2 ? entry.rank[p] : entry.rank[2], 8);
        const int source = PROJECTIONS == 1 && entry.shared_b ? 0 : group.expert;
        const Fragments fragments{(PROJECTIONS == 2 ? layer->lora_b_gate_up : layer->lora_b_down) +
                                      (int64_t(group.slot) * num_experts + source) * expert_bytes +
                                      int64_t(first_block) * kFragmentBytes,
                                  rank_stride, num_blocks};
        for (int row = 0; row < group.num_rows; row += 8 * kTokenTiles) {
            const int num_rows = min(8 * kTokenTiles, group.num_rows - row);
            const int first_row = group.first_row + row;
            Accumulators acc = {};
            accumulate(acc, fragments, Hidden{h, rows, first_row, num_rows}, live);
            store(acc, delta + int64_t(first_row) * delta_stride, delta_stride, first_block, num_blocks, num_rows);
        }
    }
}
