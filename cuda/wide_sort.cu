// The sort of many slot rows by clusters of blocks: as sort.cu, to which a row's place is the same. `balanced`: an
// expert's token tiles are about equal.
//
// Each cluster ranks all rows, a block a share of them and a warp a run, and places its turn of the chunks of 32. A
// row's rank is how many rows of its key are in earlier blocks, in earlier warps of its own, in earlier chunks of its
// warp, and before it in its own chunk. Each warp counts for itself; where that many counts do not fit, warps take
// turns over one table (`num_tables`). Blocks read each other's sums.
#include "common/barrier.cuh"
#include "common/cluster.cuh"
#include "common/layer_args.cuh"
#include "common/listing.cuh"

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocks = 8;  // of a cluster
constexpr int kBatch = 4;   // chunks of a warp in flight

using Chunks = Batch<kBatch, 32>;

__device__ constexpr int quads_of(int num_keys) { return ceil_div(num_keys, 4); }
// Rows that a warp ranks, whole chunks.
__device__ constexpr int run_of(int max_rows) { return round_up(ceil_div(max_rows, kBlocks * kWarps), 32); }

// By key, four of them side by side: a block has fewer than 65536 rows, for each takes a word of its shared memory.
struct Counts {
    int quads;         // of keys
    int num_tables;    // kWarps, or one
    int* before;       // [4 * quads] rows of earlier blocks
    uint64_t* own;     // [quads] of the block; where there is one table, that
    uint64_t* tables;  // [num_tables, quads] of a warp, and later of the warps before it

    __device__ __forceinline__ uint16_t* table_of(int warp) const {
        return reinterpret_cast<uint16_t*>(tables + (num_tables == 1 ? 0 : warp * quads));
    }
};

// The lanes whose keys are the same; by a vote for each bit of a key, many times as fast as __match_any_sync.
__device__ __forceinline__ uint32_t lanes_with(int key, int key_bits) {
    uint32_t same = ~0u;
#pragma unroll 4
    for (int bit = 0; bit < key_bits; ++bit) {
        const bool set = key >> bit & 1;
        const uint32_t votes = __ballot_sync(~0u, set);
        same &= set ? votes : ~votes;
    }
    return same;
}

// Ranks a warp's rows among those that its table has, and counts them there. `ranked` gets of each its key and above it
// its rank.
__device__ __forceinline__ void rank_rows(const Routing& routing, const Divisor& per_token, Chunks& chunks,
                                          const Range& mine, int num_rows, int key_bits, uint16_t* table,
                                          uint32_t* ranked) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int start = mine.first; start < mine.last; start += chunks.kSpan) {
        Chunks next;
        next.load(routing, per_token, start + chunks.kSpan, lane, mine.last);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int row = start + i * 32 + lane;
            if (start + i * 32 >= mine.last) break;
            const uint16_t key = row < num_rows ? routing.key_of(chunks.choices[i], chunks.routed[i]) : kNoKey;
            const uint32_t same = lanes_with(key, key_bits);
            const int lower = __popc(same & ((1u << lane) - 1));
            const int rank = key == kNoKey ? 0 : table[key] + lower;
            __syncwarp();
            if (key != kNoKey && lower == 0) table[key] = rank + __popc(same);
            __syncwarp();
            ranked[row - mine.first] = key | rank << 16;
        }
        chunks = next;
    }
}

// Each table becomes what those before it have, and `own` what all have.
__device__ __forceinline__ void add_tables(const Counts& counts) {
    for (int quad = threadIdx.x; quad < counts.quads; quad += kThreads) {
        uint64_t held[kWarps];
#pragma unroll
        for (int i = 0; i < kWarps; ++i) held[i] = counts.tables[i * counts.quads + quad];
        uint64_t sum = 0;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) {
            counts.tables[i * counts.quads + quad] = sum;
            sum += held[i];
        }
        counts.own[quad] = sum;
    }
}

// `sums` gets what all blocks have of each key, `before` what those before this one have.
__device__ __forceinline__ void add_blocks(const Counts& counts, int block, int* sums) {
    for (int quad = threadIdx.x; quad < counts.quads; quad += kThreads) {
        uint64_t held[kBlocks];
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) held[i] = load_from(counts.own + quad, i);
        int all[4] = {};
        int earlier[4] = {};
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int count = held[i] >> 16 * j & 0xffff;
                all[j] += count;
                if (i < block) earlier[j] += count;
            }
        }
        reinterpret_cast<int4*>(sums)[quad] = make_int4(all[0], all[1], all[2], all[3]);
        reinterpret_cast<int4*>(counts.before)[quad] = make_int4(earlier[0], earlier[1], earlier[2], earlier[3]);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kBlocks, 1, 1)
    wide_sort(const LayerArgs* layer, const int* topk_ids, const int* token_slots, int* places, int* place_tokens,
              int* row_slots, TokenTile* tiles, int* num_tiles, LoraGroup* groups, int* num_groups, int* tickets,
              int* pending, int top_k, int num_shared, int local_offset, int num_local, int num_slots, int tile_rows,
              int group_rows, int max_tokens, int tile_parts, int group_parts, int row_parts, int balanced,
              uint32_t choices_inverse, uint32_t tile_rows_inverse, uint32_t buckets_inverse, int num_tables,
              int key_bits) {
    extern __shared__ __align__(16) uint8_t shared[];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int block = cluster_rank();
    const int cluster = blockIdx.x / kBlocks;
    const int num_clusters = gridDim.x / kBlocks;
    const int choices = top_k + num_shared;
    grid_dependency_wait();
    grid_dependency_launch();

    const int buckets = num_slots + 1;
    const int max_rows = max_tokens * choices;
    const int run = run_of(max_rows);
    Counts counts;
    counts.quads = quads_of((num_local + num_shared) * buckets);
    counts.num_tables = num_tables;
    int* const prefix = reinterpret_cast<int*>(shared);
    counts.before = prefix + 4 * counts.quads;
    counts.own = reinterpret_cast<uint64_t*>(counts.before + 4 * counts.quads);
    counts.tables = num_tables == 1 ? counts.own : counts.own + counts.quads;
    uint32_t* const ranked_by_block = reinterpret_cast<uint32_t*>(counts.tables + num_tables * counts.quads);
    Rows rows;
    rows.group_rows = group_rows;
    carve(rows, reinterpret_cast<uint8_t*>(ranked_by_block + kWarps * run), num_local + num_shared, buckets);
    const Tiling tiling{Divisor{tile_rows, tile_rows_inverse}, balanced != 0, rows.prefix};
    rows.prefix = prefix;

    const Routing routing{topk_ids, token_slots, top_k, choices, local_offset, num_local, buckets};
    const Divisor per_token{choices, choices_inverse};
    const int first = (block * kWarps + warp) * run;
    const Range mine{first, min(first + run, max_rows)};
    uint32_t* const ranked = ranked_by_block + warp * run;
    Chunks chunks;
    if (mine.first < mine.last) chunks.load(routing, per_token, mine.first, lane, mine.last);
    const int num_rows = layer->num_tokens * choices;
    // The loads are under way meanwhile.
#pragma unroll 1
    for (int i = threadIdx.x; i < num_tables * counts.quads; i += kThreads) counts.tables[i] = 0;
    __syncthreads();
    const int turns = num_tables == 1 ? kWarps : 1;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        if (turns == 1 || turn == warp)
            rank_rows(routing, per_token, chunks, mine, num_rows, key_bits, counts.table_of(warp), ranked);
        __syncthreads();
    }
    if (turns == 1) add_tables(counts);
    cluster_sync();
    add_blocks(counts, block, rows.prefix);
    cluster_arrive();  // who waits for it knows that nobody reads this block's sums any more
    __syncthreads();
    const int listed = begin_experts<kThreads>(rows, tiling);

    if (blockIdx.x == 0) {
        const Pending to_come{pending, tile_parts, group_parts, row_parts};
        list_tiles<kThreads>(rows, tiling, threadIdx.x, tiles, to_come);
        if (threadIdx.x == 0) {
            *num_tiles = listed & 0xffff;
            to_come.write_total(rows, listed & 0xffff);
        }
        if (threadIdx.x < kTickets) tickets[threadIdx.x] = 0;
    }
    if (blockIdx.x == gridDim.x - 1 && num_slots > 0) {
        list_groups<kThreads>(rows, threadIdx.x, groups);
        if (threadIdx.x == 0) *num_groups = listed >> 16;
    }
    const uint16_t* const earlier = num_tables == 1 ? nullptr : counts.table_of(warp);
#pragma unroll 4
    for (int row = mine.first + cluster * 32 + lane; row < mine.last; row += 32 * num_clusters) {
        const uint32_t held = ranked[row - mine.first];
        const int key = held & 0xffff;
        int place = -1;
        if (key != kNoKey) {
            const int expert = Divisor{rows.buckets, buckets_inverse}.divide(key);
            place = rows.starts[expert] + rows.prefix[key] + counts.before[key] + (held >> 16);
            if (earlier != nullptr) place += earlier[key];
            place_tokens[place] = per_token.divide(row);
            if (row_slots != nullptr) row_slots[place] = key - expert * rows.buckets - 1;
        }
        places[row] = place;
    }
    cluster_wait();
}
