// The warp of the wide grouped GEMM that brings weights and tokens.
#pragma once

#include "common/wide_lora_producer.cuh"

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
        row_tile = multiplied_row_tile_of(gemm, item, rank);
        weights = gemm.weights + (int64_t(tile.expert) * gemm.k_blocks * gemm.row_tiles + row_tile) * kWeightBytes;
        tokens = gemm.tokens + int64_t(tile.first_row) * kBlockBytes;
        const int padded_rows = round_up(tile.num_rows, kRowAlign);
        const int first_half = round_up(padded_rows / 2, kRowAlign);
        token_bytes = padded_rows * kBlockBytes;
        half_first = rank == 0 ? 0 : first_half * kBlockBytes;
        half_bytes = (rank == 0 ? first_half : padded_rows - first_half) * kBlockBytes;
    }
};

// Its lanes go together; the first one copies.
struct WideProducer {
    const Gemm& gemm;
    const WideMemory& memory;
    Cursor<STAGES> cursor;
    Cursor<kSent> sent;
    Cursor<2> told_items;
    Cursor<2> told_starts;
    const uint64_t weight_policy = evict_first_policy();
    // Tokens are read again for each pair of row tiles; with adapters, smaller tiles are faster for letting them go.
    const uint64_t token_policy = LORA && MAX_N <= 160 ? weight_policy : evict_normal_policy();
    const int lane = threadIdx.x % 32;
    const int rank = cluster_rank();

    __device__ __forceinline__ void load_weights(const WideSource& source, int item, int block, int stage) {
        if (lane != 0) return;
        uint64_t* full = &memory.ring.full[stage];
        memory.ring.item[stage] = item;
        if (block == 0) memory.ring.tile[stage] = source.tile;
        barrier_expect(full, kWeightBytes + source.token_bytes);
        if (LORA) barrier_arrive(full);
        bulk_load(memory.stages + stage * kStageBytes, source.weights + int64_t(block) * gemm.row_tiles * kWeightBytes,
                  kWeightBytes, full, weight_policy);
    }
    __device__ __forceinline__ void load_tokens(const WideSource& source, int block, int stage) {
        if (lane != 0 || source.half_bytes == 0) return;
        bulk_load_to_both(memory.stages + stage * kStageBytes + kWeightBytes + source.half_first,
                          source.tokens + int64_t(block) * gemm.rows * kBlockBytes + source.half_first,
                          source.half_bytes, &memory.ring.full[stage], token_policy);
    }
    __device__ __forceinline__ void wait_for_stage() {
        barrier_wait(&memory.ring.empty[cursor.stage], cursor.parity ^ 1);
    }
    // Weights do not depend on the kernels before: those of the first item are under way, as far as the ring has room
    // behind `passed` stages of the adapters, while those finish.
    __device__ __forceinline__ int start(const WideSource& source, int item, int passed) {
        const int blocks = min(max(STAGES - passed, 0), gemm.k_blocks);
        Cursor<STAGES> ahead = cursor;
        for (int block = 0; block < blocks; ++block) {
            load_weights(source, item, block, ahead.stage);
            ahead.advance();
        }
        grid_dependency_wait();
        for (int block = 0; block < blocks; ++block) {
            load_tokens(source, block, cursor.stage);
            cursor.advance();
        }
        return blocks;
    }
    __device__ __forceinline__ void load(const WideSource& source, int item, int first, int last) {
        for (int block = first; block < last; ++block) {
            wait_for_stage();
            load_weights(source, item, block, cursor.stage);
            load_tokens(source, block, cursor.stage);
            cursor.advance();
        }
    }
    // Has the adapters' warps look an item up, if it has adapters' stages at all.
    __device__ __forceinline__ void announce(const TokenTile& tile, int item) {
        if (LORA && lane == 0 && tile.num_groups() != 0) memory.ring.lora_items.tell(told_items, item);
    }
    // Leaves the ring's next stages to the adapters' warps, as many as the item has; its first 32 groups are the
    // lanes'.
    __device__ __forceinline__ int pass(const WideSource& source, const Groups& group) {
        const int stages = LORA ? lora_stages(gemm, source.tile, source.row_tile, group) : 0;
        if (stages == 0) return 0;
        if (lane == 0) memory.ring.lora_starts.tell(told_starts, 2 * cursor.stage + cursor.parity);
        for (int i = 0; i < stages; ++i) {
            wait_for_stage();
            __syncwarp();
            if (lane == 0) barrier_arrive(&memory.ring.full[cursor.stage]);
            cursor.advance();
        }
        return stages;
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
            if (LORA) group = Groups(gemm, source.tile, source.row_tile, lane);
            announce(source.tile, item);
            int block = start(source, item, pass(source, group));
            while (true) {
                // What comes next is asked for while this tile's blocks are being issued, and never waited for at once.
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
                if (next < gemm.num_items) announce(upcoming, next);
                if (LORA) group = Groups(gemm, upcoming, upcoming_source.row_tile, lane);
                load(source, item, rest, gemm.k_blocks);
                if (next >= gemm.num_items) break;
                item = next;
                source = upcoming_source;
                block = 0;
                pass(source, group);
            }
        } else {
            grid_dependency_wait();
        }
        wait_for_stage();
        if (lane != 0) return;
        if (LORA) memory.ring.lora_items.tell(told_items, kNoItem);
        memory.ring.item[cursor.stage] = kNoItem;
        barrier_arrive(&memory.ring.full[cursor.stage], kFullArrivals);
    }
};
