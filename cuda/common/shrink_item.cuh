// What every shrink is asked for, h = scaling * A x, in parts: a group's rows by some blocks of ranks.
//
// K is split among warps in a fixed way and their sums are added in a fixed order, so that a token's h does not depend
// on its neighbours, nor on which kernel makes it. Only live ranks are read.
//
// Compile-time: RANK_BLOCKS, of a part. `kProjections` is 2 for gate and up, 1 for down.
#pragma once

#include "common/barrier.cuh"
#include "common/layer_args.cuh"
#include "common/layout.cuh"
#include "common/lora.cuh"
#include "common/tiles.cuh"

constexpr int kShares = 8;  // of K, each summed by one warp

// The first step of a share of K, of 32 elements each; the end of the share before it.
__device__ __forceinline__ int share_begin(int share, int k_steps) { return k_steps * share / kShares; }

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
        begin = share_begin(share, k_steps);
        end = share_begin(share + 1, k_steps);
    }
};

// The `index`th part of what `group` asks for: there are as many as chunks of ranks and projections.
template <int kProjections>
__device__ __forceinline__ Item read_item(const LayerArgs* layer, const LoraGroup& group, int index, int num_experts,
                                          int k_steps, int max_rank) {
    const int max_blocks = max_rank / kRankBlock;
    const int chunks = ceil_div(max_blocks, RANK_BLOCKS);
    const LoraEntry entry = layer->entry_of(group.slot, group.expert, num_experts);
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
    item.a_block = int64_t(k_steps) * kAStepBytes;
    const int source = kProjections == 2 && (entry.shared_a >> item.projection & 1) ? 0 : group.expert;
    item.a = (kProjections == 2 ? layer->lora_a_gate_up : layer->lora_a_down) +
             (int64_t(group.slot) * num_experts + source) * item.a_block * max_blocks * kProjections +
             (item.projection * max_blocks + item.first_block) * item.a_block;
    return item;
}
