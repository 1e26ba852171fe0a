// Sorts slot rows by (expert, adapter slot): their places, the token tiles and the adapter groups.
//
// Every block counts all slot rows in shared memory and places its own share of them; the first block also writes
// the token tiles and resets the GEMMs' tickets and counts, the last one writes the adapter groups. A row's place
// depends on the input alone, not on timing. Rows without a local expert get place -1.
#include "common/barrier.cuh"
#include "common/layer_args.cuh"
#include "common/layout.cuh"
#include "common/routing.cuh"
#include "common/scan.cuh"
#include "common/tiles.cuh"

constexpr int kThreads = 512;
constexpr int kTickets = 2;  // of the two grouped GEMMs that follow

struct Rows {
    int num_rows;     // num_tokens * choices
    int max_rows;     // of the captured shape
    int num_experts;  // local experts, then shared ones
    int buckets;      // adapter slots + 1: bucket 0 is "no adapter"
    uint16_t* keys;   // [num_rows] expert * buckets + bucket
    int* prefix;      // [num_experts, buckets] rows of the expert in earlier buckets
    int* counts;      // [num_experts]
    int* starts;      // [num_experts] first permuted row
    int* groups;      // [num_experts] adapter groups
    int* warp_sums;   // [32]
};

// What an expert MLP counts down to zero: activations, h of gate and up, and h of down, by expert.
struct Pending {
    int* parts;       // [3, num_experts], and the sum of the first
    int tile_parts;   // row tiles of gate_up
    int group_parts;  // parts of a shrink of one projection for an adapter group,
    int row_parts;    // or for each of its rows
};

__device__ __forceinline__ void count_rows(const Rows& rows, const Routing& routing) {
    constexpr int kBatch = 8;  // keys in flight per thread
    for (int start = 0; start < rows.max_rows; start += kBatch * kThreads) {
        const int first = start + threadIdx.x;
        uint16_t keys[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int row = first + i * kThreads;
            keys[i] = row < rows.max_rows ? routing.key_of(row) : kNoKey;
        }
        if (start == 0) {  // the keys' loads are under way meanwhile
            for (int i = threadIdx.x; i < rows.num_experts * rows.buckets; i += kThreads) rows.prefix[i] = 0;
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int row = first + i * kThreads;
            if (row >= rows.num_rows) break;
            rows.keys[row] = keys[i];
            if (keys[i] != kNoKey) atomicAdd(&rows.prefix[keys[i]], 1);
        }
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
        int groups = 0;
        for (int bucket = 0; bucket < rows.buckets; ++bucket) {
            int& slot = rows.prefix[expert * rows.buckets + bucket];
            const int in_bucket = slot;
            slot = count;
            count += in_bucket;
            groups += bucket > 0 && in_bucket > 0;
        }
        rows.counts[expert] = count;
        rows.groups[expert] = groups;
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

__device__ __forceinline__ int rows_in_bucket(const Rows& rows, int expert, int bucket) {
    const int* prefix = rows.prefix + expert * rows.buckets;
    return (bucket + 1 < rows.buckets ? prefix[bucket + 1] : rows.counts[expert]) - prefix[bucket];
}

__device__ __forceinline__ void write_tiles(const Rows& rows, int tile_rows, TokenTile* tiles, int* num_tiles,
                                            const Pending& pending) {
    const int per_thread = ceil_div(rows.num_experts, blockDim.x);
    const int first = threadIdx.x * per_thread;
    const int last = min(first + per_thread, rows.num_experts);
    int num_mine = 0;
    int groups_mine = 0;
    for (int expert = first; expert < last; ++expert) {
        num_mine += ceil_div(rows.counts[expert], tile_rows);
        groups_mine += rows.groups[expert];
    }
    int total;
    int group = block_exclusive_scan(groups_mine, rows.warp_sums, total);
    int index = block_exclusive_scan(num_mine, rows.warp_sums, total);
    for (int expert = first; expert < last; ++expert) {
        const int num_groups = rows.groups[expert];
        for (int row = 0; row < rows.counts[expert]; row += tile_rows)
            tiles[index++] = TokenTile{expert, rows.starts[expert] + row, min(tile_rows, rows.counts[expert] - row),
                                       group | num_groups << 16};
        group += num_groups;
        const int num_tiles_here = ceil_div(rows.counts[expert], tile_rows);
        pending.parts[expert] = num_tiles_here * pending.tile_parts;
        const int bare = rows.buckets > 1 ? rows.prefix[expert * rows.buckets + 1] : rows.counts[expert];
        const int parts = num_groups * pending.group_parts + (rows.counts[expert] - bare) * pending.row_parts;
        pending.parts[rows.num_experts + expert] = 2 * parts;
        pending.parts[2 * rows.num_experts + expert] = parts;
    }
    if (threadIdx.x == 0) {
        *num_tiles = total;
        pending.parts[3 * rows.num_experts] = total * pending.tile_parts;
    }
}

__device__ __forceinline__ void write_groups(const Rows& rows, LoraGroup* groups, int* num_groups) {
    const int per_thread = ceil_div(rows.num_experts, blockDim.x);
    const int first = threadIdx.x * per_thread;
    const int last = min(first + per_thread, rows.num_experts);
    int mine = 0;
    for (int expert = first; expert < last; ++expert) mine += rows.groups[expert];
    int total;
    int index = block_exclusive_scan(mine, rows.warp_sums, total);
    for (int expert = first; expert < last; ++expert) {
        if (rows.groups[expert] == 0) continue;
        for (int slot = 0; slot < rows.buckets - 1; ++slot) {
            const int count = rows_in_bucket(rows, expert, slot + 1);
            const int row = rows.starts[expert] + rows.prefix[expert * rows.buckets + slot + 1];
            if (count > 0) groups[index++] = LoraGroup{expert, slot, row, count};
        }
    }
    if (threadIdx.x == 0) *num_groups = total;
}

// Earlier rows of the same key, counted by a warp: the sort is stable.
__device__ __forceinline__ int rank_of(const Rows& rows, int row) {
    const uint16_t key = rows.keys[row];
    int before = 0;
#pragma unroll 8
    for (int i = threadIdx.x % 32; i < row; i += 32) before += rows.keys[i] == key;
    return __reduce_add_sync(~0u, before);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    sort(const LayerArgs* layer, const int* topk_ids, const int* token_slots, int* places, int* row_slots,
         TokenTile* tiles, int* num_tiles, LoraGroup* groups, int* num_groups, int* tickets, int* pending, int top_k,
         int num_shared, int local_offset, int num_local, int num_slots, int tile_rows, int max_tokens, int tile_parts,
         int group_parts, int row_parts) {
    extern __shared__ __align__(16) uint8_t shared[];
    constexpr int kWarps = kThreads / 32;
    const int lane = threadIdx.x % 32;
    grid_dependency_wait();
    grid_dependency_launch();

    Rows rows;
    const int choices = top_k + num_shared;
    rows.num_experts = num_local + num_shared;
    rows.buckets = num_slots + 1;
    rows.num_rows = layer->num_tokens * choices;
    rows.max_rows = max_tokens * choices;
    rows.warp_sums = reinterpret_cast<int*>(shared);
    rows.counts = rows.warp_sums + 32;
    rows.starts = rows.counts + rows.num_experts;
    rows.groups = rows.starts + rows.num_experts;
    rows.prefix = rows.groups + rows.num_experts;
    rows.keys = reinterpret_cast<uint16_t*>(rows.prefix + rows.num_experts * rows.buckets);
    count_rows(rows, Routing{topk_ids, token_slots, top_k, choices, local_offset, num_local, rows.buckets});
    place_experts(rows);

    if (blockIdx.x == 0) {
        write_tiles(rows, tile_rows, tiles, num_tiles, Pending{pending, tile_parts, group_parts, row_parts});
        if (threadIdx.x < kTickets) tickets[threadIdx.x] = 0;
    }
    if (blockIdx.x == gridDim.x - 1 && num_slots > 0) write_groups(rows, groups, num_groups);

    for (int row = blockIdx.x * kWarps + threadIdx.x / 32; row < rows.max_rows; row += gridDim.x * kWarps) {
        int place = -1;
        if (row < rows.num_rows && rows.keys[row] != kNoKey) {
            const int key = rows.keys[row];
            place = rows.starts[key / rows.buckets] + rows.prefix[key] + rank_of(rows, row);
            if (num_slots > 0 && lane == 0) row_slots[place] = key % rows.buckets - 1;
        }
        if (lane == 0) places[row] = place;
    }
}
