// The warps of the wide grouped GEMM that fill the adapters' stages of the ring with B and h.
//
// With warps of their own adapters keep no weights waiting.
#pragma once

#include "common/wide_block.cuh"

using Groups = GroupSource<IS_DOWN>;

// Stages that WideLoraProducer::load_groups fills of an item, the same in both blocks of a cluster; the warp's lanes
// have the first 32 groups of the tile. None without groups, else one at least.
__device__ __forceinline__ int lora_stages(const Gemm& gemm, const TokenTile& tile, int row_tile, Groups group) {
    const int num_groups = tile.num_groups();
    if (num_groups == 0) return 0;
    int stages = 0;
    int blocks = 0;
    for (int batch = 0; batch < num_groups; batch += 32) {
        if (batch > 0) group = Groups(gemm, tile, row_tile, batch + threadIdx.x % 32);
        blocks = __reduce_add_sync(~0u, group.rank_blocks);
        stages += ceil_div(blocks, kLoraBlocks);
    }
    return stages + (blocks == 0);
}

// One of kLoraWarps; its lanes go together. It hears of an item ahead, looks its adapters up, and when it is told where
// their stages begin fills those that are its own. The warp that brings weights passes over them, and none is full
// before it has. Stages of more than a round of the ring are all the first warp's: one that leaves stages out knows of
// their release in the round before by the order alone in which the consumers' arrivals come from the other block.
struct WideLoraProducer {
    const Gemm& gemm;
    const WideMemory& memory;
    Cursor<STAGES> cursor;
    Cursor<2> heard_items;
    Cursor<2> heard_starts;
    int reached = -1;   // which of the item's stages the cursor stands at; -1 until told where the first one is
    bool waits = true;  // for the kernel before, which made h
    const uint64_t policy = evict_first_policy();
    const int lane = threadIdx.x % 32;
    const int warp = (threadIdx.x - kConsumers) / 32 - 1;
    const int rank = cluster_rank();

    // How many rows the pair of steps of this lane's entry is multiplied over: up to the last row of its groups, and
    // all for the `first` pair of a tile, with which the sums begin.
    __device__ __forceinline__ int rows_of(const Groups& group, int entries, int num_rows, bool first) const {
        int rows = lane < entries ? group.last_row : 0;
#pragma unroll
        for (int i = 1; i < 2 * kStepBlocks; i *= 2) rows = max(rows, __shfl_xor_sync(~0u, rows, i));
        return first && lane < 2 * kStepBlocks ? num_rows : rows;
    }
    // Goes to stage number `stage` of the item at hand, of which it fills the first one only when it is told to begin.
    __device__ __forceinline__ void reach(int stage) {
        if (reached < 0) {
            const int start = memory.ring.lora_starts.hear(heard_starts);
            cursor = Cursor<STAGES>{start / 2, uint32_t(start % 2)};
            reached = 0;
        }
        cursor.advance(stage - reached);
        reached = stage;
        barrier_wait(&memory.ring.empty[cursor.stage], cursor.parity ^ 1);
    }
    // Stage number `stage`: lane i < `entries` brings `group`'s block `block` of ranks, B's fragments and h of the
    // group's rows. All lanes clear the rows of other groups while those copies are under way.
    __device__ __forceinline__ void load_stage(int stage, const Groups& group, int block, int entries,
                                               const TokenTile& tile, int item, bool last) {
        const bool mine = lane < entries;
        const int h_bytes = mine ? (group.last_row - group.first_row) * kHRowBytes : 0;
        const int bytes = entries * kTileFragmentBytes + kProjections * __reduce_add_sync(~0u, h_bytes);
        const int rows = rows_of(group, entries, tile.num_rows, stage == 0);
        reach(stage);
        uint64_t* full = &memory.ring.full[cursor.stage];
        uint8_t* fragments = memory.stages + cursor.stage * kStageBytes;
        uint8_t* columns = fragments + kWeightBytes;
        if (lane == 0) barrier_expect_more(full, bytes);
        __syncwarp();
        if (mine)
            bulk_load(fragments + lane * kTileFragmentBytes,
                      group.b + int64_t(block) * gemm.row_tiles * kTileFragmentBytes, kTileFragmentBytes, full, policy);
        if (waits) grid_dependency_wait();
        waits = false;
        if (mine) {
#pragma unroll
            for (int p = 0; p < kProjections; ++p)
                bulk_load(columns + (lane * kProjections + p) * kColumnBytes + group.first_row * kHRowBytes,
                          gemm.h + column_offset(block * kProjections + p, tile.first_row + group.first_row, gemm.rows),
                          h_bytes, full, policy);
        }
#pragma unroll 1
        for (int entry = 0; entry < entries; ++entry)
            clear_others(columns + entry * kProjections * kColumnBytes, __shfl_sync(~0u, group.first_row, entry),
                         __shfl_sync(~0u, group.last_row, entry),
                         min(round_up(__shfl_sync(~0u, rows, entry), kHalfWidth), tile.num_rows));
        const int later_rows = __shfl_sync(~0u, rows, 2 * kStepBlocks);
        if (lane == 0) {
            memory.ring.item[cursor.stage] = item;
            memory.ring.tile[cursor.stage] = tile;
            memory.ring.lora[cursor.stage] =
                LoraStage{{int16_t(rows), int16_t(later_rows)}, int16_t(entries), int16_t(last)};
        }
        async_shared_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(full);
    }
    // Zeros for the rows of an entry's columns before `first_row`, and from `last_row` to `end`, by all lanes.
    __device__ __forceinline__ void clear_others(uint8_t* columns, int first_row, int last_row, int end) const {
        if (first_row == 0 && last_row >= end) return;
#pragma unroll
        for (int i = 0; i < MAX_N; i += 32) {
            const int row = i + lane;
            if (row >= end || (row >= first_row && row < last_row)) continue;
#pragma unroll
            for (int p = 0; p < kProjections; ++p)
                *reinterpret_cast<uint4*>(columns + p * kColumnBytes + row * kHRowBytes) = uint4{0, 0, 0, 0};
        }
    }
    // The (group, block of ranks) pairs of a tile, group by group; the last stage says so, and may be empty. `group` is
    // this lane's of the first 32.
    __device__ __forceinline__ void load_groups(const TokenTile& tile, int row_tile, Groups group, int item) {
        const int num_groups = tile.num_groups();
        const int takers = lora_stages(gemm, tile, row_tile, group) <= STAGES ? kLoraWarps : 1;
        int stage = 0;
        for (int batch = 0; batch < num_groups; batch += 32) {
            if (batch > 0) group = Groups(gemm, tile, row_tile, batch + lane);
            const int end = warp_inclusive_scan(group.rank_blocks);
            const int total = __shfl_sync(~0u, end, 31);
            const bool last_batch = batch + 32 >= num_groups;
            for (int entry = 0; entry < total; entry += kLoraBlocks, ++stage) {
                if (stage % takers != warp) continue;
                const int owner = lane_that_has(entry + lane, end, num_groups - batch);
                const int block = entry + lane - __shfl_sync(~0u, end - group.rank_blocks, owner);
                load_stage(stage, group.of_lane(owner), block, min(kLoraBlocks, total - entry), tile, item,
                           last_batch && entry + kLoraBlocks >= total);
            }
            if (total == 0 && last_batch && stage % takers == warp) load_stage(stage, group, 0, 0, tile, item, true);
        }
    }
    __device__ __forceinline__ void run() {
        while (true) {
            const int item = memory.ring.lora_items.hear(heard_items);
            if (item == kNoItem) break;
            const TokenTile tile = gemm.tiles[item / row_tile_pairs(gemm)];
            const int row_tile = multiplied_row_tile_of(gemm, item, rank);
            reached = -1;
            load_groups(tile, row_tile, Groups(gemm, tile, row_tile, lane), item);
            if (reached < 0) memory.ring.lora_starts.hear(heard_starts);
        }
    }
};
