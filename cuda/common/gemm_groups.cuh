// The adapter groups of a token tile, as the warps that bring B and h, or read them, go through them.
#pragma once

#include "common/gemm_args.cuh"
#include "common/lora.cuh"
#include "common/scan.cuh"

constexpr int kTileFragmentBytes = BLOCK_M / 16 * kFragmentBytes;  // a row tile's part of one block of ranks

// One adapter group of a tile; each lane of such a warp holds one.
template <bool kDown>
struct GroupSource {
    const uint8_t* b = nullptr;  // this row tile's fragments of the first block of ranks
    int first_row = 0;           // within the tile
    int last_row = 0;
    int rank_blocks = 0;  // none outside the tile
    int live_blocks = 0;
    int slot = -1;

    GroupSource() = default;
    __device__ __forceinline__ GroupSource(const Gemm& gemm, const TokenTile& tile, int row_tile, int index) {
        if (index < tile.num_groups()) find(gemm, tile, row_tile, gemm.groups[tile.first_group() + index]);
    }
    __device__ __forceinline__ void find(const Gemm& gemm, const TokenTile& tile, int row_tile,
                                         const LoraGroup& group) {
        const LoraEntry entry = gemm.layer->entry_of(group.slot, group.expert, gemm.num_experts);
        first_row = max(group.first_row - tile.first_row, 0);
        last_row = min(group.first_row + group.num_rows - tile.first_row, tile.num_rows);
        const int rank = kDown ? entry.rank[2] : max(entry.rank[0], entry.rank[1]);
        live_blocks = ceil_div(rank, kRankBlock);
        rank_blocks = first_row < last_row ? live_blocks : 0;
        slot = group.slot;
        const int source = kDown && entry.shared_b ? 0 : group.expert;
        const int64_t fragments = int64_t(gemm.row_tiles) * kTileFragmentBytes;
        b = (kDown ? gemm.layer->lora_b_down : gemm.layer->lora_b_gate_up) +
            (int64_t(group.slot) * gemm.num_experts + source) * fragments * (gemm.max_rank / kRankBlock) +
            int64_t(row_tile) * kTileFragmentBytes;
    }
    // Groups of one adapter follow each other: has the first of those that the warp holds stand for all.
    __device__ __forceinline__ void join() {
        const int lane = threadIdx.x % 32;
        const int before = __shfl_up_sync(~0u, slot, 1);
        const bool begins = lane == 0 || slot != before;
        const uint32_t later = __ballot_sync(~0u, begins) >> lane >> 1;
        last_row = __shfl_sync(~0u, last_row, later ? lane + __ffs(later) - 1 : 31);
        rank_blocks = begins && first_row < last_row ? live_blocks : 0;
    }
    __device__ __forceinline__ GroupSource of_lane(int lane) const {
        GroupSource other;
        other.b = reinterpret_cast<const uint8_t*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(b), lane));
        other.first_row = __shfl_sync(~0u, first_row, lane);
        other.last_row = __shfl_sync(~0u, last_row, lane);
        other.rank_blocks = __shfl_sync(~0u, rank_blocks, lane);
        return other;
    }
};
