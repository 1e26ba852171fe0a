// The producing warp of the grouped GEMM that brings the adapters' B and h.
#pragma once

#include "common/gemm_block.cuh"

// The warp that brings the adapters' part of each announced item; its lanes go together.
template <typename Work>
struct LoraProducer {
    const Work& work;
    const Memory& memory;
    Cursor<2> cursor;
    Cursor<2> heard;
    const uint64_t policy = evict_first_policy();
    const int lane = threadIdx.x % 32;

    // Entries of one stage: a lane an entry of B, a lane a block of h. None: the tile's end alone.
    template <bool kDown>
    __device__ __forceinline__ void load_stage(const Gemm& gemm, const TokenTile& tile, const GroupSource<kDown>& mine,
                                               int block, int num_entries, int first_h_block, int h_blocks, bool last) {
        LoraRing& lora = memory.lora;
        const int stage = cursor.stage;
        const int padded_rows = round_up(tile.num_rows, kRowAlign);
        barrier_wait(&lora.barriers.empty[stage], cursor.parity ^ 1);
        if (lane < num_entries)
            lora.entries[stage][lane] =
                LoraStageEntry{int16_t(mine.first_row), int16_t(mine.last_row), block - first_h_block};
        if (lane == 0) {
            lora.num_entries[stage] = num_entries;
            lora.last[stage] = last;
        }
        __syncwarp();
        uint64_t* full = &lora.barriers.full[stage];
        if (lane == 0)
            barrier_expect(full, num_entries * kTileFragmentBytes + h_blocks * padded_rows * kHTokenBytes<kDown>);
        __syncwarp();
        uint8_t* target = memory.lora_stages + stage * kLoraStageBytes;
        if (lane < num_entries)
            bulk_load(target + lane * kTileFragmentBytes, mine.b + int64_t(block) * gemm.row_tiles * kTileFragmentBytes,
                      kTileFragmentBytes, full, policy);
        if (gemm.h_pending && h_blocks > 0) await_parts(gemm.h_pending + tile.expert);
        if (lane < h_blocks)
            bulk_load(target + kEntries * kTileFragmentBytes + lane * padded_rows * kHTokenBytes<kDown>,
                      gemm.h + h_offset(first_h_block + lane, tile.first_row, 0, gemm.rows, kProjections<kDown>),
                      padded_rows * kHTokenBytes<kDown>, full, policy);
        cursor.advance();
    }
    // Entries are the (group, block of ranks) pairs whose block lies in one chunk of kHBlocks, numbered group by group.
    template <bool kDown>
    __device__ __forceinline__ void load_tile(const Gemm& gemm, const TokenTile& tile, int row_tile) {
        const int num_groups = tile.num_groups();
        for (int batch = 0; batch < num_groups; batch += 32) {
            GroupSource<kDown> group(gemm, tile, row_tile, batch + lane);
            group.join();
            const int most = __reduce_max_sync(~0u, group.rank_blocks);
            for (int first = 0; first < most; first += kHBlocks) {
                const int mine = min(max(group.rank_blocks - first, 0), kHBlocks);
                const int end = warp_inclusive_scan(mine);
                const int total = __shfl_sync(~0u, end, 31);
                for (int entry = 0; entry < total; entry += kEntries) {
                    const int owner = lane_that_has(entry + lane, end, num_groups - batch);
                    const int block = first + entry + lane - __shfl_sync(~0u, end - mine, owner);
                    const bool last = batch + 32 >= num_groups && first + kHBlocks >= most && entry + kEntries >= total;
                    load_stage(gemm, tile, group.of_lane(owner), block, min(kEntries, total - entry), first,
                               min(most - first, kHBlocks), last);
                }
            }
            if (most == 0 && batch + 32 >= num_groups) load_stage(gemm, tile, group, 0, 0, 0, 0, true);
        }
        if (num_groups == 0) load_stage(gemm, tile, GroupSource<kDown>{}, 0, 0, 0, 0, true);
    }
    // All row tiles of an item, one after the other.
    template <bool kDown>
    __device__ __forceinline__ void load_tiles(const Gemm& gemm, int item) {
        const Place place = place_of(gemm, item);
        const TokenTile tile = gemm.tiles[place.tile];
#pragma unroll 1
        for (int i = 0; i < place.row_tiles; ++i) load_tile<kDown>(gemm, tile, place.row_tile + i);
    }
    __device__ __forceinline__ void run() {
        grid_dependency_wait();
        for (int item = memory.lora.items.hear(heard); item != kNoItem; item = memory.lora.items.hear(heard))
            load_item(*this, work, item);
    }
};

template <typename Work>
__device__ __forceinline__ void load_item(LoraProducer<Work>& producer, const Gemm& gemm, int item) {
    producer.template load_tiles<IS_DOWN>(gemm, item);
}
