// The producing thread of the grouped GEMM, which brings weights and tokens, across tiles and across both products.
#pragma once

#include "common/gemm_block.cuh"

constexpr uint32_t kHalfBytes = MAX_N * kBlockBytes;  // of the first half of a tile's tokens

// Where the K-blocks of one item come from.
struct Source {
    const uint8_t* weights;
    const uint8_t* tokens;
    const int* pending;    // what must be zero before `tokens` may be read; null where they are older than the kernel
    int weight_stride;     // bytes from one K-block to the next
    int token_stride;      //
    uint32_t token_bytes;  // of a K-block; none where all hidden states are in shared memory, or are gathered
    int k_blocks;
    int stages;       // that its K-blocks take
    bool two_stages;  // a K-block takes: weights of two row tiles, or of one, and tokens of one half, or of two
    bool two_row_tiles;
    bool two_halves;

    __device__ __forceinline__ bool halved() const { return HALVES == 2 && two_halves; }
    // The K-block that stage number `index` holds, and of which row tile. `kHalved` as `two_halves`.
    template <bool kHalved>
    __device__ __forceinline__ int block(int index) const {
        if (!kGathers) return index;
        return kHalved || two_stages ? index / 2 : index - row_tile<false>(index) * k_blocks;
    }
    template <bool kHalved>
    __device__ __forceinline__ int row_tile(int index) const {
        if (!kGathers) return 0;
        if (kHalved) return index % 2 & two_row_tiles;
        return two_stages ? index % 2 : index >= k_blocks;
    }
    template <bool kHalved>
    __device__ __forceinline__ bool has_weights(int index) const {
        return !kHalved || index % 2 == 0 || two_row_tiles;
    }
    template <bool kHalved>
    __device__ __forceinline__ bool has_tokens(int index) const {
        return !kGathers || kHalved || !two_stages || index % 2 == 0;
    }
    template <bool kHalved>
    __device__ __forceinline__ int64_t weight_offset(int index) const {
        return int64_t(block<kHalved>(index)) * weight_stride + row_tile<kHalved>(index) * kWeightBytes;
    }
    template <bool kHalved>
    __device__ __forceinline__ int64_t token_offset(int index) const {
        return int64_t(block<kHalved>(index)) * token_stride + (kHalved ? index % 2 * kHalfBytes : 0);
    }
    // Of those that are copied, not gathered.
    template <bool kHalved>
    __device__ __forceinline__ uint32_t token_bytes_of(int index) const {
        if (!kHalved) return token_bytes;
        return index % 2 ? max(token_bytes, kHalfBytes) - kHalfBytes : min(token_bytes, kHalfBytes);
    }
};

__device__ __forceinline__ Source source_of(const Gemm& gemm, const TokenTile& tile, const Place& place) {
    const bool whole = gemm.tokens && !gemm.place_tokens;
    const int64_t before = int64_t(tile.expert) * gemm.k_blocks * gemm.row_tiles + place.row_tile;
    const bool two_row_tiles = place.row_tiles == 2;
    const bool two_halves = HALVES == 2 && tile.num_rows > MAX_N;
    const bool two_stages = two_halves || (two_row_tiles && tile.num_rows <= kPairWidth);
    return Source{gemm.weights + before * kWeightBytes,
                  gemm.tokens + (whole ? int64_t(tile.first_row) * kBlockBytes : 0),
                  gemm.pending_tokens(tile.expert),
                  gemm.row_tiles * kWeightBytes,
                  whole ? gemm.rows * kBlockBytes : kBlockBytes,
                  whole ? uint32_t(round_up(tile.num_rows, kRowAlign) * kBlockBytes) : 0,
                  gemm.k_blocks,
                  gemm.k_blocks * (two_stages ? 2 : place.row_tiles),
                  two_stages,
                  two_row_tiles,
                  two_halves};
}
__device__ __forceinline__ Source source_of(const Gemm& gemm, const Memory& memory, int item) {
    const Place place = place_of(gemm, item);
    return source_of(gemm, tile_of(gemm, memory, place), place);
}

// One thread that keeps the ring of K-blocks full. `Work` is a Gemm or several of them under one ticket.
template <typename Work>
struct Producer {
    const Work& work;
    const Memory& memory;
    const bool early = LORA && !kBoth;  // the kernel before is a shrink, which had the tokens itself
    Cursor<STAGES> cursor;
    Cursor<2> told;
    Cursor<2> told_lora;
    bool all_there = false;  // the tokens of all items
    bool tells_gatherer = false;
    const uint64_t policy = evict_first_policy();

    // Of stage number `index` of an item.
    template <bool kHalved>
    __device__ __forceinline__ void load_weights(const Source& source, int item, int index, int stage) {
        uint64_t* full = &memory.ring.barriers.full[stage];
        const uint32_t weight_bytes = source.template has_weights<kHalved>(index) ? kWeightBytes : 0;
        memory.ring.item[stage] = item;
        barrier_expect(full, weight_bytes + source.template token_bytes_of<kHalved>(index));
        if (weight_bytes > 0)
            bulk_load(memory.stages + stage * kStageBytes,
                      source.weights + source.template weight_offset<kHalved>(index), kWeightBytes, full, policy);
    }
    __device__ __forceinline__ void load_weights(const Source& source, int item, int index, int stage) {
        if (source.halved())
            load_weights<true>(source, item, index, stage);
        else
            load_weights<false>(source, item, index, stage);
    }
    // The tokens beside them, unless those are gathered; what a stage lacks of the arrivals of those that gather.
    template <bool kHalved>
    __device__ __forceinline__ void load_tokens(const Source& source, int index, int stage) {
        uint64_t* full = &memory.ring.barriers.full[stage];
        if (source.token_bytes == 0) {
            if (!source.template has_tokens<kHalved>(index)) barrier_arrive(full, kGatherThreads);
            return;
        }
        bulk_load(memory.stages + stage * kStageBytes + kWeightBytes,
                  source.tokens + source.template token_offset<kHalved>(index),
                  source.template token_bytes_of<kHalved>(index), full, policy);
        if (kGathers) barrier_arrive(full, kGatherThreads);
    }
    __device__ __forceinline__ void load_tokens(const Source& source, int index, int stage) {
        if (source.halved())
            load_tokens<true>(source, index, stage);
        else
            load_tokens<false>(source, index, stage);
    }
    __device__ __forceinline__ void await_empty() {
        barrier_wait(&memory.ring.barriers.empty[cursor.stage], cursor.parity ^ 1);
    }
    template <bool kHalved>
    __device__ __forceinline__ void load(const Source& source, int item, int first, int last) {
        for (int index = first; index < last; ++index) {
            await_empty();
            load_weights<kHalved>(source, item, index, cursor.stage);
            load_tokens<kHalved>(source, index, cursor.stage);
            cursor.advance();
        }
    }
    __device__ __forceinline__ void load(const Source& source, int item, int first, int last) {
        if (source.halved())
            load<true>(source, item, first, last);
        else
            load<false>(source, item, first, last);
    }
    // Waits for the kernels before, unless only the adapters' warp must. With both products, and with DIRECT, the next
    // one starts only now: it may then read early what those made that were waited for.
    __device__ __forceinline__ void depend() {
        if (!early) grid_dependency_wait();
        if (kBoth || DIRECT) grid_dependency_launch();
    }
    // A first ring of weights, which do not depend on the kernels before, is under way while those finish.
    __device__ __forceinline__ int open(const Source& source) {
        const int stages = min(STAGES, source.stages);
        for (int index = 0; index < stages; ++index) load_weights(source, blockIdx.x, index, index);
        cursor.advance(stages);
        return stages;
    }
    __device__ __forceinline__ int open() {
        return blockIdx.x < work.num_items ? open(source_of(work, memory, blockIdx.x)) : 0;
    }
    // What must be done before the first item goes on like the others.
    __device__ __forceinline__ int start(const Source& source, int item, int opened) {
        if (DIRECT && source.token_bytes == 0) {
            // The tickets are the sort's: by the time that half a tile is under way it has ended.
            const int half = max(opened, source.stages / 2);
            load(source, item, opened, half);
            depend();
            return half;
        }
        depend();
        if (kGathers && source.pending) return begin(source, item, look(source));  // nothing of it was opened
        if (source.pending) await_parts(source.pending);
        for (int index = 0; index < opened; ++index) load_tokens(source, index, index);
        return opened;
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
        const int most = min(STAGES, source.stages);
        Cursor<STAGES> behind = cursor;
        int stages = 0;
        while (outlook.item != 0) {
            outlook = look(source);
            if (stages == most) continue;
            await_empty();
            load_weights(source, item, stages++, cursor.stage);
            cursor.advance();
        }
        all_there = outlook.all == 0;
        await_parts(all_there ? work.all_pending() : source.pending);
        for (int index = 0; index < stages; ++index) {
            load_tokens(source, index, behind.stage);
            behind.advance();
        }
        return stages;
    }
    __device__ __forceinline__ void announce_lora(int item) {
        if (LORA) memory.lora.items.tell(told_lora, item);
    }
    // Tells the other warps which item is next; those that gather, as long as there is something to gather.
    __device__ __forceinline__ void announce(int item) {
        if (tells_gatherer) memory.gather_items.tell(told, item);
        tells_gatherer = tells_gatherer && is_gathered(work, item);
        announce_lora(item);
    }
    // All items; of the first, `index` stages were opened.
    __device__ __forceinline__ void run(int index) {
        int item = blockIdx.x;
        tells_gatherer = is_gathered(work, item);  // those that gather know their first item
        if (item < work.num_items) {
            announce_lora(item);
            Source source = source_of(work, memory, item);
            index = start(source, item, index);
            while (true) {
                // The next ticket and tile are fetched while this tile's blocks are being issued.
                const int next = gridDim.x + atomicAdd(work.ticket, 1);
                const int half = max(index, source.stages / 2);
                load(source, item, index, half);
                // Those that gather look an item up, and are told early. Without them the adapters' warp is told late:
                // it may be waiting for h, and would keep this thread from its weights.
                if (kGathers) announce(next < work.num_items ? next : kNoItem);
                const Source upcoming = source_of(work, memory, min(next, work.num_items - 1));
                const Outlook outlook = look(upcoming);
                load(source, item, half, source.stages);
                if (next >= work.num_items) break;
                item = next;
                if (!kGathers) announce_lora(item);
                source = upcoming;
                index = begin(source, item, outlook);
            }
        } else {
            depend();
            if (kGathers) announce_lora(kNoItem);
        }
        if (!kGathers) announce_lora(kNoItem);
        await_empty();
        memory.ring.item[cursor.stage] = kNoItem;
        barrier_arrive(&memory.ring.barriers.full[cursor.stage], kFullArrivals);
    }
};
