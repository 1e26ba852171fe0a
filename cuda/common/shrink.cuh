// The product of the shrink kernels: h = scaling * A x of up to 16 tokens, by the warps of a block.
//
// Tokens are the M operand, eight ranks the N operand. K is split among the warps in a fixed way and their sums are
// added in a fixed order, so that a token's h does not depend on its neighbours. Only live ranks are read.
//
// Compile-time: RANK_BLOCKS. `kProjections` is 2 for gate and up side by side, 1 for down.
#pragma once

#ifndef SHRINK_UNROLL
#define SHRINK_UNROLL 2
#define SHRINK_HALVES 2
#endif

#include "common/barrier.cuh"
#include "common/layer_args.cuh"
#include "common/layout.cuh"
#include "common/lora.cuh"
#include "common/tiles.cuh"

constexpr int kShares = 8;                   // of K, each summed by one warp
constexpr int kShrinkTokens = 16;            // one M tile
constexpr int kUnroll = SHRINK_UNROLL;       // K steps of 32 loaded together
constexpr int kHalves = SHRINK_HALVES;       // of an M tile that hold tokens
constexpr int kRankBlockBytes = 8 * 32 * 2;  // eight ranks by 32 of K

// One group's rows and the blocks of ranks that a block of threads takes; a warp's share of K.
struct Item {
    const uint8_t* a;  // its first block of ranks: [K/32, 8, 32] each
    int64_t a_block;   // bytes from one block of ranks to the next
    float scaling;
    int live_blocks;     // of this projection;
    int written_blocks;  // of either: what the other has more of is written as zero
    int first_row;
    int num_rows;
    int projection;
    int first_block;
    int begin;  // steps of 32 elements of K: one of the kShares
    int end;

    __device__ __forceinline__ void take(int share, int k_steps) {
        begin = k_steps * share / kShares;
        end = k_steps * (share + 1) / kShares;
    }
};

// The `index`th part of what `group` asks for: there are as many as chunks of ranks and projections.
template <int kProjections>
__device__ __forceinline__ Item read_item(const LayerArgs* layer, const LoraGroup& group, int index, int num_experts,
                                          int k_steps, int max_rank) {
    const int max_blocks = max_rank / kRankBlock;
    const int chunks = ceil_div(max_blocks, RANK_BLOCKS);
    const LoraEntry entry = layer->lora[group.slot * num_experts + group.expert];
    Item item;
    item.projection = index / chunks;
    item.first_block = index % chunks * RANK_BLOCKS;
    const int rank = kProjections == 1 ? entry.rank[2] : item.projection == 0 ? entry.rank[0] : entry.rank[1];
    item.scaling = kProjections == 1 ? entry.scaling[2] : item.projection == 0 ? entry.scaling[0] : entry.scaling[1];
    item.live_blocks = ceil_div(rank, kRankBlock) - item.first_block;
    item.written_blocks = kProjections == 2 ? ceil_div(max(entry.rank[0], entry.rank[1]), kRankBlock) - item.first_block
                                            : item.live_blocks;
    item.first_row = group.first_row;
    item.num_rows = group.num_rows;
    item.a_block = int64_t(k_steps) * kRankBlockBytes;
    const int source = kProjections == 2 && (entry.shared_a >> item.projection & 1) ? 0 : group.expert;
    item.a = (kProjections == 2 ? layer->lora_a_gate_up : layer->lora_a_down) +
             (int64_t(group.slot) * num_experts + source) * item.a_block * max_blocks * kProjections +
             (item.projection * max_blocks + item.first_block) * item.a_block;
    return item;
}

// kUnroll steps of A, on their way through registers.
struct Weights {
    uint4 value[kUnroll][RANK_BLOCKS];
    __device__ __forceinline__ void load(const Item& item, int step) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
#pragma unroll
            for (int b = 0; b < RANK_BLOCKS; ++b)
                value[u][b] = step + u < item.end && b < item.live_blocks
                                  ? __ldg(reinterpret_cast<const uint4*>(
                                        item.a + b * item.a_block + int64_t(step + u) * kRankBlockBytes + lane * 16))
                                  : uint4{0, 0, 0, 0};
    }
};

// `operand.load(row, step, lane)` gives 16 bytes of a token: K elements 32 * step + 8 * (lane % 4) and on.
template <typename Operand>
__device__ __forceinline__ void multiply(float (&acc)[RANK_BLOCKS][4], const Weights& weights, const Operand& operand,
                                         const Item& item, int row, int step) {
    const int lane = threadIdx.x % 32;
    uint4 x[kUnroll][2];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = row + lane / 4 + 8 * half;
            x[u][half] = step + u < item.end && token < item.num_rows && half < kHalves
                             ? operand.load(item.first_row + token, step + u, lane)
                             : uint4{0, 0, 0, 0};
        }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
#pragma unroll
        for (int b = 0; b < RANK_BLOCKS; ++b) {
            const uint4& a = weights.value[u][b];
            mma_m16n8k16(acc[b], x[u][0].x, x[u][1].x, x[u][0].y, x[u][1].y, a.x, a.y);
            mma_m16n8k16(acc[b], x[u][0].z, x[u][1].z, x[u][0].w, x[u][1].w, a.z, a.w);
        }
}

struct PermutedTokens {
    const bf16* tokens;  // BlockMajorK [K/64, rows, 64]
    int rows;
    __device__ __forceinline__ uint4 load(int row, int step, int lane) const {
        return *reinterpret_cast<const uint4*>(tokens + block_major_offset(row, step * 32 + lane % 4 * 8, rows));
    }
};

// Sums of one M tile over this warp's K range; `ahead` holds the first two batches of A already.
template <typename Operand>
__device__ __forceinline__ void accumulate(float (&acc)[RANK_BLOCKS][4], Weights (&ahead)[2], const Operand& operand,
                                           const Item& item, int row) {
#pragma unroll 1
    for (int step = item.begin; step < item.end; step += 2 * kUnroll)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int here = step + i * kUnroll;
            multiply(acc, ahead[i], operand, item, row, here);
            ahead[i].load(item, here + 2 * kUnroll);
        }
}

// The first two batches of a warp's share of A, on their way.
__device__ __forceinline__ void load_ahead(Weights (&ahead)[2], const Item& item) {
    ahead[0].load(item, item.begin);
    ahead[1].load(item, item.begin + kUnroll);
}

using Partial = float[kShares][RANK_BLOCKS][kShrinkTokens][8];

__device__ __forceinline__ void keep(Partial& partial, const float (&acc)[RANK_BLOCKS][4], int share) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int b = 0; b < RANK_BLOCKS; ++b)
#pragma unroll
        for (int i = 0; i < 4; ++i) partial[share][b][lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = acc[b][i];
}

// Adds the warps' sums of one M tile, which starts at row `row` of the item, and writes h.
template <int kProjections>
__device__ __forceinline__ void write_sums(const Partial& partial, const Item& item, int row, bf16* h, int rows,
                                           int thread, int threads) {
    for (int i = thread; i < RANK_BLOCKS * kShrinkTokens * 8; i += threads) {
        const int b = i / (kShrinkTokens * 8);
        const int token = i / 8 % kShrinkTokens;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kShares; ++w) sum += partial[w][b][token][i % 8];
        if (row + token < item.num_rows && b < item.written_blocks)
            h[h_offset(item.first_block + b, item.first_row + row + token, item.projection, rows, kProjections) +
              i % 8] = to_bf16(sum * item.scaling);
    }
}
