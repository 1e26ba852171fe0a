// The warp of the wide grouped GEMM that fills the adapters' stages of the ring with B and h.
//
// With a warp of their own they keep no weights waiting.
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

// Its lanes go together. It hears of an item ahead, looks its adapters up, and fills its stages when it is told where
// they begin. The warp that brings weights passes over them, and none is full before it has.
struct WideLoraProducer {
    const Gemm& gemm;
    const WideMemory& memory;
    Cursor<STAGES> cursor;
    Cursor<2> heard_items;
    Cursor<2> heard_starts;
    bool waits = true;  // for the kernel before, which made h
    const uint64_t policy = evict_first_policy();
    const int lane = threadIdx.x % 32;
    const int rank = cluster_rank();

    // Zeros for rows [first, last) of a column, by all lanes.
    __device__ __forceinline__ void clear(uint8_t* column, int first, int last) const {
        for (int row = first + lane; row < last; row += 32)
            *reinterpret_cast<uint4*>(column + row * kHRowBytes) = uint4{0, 0, 0, 0};
    }
    // One stage: lane i < `entries` brings `group`'s block `block` of ranks, B's fragments and h of the group's rows.
    // All clear the rows of other groups while those copies are under way.
    __device__ __forceinline__ void load_entries(const Groups& group, int block, int entries, const TokenTile& tile,
                                                 int item, bool last) {
        const int stage = cursor.stage;
        barrier_wait(&memory.ring.empty[stage], cursor.parity ^ 1);
        uint64_t* full = &memory.ring.full[stage];
        uint8_t* fragments = memory.stages + stage * kStageBytes;
        uint8_t* columns = fragments + kWeightBytes;
        const int h_bytes = lane < entries ? (group.last_row - group.first_row) * kHRowBytes : 0;
        const int bytes = entries * kTileFragmentBytes + kProjections * __reduce_add_sync(~0u, h_bytes);
        if (lane == 0) {
            memory.ring.item[stage] = item;
            memory.ring.tile[stage] = tile;
            memory.ring.lora[stage] = entries | (last ? kLastLoraStage : 0);
            barrier_expect_more(full, bytes);
        }
        __syncwarp();
        if (lane < entries)
            bulk_load(fragments + lane * kTileFragmentBytes,
                      group.b + int64_t(block) * gemm.row_tiles * kTileFragmentBytes, kTileFragmentBytes, full, policy);
        if (waits) grid_dependency_wait();
        waits = false;
        if (lane < entries) {
#pragma unroll
            for (int p = 0; p < kProjections; ++p)
                bulk_load(columns + (lane * kProjections + p) * kColumnBytes + group.first_row * kHRowBytes,
                          gemm.h + column_offset(block * kProjections + p, tile.first_row + group.first_row, gemm.rows),
                          h_bytes, full, policy);
        }
        for (int entry = 0; entry < entries; ++entry) {
            const int first_row = __shfl_sync(~0u, group.first_row, entry);
            const int last_row = __shfl_sync(~0u, group.last_row, entry);
#pragma unroll
            for (int p = 0; p < kProjections; ++p) {
                uint8_t* column = columns + (entry * kProjections + p) * kColumnBytes;
                clear(column, 0, first_row);
                clear(column, last_row, tile.num_rows);
            }
        }
        async_shared_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(full);
        cursor.advance();
    }
    // The (group, block of ranks) pairs of a tile, group by group; the last stage says so, and may be empty. `group` is
    // this lane's of the first 32.
    __device__ __forceinline__ void load_groups(const TokenTile& tile, int row_tile, Groups group, int item) {
        const int num_groups = tile.num_groups();
        for (int batch = 0; batch < num_groups; batch += 32) {
            if (batch > 0) group = Groups(gemm, tile, row_tile, batch + lane);
            const int end = warp_inclusive_scan(group.rank_blocks);
            const int total = __shfl_sync(~0u, end, 31);
            const bool last_batch = batch + 32 >= num_groups;
            for (int entry = 0; entry < total; entry += kLoraBlocks) {
                const int owner = lane_that_has(entry + lane, end, num_groups - batch);
                const int block = entry + lane - __shfl_sync(~0u, end - group.rank_blocks, owner);
                load_entries(group.of_lane(owner), block, min(kLoraBlocks, total - entry), tile, item,
                             last_batch && entry + kLoraBlocks >= total);
            }
            if (total == 0 && last_batch) load_entries(group, 0, 0, tile, item, true);
        }
    }
    __device__ __forceinline__ void run() {
        while (true) {
            const int item = memory.ring.lora_items.hear(heard_items);
            if (item == kNoItem) break;
            const TokenTile tile = gemm.tiles[item / row_tile_pairs(gemm)];
            const int row_tile = stored_row_tile_of(gemm, item, rank);
            const Groups group(gemm, tile, row_tile, lane);
            const int start = memory.ring.lora_starts.hear(heard_starts);
            cursor = Cursor<STAGES>{start / 2, uint32_t(start % 2)};
            load_groups(tile, row_tile, group, item);
        }
    }
};
