// The producing warp of the grouped GEMM that brings weights and tokens, across tiles and across both products.
#pragma once

#include "common/gemm_block.cuh"

// Where the K-blocks of one item come from.
struct Source {
    const uint8_t* weights;
    const uint8_t* tokens;
    const int* pending;    // what must be zero before `tokens` may be read; null where they are older than the kernel
    int weight_stride;     // bytes from one K-block to the next
    int token_stride;      //
    uint32_t token_bytes;  // of a K-block; none where all hidden states are in shared memory
    int k_blocks;
};

__device__ __forceinline__ Source source_of(const Gemm& gemm, const Memory& memory, int item) {
    const TokenTile tile = tile_of(gemm, memory, item);
    const int row_tile = item % gemm.row_tiles;
    return Source{gemm.weights + (int64_t(tile.expert) * gemm.k_blocks * gemm.row_tiles + row_tile) * kWeightBytes,
                  gemm.tokens + int64_t(tile.first_row) * kBlockBytes,
                  gemm.tokens_pending ? gemm.tokens_pending + tile.expert : nullptr,
                  gemm.row_tiles * kWeightBytes,
                  gemm.rows * kBlockBytes,
                  gemm.tokens ? uint32_t(round_up(tile.num_rows, kRowAlign) * kBlockBytes) : 0,
                  gemm.k_blocks};
}

// One thread that keeps the ring of K-blocks full. `Work` is a Gemm or several of them under one ticket.
template <typename Work>
struct Producer {
    const Work& work;
    const Memory& memory;
    const bool early = LORA && !kBoth;  // the kernel before is a shrink, which had the tokens itself
    Cursor<STAGES> cursor;
    Cursor<2> announcement;
    bool all_there = false;  // the tokens of all items
    const uint64_t policy = evict_first_policy();

    __device__ __forceinline__ void load_weights(const Source& source, int item, int block, int stage) {
        uint64_t* full = &memory.ring.barriers.full[stage];
        memory.ring.item[stage] = item;
        barrier_expect(full, kWeightBytes + source.token_bytes);
        bulk_load(memory.stages + stage * kStageBytes, source.weights + int64_t(block) * source.weight_stride,
                  kWeightBytes, full, policy);
    }
    __device__ __forceinline__ void load_tokens(const Source& source, int block, int stage) {
        if (DIRECT && source.token_bytes == 0) return;
        bulk_load(memory.stages + stage * kStageBytes + kWeightBytes,
                  source.tokens + int64_t(block) * source.token_stride, source.token_bytes,
                  &memory.ring.barriers.full[stage], policy);
    }
    __device__ __forceinline__ void await_empty() {
        barrier_wait(&memory.ring.barriers.empty[cursor.stage], cursor.parity ^ 1);
    }
    __device__ __forceinline__ void load(const Source& source, int item, int first, int last) {
        for (int block = first; block < last; ++block) {
            await_empty();
            load_weights(source, item, block, cursor.stage);
            load_tokens(source, block, cursor.stage);
            cursor.advance();
        }
    }
    // Waits for the kernels before, unless only the adapters' warp must. With both products, and with DIRECT, the next
    // one starts only now: it may then read early what those made that were waited for.
    __device__ __forceinline__ void depend() {
        if (!early) grid_dependency_wait();
        if (kBoth || DIRECT) grid_dependency_launch();
    }
    // A first ring of weights, which do not depend on the kernels before, is under way while those finish.
    __device__ __forceinline__ int open() {
        const int item = blockIdx.x;
        if (item >= work.num_items) return 0;
        const Source source = source_of(work, memory, item);
        const int blocks = min(STAGES, source.k_blocks);
        for (int block = 0; block < blocks; ++block) load_weights(source, item, block, block);
        cursor.advance(blocks);
        return blocks;
    }
    // What must be done before the first item goes on like the others.
    __device__ __forceinline__ int start(const Source& source, int item, int blocks) {
        if (DIRECT && source.token_bytes == 0) {
            // The tickets are the sort's: by the time that half a tile is under way it has ended.
            const int half = max(blocks, source.k_blocks / 2);
            load(source, item, blocks, half);
            depend();
            return half;
        }
        depend();
        if (source.pending) await_parts(source.pending);
        for (int block = 0; block < blocks; ++block) load_tokens(source, block, block);
        return blocks;
    }
    // A first look, early enough that `begin` need not wait for it, at what an item's tokens lack.
    struct Outlook {
        int item;
        int all;
    };
    __device__ __forceinline__ Outlook look(const Source& source) const {
        if (!kBoth || !source.pending || all_there) return Outlook{0, 0};
        return Outlook{peek(source.pending), peek(work.all_pending())};
    }
    // What of an item is begun before its tokens are there, if they are not: up to a ring of its weights. Once all
    // tokens are there, none are asked for again: an answer takes longer than to issue a block.
    __device__ __forceinline__ int begin(const Source& source, int item, Outlook outlook) {
        if (!kBoth || !source.pending || all_there) return 0;
        const int most = min(STAGES, source.k_blocks);
        Cursor<STAGES> behind = cursor;
        int blocks = 0;
        while (outlook.item != 0) {
            outlook = look(source);
            if (blocks == most) continue;
            await_empty();
            load_weights(source, item, blocks++, cursor.stage);
            cursor.advance();
        }
        all_there = outlook.all == 0;
        await_parts(all_there ? work.all_pending() : source.pending);
        for (int block = 0; block < blocks; ++block) {
            load_tokens(source, block, behind.stage);
            behind.advance();
        }
        return blocks;
    }
    __device__ __forceinline__ void announce(int item) {
#if LORA
        barrier_wait(&memory.lora.noted[announcement.stage], announcement.parity ^ 1);
        memory.lora.item[announcement.stage] = item;
        barrier_arrive(&memory.lora.announced[announcement.stage]);
        announcement.advance();
#endif
    }
    // All items; `block` is what `open` returned.
    __device__ __forceinline__ void run(int block) {
        int item = blockIdx.x;
        if (item < work.num_items) {
            announce(item);
            Source source = source_of(work, memory, item);
            block = start(source, item, block);
            while (true) {
                // The next ticket and tile are fetched while this tile's blocks are being issued.
                const int next = gridDim.x + atomicAdd(work.ticket, 1);
                const int half = max(block, source.k_blocks / 2);
                load(source, item, block, half);
                const Source upcoming = source_of(work, memory, min(next, work.num_items - 1));
                const Outlook outlook = look(upcoming);
                load(source, item, half, source.k_blocks);
                if (next >= work.num_items) break;
                announce(next);
                item = next;
                source = upcoming;
                block = begin(source, item, outlook);
            }
        } else {
            depend();
        }
        announce(kNoItem);
        await_empty();
        memory.ring.item[cursor.stage] = kNoItem;
        barrier_arrive(&memory.ring.barriers.full[cursor.stage]);
    }
};
