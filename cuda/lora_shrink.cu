// h = scaling * A x for every adapter group: [rows, R] bf16 from BlockMajorK operands, deterministic.
//
// Tokens are the M operand, eight ranks the N operand. A block takes one group and RANK_BLOCKS blocks of eight
// ranks; its eight warps split K in a fixed way and their sums are added in a fixed order, so that a token's h
// does not depend on its neighbours. Only live ranks are read.
//
// Compile-time: PROJECTIONS (2: gate and up side by side; 1: down), RANK_BLOCKS.
#include "common/barrier.cuh"
#include "common/layer_args.cuh"
#include "common/layout.cuh"
#include "common/mma.cuh"
#include "common/tiles.cuh"

constexpr int kWarps = 8;
constexpr int kTokens = 16;                  // one M tile
constexpr int kUnroll = 8 / RANK_BLOCKS;     // K steps of 32 loaded together
constexpr int kRankBlockBytes = 8 * 32 * 2;  // eight ranks by 32 of K

struct Operand {
    const bf16* tokens;  // BlockMajorK [K/64, rows, 64]
    int rows;
    // 16 bytes of row `row`: K elements 32 * step + 8 * (lane % 4) and on.
    __device__ __forceinline__ uint4 load(int row, int step, int lane) const {
        return *reinterpret_cast<const uint4*>(tokens + block_major_offset(row, step * 32 + lane % 4 * 8, rows));
    }
};

// Partial sums of this warp's K range: acc[b][..] for rank block b.
__device__ __forceinline__ void accumulate(float (&acc)[RANK_BLOCKS][4], const Operand& operand, int first_row,
                                           int num_rows, const uint8_t* a, int64_t a_block, int live_blocks,
                                           int k_steps) {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int begin = k_steps * warp / kWarps;
    const int end = k_steps * (warp + 1) / kWarps;
    const int low = lane / 4;
    for (int step = begin; step < end; step += kUnroll) {
        uint4 weights[kUnroll][RANK_BLOCKS];
        uint4 x[kUnroll][2];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const bool inside = step + u < end;
#pragma unroll
            for (int b = 0; b < RANK_BLOCKS; ++b)
                weights[u][b] = inside && b < live_blocks
                                    ? *reinterpret_cast<const uint4*>(a + b * a_block +
                                                                      int64_t(step + u) * kRankBlockBytes + lane * 16)
                                    : uint4{0, 0, 0, 0};
#pragma unroll
            for (int half = 0; half < 2; ++half)
                x[u][half] = inside && low + 8 * half < num_rows
                                 ? operand.load(first_row + low + 8 * half, step + u, lane)
                                 : uint4{0, 0, 0, 0};
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
#pragma unroll
            for (int b = 0; b < RANK_BLOCKS; ++b) {
                mma_m16n8k16(acc[b], x[u][0].x, x[u][1].x, x[u][0].y, x[u][1].y, weights[u][b].x, weights[u][b].y);
                mma_m16n8k16(acc[b], x[u][0].z, x[u][1].z, x[u][0].w, x[u][1].w, weights[u][b].z, weights[u][b].w);
            }
    }
}

extern "C" __global__ void __launch_bounds__(kWarps * 32, 2)
    lora_shrink(const LayerArgs* layer, const LoraGroup* groups, const int* num_groups, const bf16* tokens, bf16* h,
                int num_experts, int k_steps, int rows, int max_rank) {
    __shared__ float partial[kWarps][RANK_BLOCKS][kTokens][8];
    grid_dependency_wait();
    grid_dependency_launch();
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int max_blocks = max_rank / 8;
    const int chunks = ceil_div(max_blocks, RANK_BLOCKS);
    const int64_t a_block = int64_t(k_steps) * kRankBlockBytes;
    const int64_t expert_bytes = a_block * max_blocks * PROJECTIONS;
    const int num_items = *num_groups * chunks * PROJECTIONS;
    const Operand operand{tokens, rows};

    for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
        const LoraGroup group = groups[item / (chunks * PROJECTIONS)];
        const int projection = item / chunks % PROJECTIONS;
        const int first_block = item % chunks * RANK_BLOCKS;
        const LoraEntry& entry = layer->lora[group.slot * num_experts + group.expert];
        const int rank = PROJECTIONS == 2 ? entry.rank[projection] : entry.rank[2];
        const float scaling = PROJECTIONS == 2 ? entry.scaling[projection] : entry.scaling[2];
        const int live_blocks = ceil_div(rank, 8) - first_block;
        if (live_blocks <= 0) continue;
        const int source = PROJECTIONS == 2 && (entry.shared_a >> projection & 1) ? 0 : group.expert;
        const uint8_t* a = (PROJECTIONS == 2 ? layer->lora_a_gate_up : layer->lora_a_down) +
                           (int64_t(group.slot) * num_experts + source) * expert_bytes +
                           (projection * max_blocks + first_block) * a_block;
        for (int row = 0; row < group.num_rows; row += kTokens) {
            const int num_rows = min(kTokens, group.num_rows - row);
            float acc[RANK_BLOCKS][4] = {};
            accumulate(acc, operand, group.first_row + row, num_rows, a, a_block, live_blocks, k_steps);
#pragma unroll
            for (int b = 0; b < RANK_BLOCKS; ++b)
#pragma unroll
                for (int i = 0; i < 4; ++i) partial[warp][b][lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = acc[b][i];
            __syncthreads();
            for (int i = threadIdx.x; i < RANK_BLOCKS * kTokens * 8; i += kWarps * 32) {
                const int b = i / (kTokens * 8);
                const int token = i / 8 % kTokens;
                float sum = 0.0f;
#pragma unroll
                for (int w = 0; w < kWarps; ++w) sum += partial[w][b][token][i % 8];
                if (token < num_rows && b < live_blocks)
                    h[int64_t(group.first_row + row + token) * (PROJECTIONS * max_rank) + projection * max_rank +
                      (first_block + b) * 8 + i % 8] = to_bf16(sum * scaling);
            }
            __syncthreads();
        }
    }
}
