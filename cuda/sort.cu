// Sorts slot rows by (expert, adapter slot): their places, the token tiles and the adapter groups.
//
// Every block counts all slot rows in shared memory and places its own share of them; the first block also writes
// the token tiles and resets the GEMMs' tickets and counts, the last one writes the adapter groups. A row's place
// depends on the input alone, not on timing. Rows without a local expert get place -1.
#include "common/barrier.cuh"
#include "common/expected.cuh"
#include "common/layer_args.cuh"

constexpr int kThreads = 512;

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
    const auto [first, last] = dealt_to(threadIdx.x, blockDim.x, rows.num_experts);
    int padded = 0;
    for (int expert = first; expert < last; ++expert) {
        place_buckets(rows, expert);
        padded += round_up(rows.counts[expert], kRowAlign);
    }
    int total;
    int start = block_exclusive_scan(padded, rows.warp_sums, total);
    for (int expert = first; expert < last; ++expert) {
        rows.starts[expert] = start;
        start += round_up(rows.counts[expert], kRowAlign);
    }
    __syncthreads();
}

// Tiles of `tile_rows` rows, the last of an expert with what is left. Returns how many there are.
__device__ __forceinline__ int write_tiles(const Rows& rows, int tile_rows, TokenTile* tiles, int* num_tiles,
                                           const Pending& to_come) {
    const auto [first, last] = dealt_to(threadIdx.x, blockDim.x, rows.num_experts);
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
        to_come.write(rows, expert, ceil_div(rows.counts[expert], tile_rows), num_groups);
    }
    if (threadIdx.x == 0) *num_tiles = total;
    return total;
}

__device__ __forceinline__ void write_groups(const Rows& rows, LoraGroup* groups, int* num_groups) {
    const auto [first, last] = dealt_to(threadIdx.x, blockDim.x, rows.num_experts);
    int mine = 0;
    for (int expert = first; expert < last; ++expert) mine += rows.groups[expert];
    int total;
    int index = block_exclusive_scan(mine, rows.warp_sums, total);
    for (int expert = first; expert < last; ++expert) {
        if (rows.groups[expert] != 0) index = write_groups_of(rows, expert, groups, index);
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
    sort(const LayerArgs* layer, const int* topk_ids, const int* token_slots, int* places, int* place_tokens,
         int* row_slots, TokenTile* tiles, int* num_tiles, LoraGroup* groups, int* num_groups, int* tickets,
         int* pending, int top_k, int num_shared, int local_offset, int num_local, int num_slots, int tile_rows,
         int group_rows, int max_tokens, int tile_parts, int group_parts, int row_parts) {
    extern __shared__ __align__(16) uint8_t shared[];
    constexpr int kWarps = kThreads / 32;
    const int lane = threadIdx.x % 32;
    grid_dependency_wait();
    grid_dependency_launch();

    Rows rows;
    const int choices = top_k + num_shared;
    rows.group_rows = group_rows;
    rows.num_rows = layer->num_tokens * choices;
    rows.max_rows = max_tokens * choices;
    carve(rows, shared, num_local + num_shared, num_slots + 1);
    rows.keys = reinterpret_cast<uint16_t*>(rows.prefix + rows.num_experts * rows.buckets);
    count_rows(rows, Routing{topk_ids, token_slots, top_k, choices, local_offset, num_local, rows.buckets});
    place_experts(rows);

    if (blockIdx.x == 0) {
        const Pending to_come{pending, tile_parts, group_parts, row_parts};
        const int total = write_tiles(rows, tile_rows, tiles, num_tiles, to_come);
        if (threadIdx.x == 0) to_come.write_total(rows, total);
        if (threadIdx.x < kTickets) tickets[threadIdx.x] = 0;
    }
    if (blockIdx.x == gridDim.x - 1 && num_slots > 0) write_groups(rows, groups, num_groups);

    for (int row = blockIdx.x * kWarps + threadIdx.x / 32; row < rows.max_rows; row += gridDim.x * kWarps) {
        int place = -1;
        if (row < rows.num_rows && rows.keys[row] != kNoKey) {
            const int key = rows.keys[row];
            place = rows.starts[key / rows.buckets] + rows.prefix[key] + rank_of(rows, row);
            if (lane == 0) place_tokens[place] = row / choices;
            if (row_slots != nullptr && lane == 0) row_slots[place] = key % rows.buckets - 1;
        }
        if (lane == 0) places[row] = place;
    }
}
