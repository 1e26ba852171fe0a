// The product of the shrink kernels: h = scaling * A x of up to 16 tokens, by the warps of a block.
//
// Tokens are the M operand, eight ranks the N operand.
#pragma once

#ifndef SHRINK_UNROLL
#define SHRINK_UNROLL 2
#define SHRINK_HALVES 2
#endif

#include "common/awaited.cuh"
#include "common/shrink_item.cuh"

constexpr int kShrinkTokens = 16;       // one M tile
constexpr int kUnroll = SHRINK_UNROLL;  // K steps of 32 loaded together
constexpr int kHalves = SHRINK_HALVES;  // of an M tile that hold tokens

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
                                  ? __ldg(reinterpret_cast<const uint4*>(item.a + b * item.a_block +
                                                                         int64_t(step + u) * kAStepBytes + lane * 16))
                                  : uint4{0, 0, 0, 0};
    }
};

// `operand.load(row, step, lane)` gives 16 bytes of a token: K elements 32 * step + 8 * (lane % 4) and on; if it is
// `kAwaited`, some of them may be missing yet.
template <typename Operand>
__device__ __forceinline__ void multiply(float (&acc)[RANK_BLOCKS][4], const Weights& weights, const Operand& operand,
                                         const Item& item, int row, int step) {
    const int lane = threadIdx.x % 32;
    uint4 x[kUnroll][2];
    bool missing;
    do {
        missing = false;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int token = row + lane / 4 + 8 * half;
                x[u][half] = step + u < item.end && token < item.num_rows && half < kHalves
                                 ? operand.load(item.first_row + token, step + u, lane)
                                 : uint4{0, 0, 0, 0};
                if (Operand::kAwaited) missing |= is_missing(x[u][half]);
            }
    } while (missing);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
#pragma unroll
        for (int b = 0; b < RANK_BLOCKS; ++b) mma_m16n8k32(acc[b], x[u][0], x[u][1], weights.value[u][b]);
}

struct PermutedTokens {
    static constexpr bool kAwaited = false;
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
