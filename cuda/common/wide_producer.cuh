// The warp of the wide grouped GEMM that brings weights, tokens, and the adapters' B and h.
#pragma once

#include "common/wide_block.cuh"

// Where one item's operands come from: this block's weights, and its half of the tokens that both blocks get.
struct WideSource {
    TokenTile tile;
    int row_tile;
    const uint8_t* weights;
    const uint8_t* tokens;
    int token_bytes;  // of a K-block of the whole tile
    int half_first;   // bytes before this block's half
    int half_bytes;

    __device__ __forceinline__ WideSource(const Gemm& gemm, const TokenTile& tile, int item, int rank) : tile(tile) {
        row_tile = min(row_tile_of(gemm, item, rank), gemm.row_tiles - 1);
        weights = gemm.weights + (int64_t(tile.expert) * gemm.k_blocks * gemm.row_tiles + row_tile) * kWeightBytes;
        tokens = gemm.tokens + int64_t(tile.first_row) * kBlockBytes;
        const int padded_rows = round_up(tile.num_rows, kRowAlign);
        const int first_half = round_up(padded_rows / 2, kRowAlign);
        token_bytes = padded_rows * kBlockBytes;
        half_first = rank == 0 ? 0 : first_half * kBlockBytes;
        half_bytes = (rank == 0 ? first_half : padded_rows - first_half) * kBlockBytes;
    }
};

using Groups = GroupSource<IS_DOWN>;

// Its lanes go together; the first one copies.
struct WideProducer {
    const Gemm& gemm;
    const WideMemory& memory;
    Cursor<STAGES> cursor;
    Cursor<kSent> sent;
    const uint64_t policy = evict_first_policy();
    const int lane = threadIdx.x % 32;
    const int rank = cluster_rank();

    __device__ __forceinline__ void load_weights(const WideSource& source, int item, int block, int stage) {
        if (lane != 0) return;
        uint64_t* full = &memory.ring.full[stage];
        memory.ring.item[stage] = item;
        if (block == 0) memory.ring.tile[stage] = source.tile;
        barrier_expect(full, kWeightBytes + source.token_bytes);
        bulk_load(memory.stages + stage * kStageBytes, source.weights + int64_t(block) * gemm.row_tiles * kWeightBytes,
                  kWeightBytes, full, policy);
    }
    __device__ __forceinline__ void load_tokens(const WideSource& source, int block, int stage) {
        if (lane != 0 || source.half_bytes == 0) return;
        bulk_load_to_both(memory.stages + stage * kStageBytes + kWeightBytes + source.half_first,
                          source.tokens + int64_t(block) * gemm.rows * kBlockBytes + source.half_first,
                          source.half_bytes, &memory.ring.full[stage], policy);
    }
    // Weights do not depend on the kernels before: a first ring of them is under way while those finish, unless the
    // adapters' part comes first.
    __device__ __forceinline__ int start(const WideSource& source, int item) {
        if (LORA && source.tile.num_groups() != 0) {
            grid_dependency_wait();
            return 0;
        }
        const int blocks = min(STAGES, gemm.k_blocks);
        for (int block = 0; block < blocks; ++block) load_weights(source, item, block, block);
        grid_dependency_wait();
        for (int block = 0; block < blocks; ++block) load_tokens(source, block, block);
        cursor.advance(blocks);
        return blocks;
    }
    __device__ __forceinline__ void wait_for_stage() {
        barrier_wait(&memory.ring.empty[cursor.stage], cursor.parity ^ 1);
    }
    __device__ __forceinline__ void load(const WideSource& source, int item, int first, int last) {
        for (int block = first; block < last; ++block) {
            wait_for_stage();
            load_weights(source, item, block, cursor.stage);
            load_tokens(source, block, cursor.stage);
            cursor.advance();
        }
    }
    // One LoRA stage: lane i < `entries` brings `group`'s block `block` of ranks, B's fragments and h of the group's
    // rows with zeros around them.
    __device__ __forceinline__ void load_entries(const Groups& group, int block, int entries, const TokenTile& tile,
                                                 int item, bool last) {
        wait_for_stage();
        const int stage = cursor.stage;
        uint64_t* full = &memory.ring.full[stage];
        uint8_t* fragments = memory.stages + stage * kStageBytes;
        uint8_t* columns = fragments + kWeightBytes;
        const int num_rows = lane < entries ? group.last_row - group.first_row : 0;
        for (int entry = 0; entry < entries; ++entry) {
            const int first = __shfl_sync(~0u, group.first_row, entry);
            const int end = __shfl_sync(~0u, group.last_row, entry);
            for (int row = lane; row < tile.num_rows; row += 32) {
                if (row >= first && row < end) continue;
#pragma unroll
                for (int p = 0; p < kProjections; ++p)
                    *reinterpret_cast<uint4*>(columns + (entry * kProjections + p) * kColumnBytes + row * kHRowBytes) =
                        uint4{0, 0, 0, 0};
            }
        }
        async_shared_fence();
        const int total_rows = __reduce_add_sync(~0u, num_rows);
        if (lane == 0) {
            memory.ring.item[stage] = item;
            memory.ring.tile[stage] = tile;
            memory.ring.lora[stage] = entries | (last ? kLastLoraStage : 0);
            barrier_expect(full, entries * kTileFragmentBytes + total_rows * kProjections * kHRowBytes);
        }
        __syncwarp();
        if (lane < entries) {
            bulk_load(fragments + lane * kTileFragmentBytes,
                      group.b + int64_t(block) * gemm.row_tiles * kTileFragmentBytes, kTileFragmentBytes, full, policy);
#pragma unroll
            for (int p = 0; p < kProjections; ++p)
                bulk_load(columns + (lane * kProjections + p) * kColumnBytes + group.first_row * kHRowBytes,
                          gemm.h + column_offset(block * kProjections + p, tile.first_row + group.first_row, gemm.rows),
                          num_rows * kHRowBytes, full, policy);
        }
        cursor.advance();
    }
    // The (group, block of ranks) pairs of a tile, group by group; the last stage says so, and may be empty. `group` is
    // this lane's of the first 32.
    __device__ __forceinline__ void load_groups(const WideSource& source, Groups group, int item) {
        const TokenTile& tile = source.tile;
        const int num_groups = tile.num_groups();
        for (int batch = 0; batch < num_groups; batch += 32) {
            if (batch > 0) group = Groups(gemm, tile, source.row_tile, batch + lane);
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
    // The item behind the one under way: the first block of the cluster has a ticket, in its first lane, and the second
    // is told.
    __device__ __forceinline__ int send(int ticket) {
        const int next = gridDim.x / kCluster + ticket;
        if (lane == 0) send_int(&memory.ring.next[sent.stage], next, &memory.ring.sent[sent.stage], 1);
        sent.advance();
        return __shfl_sync(~0u, next, 0);
    }
    __device__ __forceinline__ int receive() {
        barrier_wait(&memory.ring.sent[sent.stage], sent.parity);
        const int next = memory.ring.next[sent.stage];
        __syncwarp();
        if (lane == 0) barrier_expect(&memory.ring.sent[sent.stage], sizeof(int));
        sent.advance();
        return next;
    }
    __device__ __forceinline__ void run() {
        int item = blockIdx.x / kCluster;
        if (item < gemm.num_items) {
            WideSource source(gemm, gemm.tiles[item / row_tile_pairs(gemm)], item, rank);
            Groups group;
            int block = start(source, item);
            if (LORA) group = Groups(gemm, source.tile, source.row_tile, lane);
            while (true) {
                // What comes next is asked for while this tile's blocks are being issued, and never waited for at once.
                if (LORA) load_groups(source, group, item);
                const int quarter = max(block, gemm.k_blocks / 4);
                const int half = max(block, gemm.k_blocks / 2);
                const int rest = max(block, 3 * gemm.k_blocks / 4);
                int next = 0;
                if (rank == 0 && lane == 0) next = atomicAdd(gemm.ticket, 1);
                load(source, item, block, quarter);
                if (rank == 0) next = send(next);
                load(source, item, quarter, half);
                if (rank != 0) next = receive();
                const int following = min(next, gemm.num_items - 1);
                const TokenTile upcoming = gemm.tiles[following / row_tile_pairs(gemm)];
                load(source, item, half, rest);
                const WideSource upcoming_source(gemm, upcoming, following, rank);
                if (LORA) group = Groups(gemm, upcoming, upcoming_source.row_tile, lane);
                load(source, item, rest, gemm.k_blocks);
                if (next >= gemm.num_items) break;
                item = next;
                source = upcoming_source;
                block = 0;
            }
        } else {
            grid_dependency_wait();
        }
        wait_for_stage();
        if (lane != 0) return;
        memory.ring.item[cursor.stage] = kNoItem;
        barrier_arrive(&memory.ring.full[cursor.stage]);
    }
};
