// The warps that shrink beside the product of few tokens: a slot row a part, for rows are known before the sort has
// ended, in the order in which h is needed.
#pragma once

#define SHRINK_UNROLL 4
#define SHRINK_HALVES 1
#include "common/shrink.cuh"
#include "common/shrink_team.cuh"

static_assert(RANK_BLOCKS == 1, "a part takes its blocks of ranks one by one");

// Hidden states where they came, by permuted row.
struct DirectTokens {
    static constexpr bool kAwaited = false;
    const bf16* hidden;  // [tokens, k_blocks * 64]
    const DirectTiles& direct;
    int stride;
    __device__ __forceinline__ uint4 load(int row, int step, int lane) const {
        const int64_t token = direct.row_tokens[row];
        return __ldg(reinterpret_cast<const uint4*>(hidden + token * stride + step * 32 + lane % 4 * 8));
    }
};

// Activations that a token MLP awaits without counts: some may be missing yet.
struct AwaitedTokens {
    static constexpr bool kAwaited = true;
    NearTokens tokens;
    __device__ __forceinline__ AwaitedTokens(const uint8_t* tokens, int rows) : tokens{tokens, rows} {}
    __device__ __forceinline__ uint4 load(int row, int step, int lane) const {
        return load_awaited(tokens.address(row, step, lane));
    }
};

// Activations are `DownTokens`: where those are awaited without counts, so is h.
template <typename DownTokens>
struct DirectShrinkTeam {
    static constexpr bool kCounts = !DownTokens::kAwaited;
    const Mlp& mlp;
    const Memory& memory;
    Partial& partial;
    const bf16* hidden;
    const Routing& routing;
    int max_rows;  // slot rows of the captured shape
    int parts;     // that a row's blocks of ranks are dealt to, of each projection

    // The shares of K that this warp sums go side by side; all of A that fits into registers is under way before the
    // tokens are there.
    template <typename Operand>
    __device__ __forceinline__ void multiply_shares(const Item& item, int k_steps, const Operand& operand,
                                                    const int* awaited) {
        const int warp = team_thread() / 32;
        Item share[kWarpShares] = {item, item};
        Weights ahead[kWarpShares];
#pragma unroll
        for (int s = 0; s < kWarpShares; ++s) share[s].take(warp + s * kShrinkWarps, k_steps);
#pragma unroll
        for (int s = 0; s < kWarpShares; ++s) ahead[s].load(share[s], share[s].begin);
        await_tokens(awaited);
        float acc[kWarpShares][RANK_BLOCKS][4] = {};
        const int steps = ceil_div(k_steps, kShares);
#pragma unroll 1
        for (int step = 0; step < steps; step += kUnroll)
#pragma unroll
            for (int s = 0; s < kWarpShares; ++s) {
                multiply(acc[s], ahead[s], operand, share[s], 0, share[s].begin + step);
                ahead[s].load(share[s], share[s].begin + step + kUnroll);
            }
#pragma unroll
        for (int s = 0; s < kWarpShares; ++s) keep(partial, acc[s], warp + s * kShrinkWarps);
    }

    // One part of a row's product: every `parts`th block of ranks of one projection, from block `first` on.
    template <int kProjections, typename Operand>
    __device__ __forceinline__ void shrink_row(const Gemm& gemm, const LoraGroup& group, int projection, int first,
                                               const Operand& operand) {
        const int k_steps = 2 * gemm.k_blocks;
        const int blocks = gemm.max_rank / kRankBlock;
        const int* awaited = gemm.pending_tokens(group.expert);
        bool wrote = false;
#pragma unroll 1
        for (int block = first; block < blocks; block += parts) {
            const int index = projection * blocks + block;
            const Item item =
                read_item<kProjections>(gemm.layer, group, index, gemm.num_experts, k_steps, gemm.max_rank);
            if (item.written_blocks <= 0) break;
            wrote = true;
            multiply_shares(item, k_steps, operand, block == first ? awaited : nullptr);
            team_sync();
            if (!kCounts) grid_dependency_wait();  // the sort has h missing until then
            write_sums<kProjections>(partial, item, 0, const_cast<bf16*>(gemm.h), gemm.rows, team_thread(),
                                     kShrinkThreads);
            async_writes_fence();
            team_sync();
        }
        if (!kCounts) return;
        grid_dependency_wait();
        finish_part(gemm, group.expert, wrote);
    }

    // All parts of one product, dealt to the blocks in turn.
    template <int kProjections, typename Operand>
    __device__ __forceinline__ void shrink(const Gemm& gemm, const Operand& operand) {
        const int row_parts = kProjections * parts;
#pragma unroll 1
        for (int index = blockIdx.x; index < max_rows * row_parts; index += gridDim.x) {
            const int row = memory.direct.order[index / row_parts];
            if (row == kNoRow) break;
            const int key = memory.direct.keys[row];
            if (key % routing.buckets == 0) continue;
            const LoraGroup group{key / routing.buckets, key % routing.buckets - 1, memory.direct.places[row], 1};
            const int part = index % row_parts;
            shrink_row<kProjections>(gemm, group, part / parts, part % parts, operand);
        }
    }

    __device__ __forceinline__ void run() {
        shrink<2>(mlp.gate_up, DirectTokens{hidden, memory.direct, mlp.gate_up.k_blocks * kBlockK});
        grid_dependency_wait();  // the counts of activations are the sort's
        shrink<1>(mlp.down, DownTokens{mlp.down.tokens, mlp.down.rows});
    }
};
