// The warps of an expert MLP that shrink: h of gate and up, and of down as experts' activations become ready.
#pragma once

#include "common/mlp.cuh"
#include "common/shrink.cuh"

static_assert(RANK_BLOCKS == 1, "a part takes its blocks of ranks one by one");

constexpr int kShrinkWarps = kShrinkThreads / 32;

// Hidden states where they came, by permuted row.
struct HiddenTokens {
    const bf16* hidden;  // [tokens, k_blocks * 64]
    const DirectTiles& direct;
    int stride;
    __device__ __forceinline__ uint4 load(int row, int step, int lane) const {
        const int64_t token = direct.row_tokens[row];
        return __ldg(reinterpret_cast<const uint4*>(hidden + token * stride + step * 32 + lane % 4 * 8));
    }
};

// Tokens of at most 2 GiB, BlockMajorK [K/64, rows, 64]: offsets in 32 bits save registers.
struct NearTokens {
    const uint8_t* tokens;
    int rows;
    __device__ __forceinline__ uint4 load(int row, int step, int lane) const {
        const int chunk = step % 2 * 4 + lane % 4;
        const int offset = (step / 2 * rows + row) * kBlockBytes + (chunk ^ (row & 7)) * 16;
        return *reinterpret_cast<const uint4*>(tokens + offset);
    }
};

struct ShrinkTeam {
    const Mlp& mlp;
    const Memory& memory;
    Partial& partial;
    const bf16* hidden;
    const int* num_groups;
    const Routing& routing;
    int max_rows;  // slot rows of the captured shape
    int parts;     // that a group's blocks of ranks are dealt to, of each projection
    const int thread = threadIdx.x - (kThreads - kShrinkThreads);

    __device__ __forceinline__ void sync() const { named_barrier_sync(kShrinkBarrier, kShrinkThreads); }

    // The shares of K that this warp sums go side by side; all of A that fits into registers is under way before the
    // tokens are there.
    template <typename Operand>
    __device__ __forceinline__ void multiply_shares(const Item& item, int k_steps, int row, const Operand& operand,
                                                    const int* tokens_pending) {
        Item share[2] = {item, item};
        Weights ahead[2];
#pragma unroll
        for (int s = 0; s < 2; ++s) share[s].take(thread / 32 + s * kShrinkWarps, k_steps);
#pragma unroll
        for (int s = 0; s < 2; ++s) ahead[s].load(share[s], share[s].begin);
        if (tokens_pending) {
            if (threadIdx.x % 32 == 0) await_parts(tokens_pending);
            __syncwarp();
        }
        float acc[2][RANK_BLOCKS][4] = {};
        const int steps = ceil_div(k_steps, kShares);
#pragma unroll 1
        for (int step = 0; step < steps; step += kUnroll)
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                multiply(acc[s], ahead[s], operand, share[s], row, share[s].begin + step);
                ahead[s].load(share[s], share[s].begin + step + kUnroll);
            }
#pragma unroll
        for (int s = 0; s < 2; ++s) keep(partial, acc[s], thread / 32 + s * kShrinkWarps);
    }

    // One part of a group's product: every `parts`th block of ranks of one projection, from block `first` on.
    template <int kProjections, typename Operand>
    __device__ __forceinline__ void shrink_group(const Gemm& gemm, const LoraGroup& group, int projection, int first,
                                                 const Operand& operand) {
        const int k_steps = 2 * gemm.k_blocks;
        const int blocks = gemm.max_rank / kRankBlock;
        bool wrote = false;
#pragma unroll 1
        for (int block = first; block < blocks; block += parts) {
            const int index = projection * blocks + block;
            Item item = read_item<kProjections>(gemm.layer, group, index, gemm.num_experts, k_steps, gemm.max_rank);
            if (item.written_blocks <= 0) break;
            wrote = true;
#pragma unroll 1
            for (int row = 0; row < (DIRECT ? 1 : item.num_rows); row += kShrinkTokens) {
                const bool waits = gemm.tokens_pending && block == first && row == 0;
                multiply_shares(item, k_steps, row, operand, waits ? gemm.tokens_pending + group.expert : nullptr);
                sync();
                // Read anew rather than kept: registers are short.
                if (!DIRECT)
                    item = read_item<kProjections>(gemm.layer, group, index, gemm.num_experts, k_steps, gemm.max_rank);
                write_sums<kProjections>(partial, item, row, const_cast<bf16*>(gemm.h), gemm.rows, thread,
                                         kShrinkThreads);
                sync();
            }
        }
        grid_dependency_wait();
        if (wrote) {
            async_writes_fence();
            sync();
            if (thread == 0) release_writes();
        }
        if (thread == 0) count_down(const_cast<int*>(gemm.h_pending) + group.expert);
    }

    // All parts of one product, dealt to the blocks in turn.
    template <int kProjections, typename Operand>
    __device__ __forceinline__ void shrink(const Gemm& gemm, const Operand& operand) {
        const int group_parts = kProjections * parts;
#if DIRECT
        // A slot row a group, for rows are known before the sort has ended; in the order in which h is needed.
#pragma unroll 1
        for (int index = blockIdx.x; index < max_rows * group_parts; index += gridDim.x) {
            const int row = memory.direct.order[index / group_parts];
            if (row == kNoRow) break;
            const int key = memory.direct.keys[row];
            if (key % routing.buckets == 0) continue;
            const LoraGroup group{key / routing.buckets, key % routing.buckets - 1, memory.direct.places[row], 1};
#else
        const int items = *num_groups * group_parts;
#pragma unroll 1
        for (int index = blockIdx.x; index < items; index += gridDim.x) {
            const LoraGroup group = gemm.groups[index / group_parts];
#endif
            const int part = index % group_parts;
            shrink_group<kProjections>(gemm, group, part / parts, part % parts, operand);
        }
    }

    __device__ __forceinline__ void run() {
#if DIRECT
        shrink<2>(mlp.gate_up, HiddenTokens{hidden, memory.direct, mlp.gate_up.k_blocks * kBlockK});
        grid_dependency_wait();  // the counts of activations are the sort's
#else
        grid_dependency_wait();
        if (mlp.gate_up.h_pending) shrink<2>(mlp.gate_up, permuted_tokens(mlp.gate_up));
#endif
        shrink<1>(mlp.down, permuted_tokens(mlp.down));
    }

    __device__ __forceinline__ static NearTokens permuted_tokens(const Gemm& gemm) {
        return NearTokens{gemm.tokens, gemm.rows};
    }
};
