// Sorts slot rows by (expert, adapter slot) and gathers their hidden states into BlockMajorK.
//
// Every block sorts all slot rows by counting, in shared memory, and places and gathers its own share of them;
// the first block also writes the token tiles, the last one the adapter groups. A row's place depends on the
// input alone, not on timing. Rows without a local expert get place -1 and touch nothing.
#include "common/barrier.cuh"
#include "common/layer_args.cuh"
#include "common/layout.cuh"
#include "common/scan.cuh"
#include "common/tiles.cuh"

constexpr uint16_t kNoKey = 0xffff;
constexpr int kTickets = 2;  // of the two grouped GEMMs that follow

struct Rows {
    int num_rows;        // num_tokens * choices
    int choices;         // top_k + num_shared
    int num_experts;     // local experts, then shared ones
    int buckets;         // adapter slots + 1: bucket 0 is "no adapter"
    uint16_t* keys;      // [num_rows] expert * buckets + bucket
    int* prefix;         // [num_experts, buckets] rows of the expert in earlier buckets
    int* counts;         // [num_experts]
    int* starts;         // [num_experts] first permuted row
    int* warp_sums;      // [32]
};

__device__ __forceinline__ int expert_of(const int* topk_ids, int row, int choices, int top_k, int local_offset,
                                         int num_local) {
    const int choice = row % choices;
    if (choice >= top_k) return num_local + choice - top_k;
    const int expert = topk_ids[row / choices * top_k + choice] - local_offset;
    return expert >= 0 && expert < num_local ? expert : -1;
}

__device__ __forceinline__ void count_rows(const Rows& rows, const int* topk_ids, const int* token_slots, int top_k,
                                           int local_offset, int num_local) {
    for (int i = threadIdx.x; i < rows.num_experts * rows.buckets; i += blockDim.x) rows.prefix[i] = 0;
    __syncthreads();
    for (int row = threadIdx.x; row < rows.num_rows; row += blockDim.x) {
        const int expert = expert_of(topk_ids, row, rows.choices, top_k, local_offset, num_local);
        const int bucket = rows.buckets > 1 ? token_slots[row / rows.choices] + 1 : 0;
        rows.keys[row] = expert < 0 ? kNoKey : uint16_t(expert * rows.buckets + bucket);
        if (expert >= 0) atomicAdd(&rows.prefix[expert * rows.buckets + bucket], 1);
    }
    __syncthreads();
}

// Turns the counts into places: padded starts of the experts, and the buckets' offsets within each.
__device__ __forceinline__ void place_experts(const Rows& rows) {
    const int per_thread = ceil_div(rows.num_experts, blockDim.x);
    const int first = threadIdx.x * per_thread;
    const int last = min(first + per_thread, rows.num_experts);
    int padded = 0;
    for (int expert = first; expert < last; ++expert) {
        int count = 0;
        for (int bucket = 0; bucket < rows.buckets; ++bucket) {
            int& slot = rows.prefix[expert * rows.buckets + bucket];
            const int in_bucket = slot;
            slot = count;
            count += in_bucket;
        }
        rows.counts[expert] = count;
        padded += round_up(count, kRowAlign);
    }
    int total;
    int start = block_exclusive_scan(padded, rows.warp_sums, total);
    for (int expert = first; expert < last; ++expert) {
        rows.starts[expert] = start;
        start += round_up(rows.counts[expert], kRowAlign);
    }
    __syncthreads();
}

__device__ __forceinline__ void write_tiles(const Rows& rows, int tile_rows, TokenTile* tiles, int* num_tiles) {
    const int per_thread = ceil_div(rows.num_experts, blockDim.x);
    const int first = threadIdx.x * per_thread;
    const int last = min(first + per_thread, rows.num_experts);
    int mine = 0;
    for (int expert = first; expert < last; ++expert) mine += ceil_div(rows.counts[expert], tile_rows);
    int total;
    int index = block_exclusive_scan(mine, rows.warp_sums, total);
    for (int expert = first; expert < last; ++expert)
        for (int row = 0; row < rows.counts[expert]; row += tile_rows)
            tiles[index++] =
                TokenTile{expert, rows.starts[expert] + row, min(tile_rows, rows.counts[expert] - row), 0};
    if (threadIdx.x == 0) *num_tiles = total;
}

__device__ __forceinline__ int rows_in_bucket(const Rows& rows, int expert, int bucket) {
    const int* prefix = rows.prefix + expert * rows.buckets;
    return (bucket + 1 < rows.buckets ? prefix[bucket + 1] : rows.counts[expert]) - prefix[bucket];
}

__device__ __forceinline__ void write_groups(const Rows& rows, LoraGroup* groups, int* num_groups) {
    const int pairs = rows.num_experts * (rows.buckets - 1);
    const int per_thread = ceil_div(pairs, blockDim.x);
    const int first = threadIdx.x * per_thread;
    const int last = min(first + per_thread, pairs);
    int mine = 0;
    for (int i = first; i < last; ++i)
        mine += rows_in_bucket(rows, i / (rows.buckets - 1), i % (rows.buckets - 1) + 1) > 0;
    int total;
    int index = block_exclusive_scan(mine, rows.warp_sums, total);
    for (int i = first; i < last; ++i) {
        const int expert = i / (rows.buckets - 1);
        const int slot = i % (rows.buckets - 1);
        const int count = rows_in_bucket(rows, expert, slot + 1);
        if (count == 0) continue;
        const int row = rows.starts[expert] + rows.prefix[expert * rows.buckets + slot + 1];
        groups[index++] = LoraGroup{expert, slot, row, count};
    }
    if (threadIdx.x == 0) *num_groups = total;
}

// Earlier rows of the same key, counted by a warp: the sort is stable.
__device__ __forceinline__ int rank_of(const Rows& rows, int row) {
    const uint16_t key = rows.keys[row];
    int before = 0;
    for (int i = threadIdx.x % 32; i < row; i += 32) before += rows.keys[i] == key;
    return __reduce_add_sync(~0u, before);
}

__device__ __forceinline__ void gather_row(const bf16* hidden, bf16* tokens, int token, int place, int k_blocks,
                                           int padded_rows) {
    const uint4* source = reinterpret_cast<const uint4*>(hidden + int64_t(token) * k_blocks * kBlockK);
    for (int chunk = threadIdx.x % 32; chunk < k_blocks * (kBlockK / kChunk); chunk += 32)
        *reinterpret_cast<uint4*>(tokens + block_major_offset(place, chunk * kChunk, padded_rows)) = source[chunk];
}

extern "C" __global__ void __launch_bounds__(256)
    permute(const LayerArgs* layer, const bf16* hidden, const int* topk_ids, const int* token_slots, int* places,
            int* row_slots, bf16* tokens, TokenTile* tiles, int* num_tiles, LoraGroup* groups, int* num_groups,
            int* tickets, int top_k, int num_shared, int local_offset, int num_local, int num_slots, int k_blocks, int padded_rows,
            int tile_rows, int max_tokens) {
    extern __shared__ __align__(16) uint8_t shared[];
    const int choices = top_k + num_shared;
    const int num_experts = num_local + num_shared;
    const int buckets = num_slots + 1;
    grid_dependency_wait();
    grid_dependency_launch();

    Rows rows;
    rows.choices = choices;
    rows.num_experts = num_experts;
    rows.buckets = buckets;
    rows.num_rows = layer->num_tokens * choices;
    rows.warp_sums = reinterpret_cast<int*>(shared);
    rows.counts = rows.warp_sums + 32;
    rows.starts = rows.counts + num_experts;
    rows.prefix = rows.starts + num_experts;
    rows.keys = reinterpret_cast<uint16_t*>(rows.prefix + num_experts * buckets);
    count_rows(rows, topk_ids, token_slots, top_k, local_offset, num_local);
    place_experts(rows);

    if (blockIdx.x == 0) {
        write_tiles(rows, tile_rows, tiles, num_tiles);
        if (threadIdx.x < kTickets) tickets[threadIdx.x] = 0;
    }
    if (blockIdx.x == gridDim.x - 1 && num_slots > 0) write_groups(rows, groups, num_groups);

    const int warps = blockDim.x / 32;
    for (int row = blockIdx.x * warps + threadIdx.x / 32; row < max_tokens * choices; row += gridDim.x * warps) {
        const bool real = row < rows.num_rows && rows.keys[row] != kNoKey;
        int place = -1;
        if (real) {
            const int key = rows.keys[row];
            place = rows.starts[key / buckets] + rows.prefix[key] + rank_of(rows, row);
            gather_row(hidden, tokens, row / choices, place, k_blocks, padded_rows);
            if (num_slots > 0 && threadIdx.x % 32 == 0) row_slots[place] = key % buckets - 1;
        }
        if (threadIdx.x % 32 == 0) places[row] = place;
    }
}
