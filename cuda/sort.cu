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
        const int total = write_tiles(rows, tile_rows, false, tiles, num_tiles, [&](int expert, int mine, int groups) {
            to_come.write(rows, expert, mine, groups);
        });
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
