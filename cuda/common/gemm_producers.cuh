// The producing warps of the grouped GEMM: one brings weights and tokens, one the adapters' B and h.
#pragma once

#include "common/gemm_block.cuh"

// One adapter group of a tile; each lane of the producer holds one.
struct GroupSource {
    const uint8_t* b = nullptr;  // this row tile's fragments of the first block of ranks
    int first_row = 0;           // within the tile
    int last_row = 0;
    int rank_blocks = 0;

    GroupSource() = default;
    __device__ __forceinline__ GroupSource(const Gemm& gemm, const TokenTile& tile, int row_tile, int index) {
        if (index >= tile.groups >> 16) return;
        const LoraGroup group = gemm.groups[(tile.groups & 0xffff) + index];
        const LoraEntry entry = gemm.layer->lora[group.slot * gemm.num_experts + group.expert];
        first_row = max(group.first_row - tile.first_row, 0);
        last_row = min(group.first_row + group.num_rows - tile.first_row, tile.num_rows);
        const int rank = IS_DOWN ? entry.rank[2] : max(entry.rank[0], entry.rank[1]);
        rank_blocks = first_row < last_row ? ceil_div(rank, kRankBlock) : 0;
        const int source = IS_DOWN && entry.shared_b ? 0 : group.expert;
        const int64_t fragments = int64_t(gemm.row_tiles) * kTileFragmentBytes;
        b = (IS_DOWN ? gemm.layer->lora_b_down : gemm.layer->lora_b_gate_up) +
            (int64_t(group.slot) * gemm.num_experts + source) * fragments * (gemm.max_rank / kRankBlock) +
            int64_t(row_tile) * kTileFragmentBytes;
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

struct Source {
    const uint8_t* weights;
    const uint8_t* tokens;
    uint32_t token_bytes;

    __device__ __forceinline__ Source(const Gemm& gemm, const Memory& memory, int item) {
        const TokenTile tile = tile_of(gemm, memory, item);
        const int row_tile = item % gemm.row_tiles;
        weights = gemm.weights + (int64_t(tile.expert) * gemm.k_blocks * gemm.row_tiles + row_tile) * kWeightBytes;
        tokens = gemm.tokens + int64_t(tile.first_row) * kBlockBytes;
        token_bytes = DIRECT ? 0 : round_up(tile.num_rows, kRowAlign) * kBlockBytes;
    }
};

// One thread that keeps the ring of K-blocks full.
struct Producer {
    const Gemm& gemm;
    const Memory& memory;
    Cursor<STAGES> cursor;
    Cursor<2> announcement;
    const uint64_t policy = evict_first_policy();

    __device__ __forceinline__ void load_weights(const Source& source, int item, int block, int stage) {
        uint64_t* full = &memory.ring.barriers.full[stage];
        memory.ring.item[stage] = item;
        barrier_expect(full, kWeightBytes + source.token_bytes);
        bulk_load(memory.stages + stage * kStageBytes, source.weights + int64_t(block) * gemm.row_tiles * kWeightBytes,
                  kWeightBytes, full, policy);
    }
    __device__ __forceinline__ void load_tokens(const Source& source, int block, int stage) {
        if (DIRECT) return;
        bulk_load(memory.stages + stage * kStageBytes + kWeightBytes,
                  source.tokens + int64_t(block) * gemm.rows * kBlockBytes, source.token_bytes,
                  &memory.ring.barriers.full[stage], policy);
    }
    // Weights do not depend on the kernels before: a first ring of them is under way while those finish. With LORA the
    // kernel before is the shrink, which had the tokens itself: only the adapters' warp must wait for its end.
    __device__ __forceinline__ int start(const Source& source, int item) {
        if (DIRECT) return 0;
        const int blocks = min(STAGES, gemm.k_blocks);
        for (int block = 0; block < blocks; ++block) load_weights(source, item, block, block);
        if (!LORA) grid_dependency_wait();
        for (int block = 0; block < blocks; ++block) load_tokens(source, block, block);
        cursor.advance(blocks);
        return blocks;
    }
    __device__ __forceinline__ void load(const Source& source, int item, int first, int last) {
        for (int block = first; block < last; ++block) {
            barrier_wait(&memory.ring.barriers.empty[cursor.stage], cursor.parity ^ 1);
            load_weights(source, item, block, cursor.stage);
            load_tokens(source, block, cursor.stage);
            cursor.advance();
        }
    }
    __device__ __forceinline__ void announce(int item) {
#if LORA
        barrier_wait(&memory.lora.noted[announcement.stage], announcement.parity ^ 1);
        memory.lora.item[announcement.stage] = item;
        barrier_arrive(&memory.lora.announced[announcement.stage]);
        announcement.advance();
#endif
    }
    // Waits for the kernels before. The next one may read early what they made: DIRECT lets it start only now.
    __device__ __forceinline__ void depend() {
        grid_dependency_wait();
        if (DIRECT) grid_dependency_launch();
    }
    __device__ __forceinline__ void run() {
        int item = blockIdx.x;
        if (item < gemm.num_items) {
            announce(item);
            Source source(gemm, memory, item);
            int block = start(source, item);
            if (DIRECT) {
                // The tickets are the sort's: by the time that half a tile is under way it has ended.
                block = gemm.k_blocks / 2;
                load(source, item, 0, block);
                depend();
            }
            while (true) {
                // The next ticket and tile are fetched while this tile's blocks are being issued.
                const int next = gridDim.x + atomicAdd(gemm.ticket, 1);
                const int half = max(block, gemm.k_blocks / 2);
                load(source, item, block, half);
                const Source upcoming(gemm, memory, min(next, gemm.num_items - 1));
                load(source, item, half, gemm.k_blocks);
                if (next >= gemm.num_items) break;
                announce(next);
                item = next;
                source = upcoming;
                block = 0;
            }
        } else {
            depend();
        }
        announce(kNoItem);
        barrier_wait(&memory.ring.barriers.empty[cursor.stage], cursor.parity ^ 1);
        memory.ring.item[cursor.stage] = kNoItem;
        barrier_arrive(&memory.ring.barriers.full[cursor.stage]);
    }
};

// The warp that brings the adapters' part of each announced item; its lanes go together.
struct LoraProducer {
    const Gemm& gemm;
    const Memory& memory;
    Cursor<2> cursor;
    Cursor<2> announcement;
    const uint64_t policy = evict_first_policy();
    const int lane = threadIdx.x % 32;

    __device__ __forceinline__ int next_item() {
        LoraRing& lora = memory.lora;
        barrier_wait(&lora.announced[announcement.stage], announcement.parity);
        const int item = lora.item[announcement.stage];
        __syncwarp();
        if (lane == 0) barrier_arrive(&lora.noted[announcement.stage]);
        announcement.advance();
        return item;
    }
    // Entries of one stage: a lane an entry of B, a lane a block of h. None: the tile's end alone.
    __device__ __forceinline__ void load_stage(const TokenTile& tile, const GroupSource& mine, int block,
                                               int num_entries, int first_h_block, int h_blocks, bool last) {
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
        if (lane == 0) barrier_expect(full, num_entries * kTileFragmentBytes + h_blocks * padded_rows * kHTokenBytes);
        __syncwarp();
        uint8_t* target = memory.lora_stages + stage * kLoraStageBytes;
        if (lane < num_entries)
            bulk_load(target + lane * kTileFragmentBytes, mine.b + int64_t(block) * gemm.row_tiles * kTileFragmentBytes,
                      kTileFragmentBytes, full, policy);
        if (lane < h_blocks)
            bulk_load(target + kEntries * kTileFragmentBytes + lane * padded_rows * kHTokenBytes,
                      gemm.h + h_offset(first_h_block + lane, tile.first_row, 0, gemm.rows, kProjections),
                      padded_rows * kHTokenBytes, full, policy);
        cursor.advance();
    }
    // Entries are the (group, block of ranks) pairs whose block lies in one chunk of kHBlocks, numbered group by group.
    __device__ __forceinline__ void load_tile(const TokenTile& tile, int row_tile) {
        const int num_groups = tile.groups >> 16;
        for (int batch = 0; batch < num_groups; batch += 32) {
            const GroupSource group(gemm, tile, row_tile, batch + lane);
            const int most = __reduce_max_sync(~0u, group.rank_blocks);
            for (int first = 0; first < most; first += kHBlocks) {
                const int mine = min(max(group.rank_blocks - first, 0), kHBlocks);
                int end = mine;
#pragma unroll
                for (int step = 1; step < 32; step *= 2) {
                    const int lower = __shfl_up_sync(~0u, end, step);
                    if (lane >= step) end += lower;
                }
                const int total = __shfl_sync(~0u, end, 31);
                for (int entry = 0; entry < total; entry += kEntries) {
                    // This lane's entry belongs to the first group that ends beyond it.
                    int owner = 0;
                    for (int other = 0; other < min(num_groups - batch, 32) - 1; ++other)
                        owner += __shfl_sync(~0u, end, other) <= entry + lane;
                    const int block = first + entry + lane - __shfl_sync(~0u, end - mine, owner);
                    const bool last = batch + 32 >= num_groups && first + kHBlocks >= most && entry + kEntries >= total;
                    load_stage(tile, group.of_lane(owner), block, min(kEntries, total - entry), first,
                               min(most - first, kHBlocks), last);
                }
            }
            if (most == 0 && batch + 32 >= num_groups) load_stage(tile, group, 0, 0, 0, 0, true);
        }
        if (num_groups == 0) load_stage(tile, GroupSource{}, 0, 0, 0, 0, true);
    }
    __device__ __forceinline__ void run() {
        grid_dependency_wait();
        for (int item = next_item(); item != kNoItem; item = next_item())
            load_tile(gemm.tiles[item / gemm.row_tiles], item % gemm.row_tiles);
    }
};
