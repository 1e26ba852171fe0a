// The sort of many slot rows, behind wide_count: as sort.cu, less the adapter slot of each place, which only a delta
// that is kept apart asks for.
//
// Every block adds up all shares' counts, and those before its own share, which it places row by row, a thread each.
// `balanced`: an expert's token tiles are about equal.
#include "common/barrier.cuh"
#include "common/layer_args.cuh"
#include "common/sorting.cuh"

constexpr int kThreads = 1024;
constexpr int kTableKeys = 4096;  // keys of which each warp can have counts of its own

// `before` gets what earlier shares have of each key, rows.prefix all of it.
__device__ __forceinline__ void add_counts(const Rows& rows, int* before, const uint32_t* counts, int num_keys) {
    for (int i = threadIdx.x; i < num_keys; i += kThreads) {
        rows.prefix[i] = 0;
        before[i] = 0;
    }
    __syncthreads();
    // A thread has two keys side by side, and some of the shares.
    const int pairs = ceil_div(num_keys, 2);
    const int parts = max(kThreads / pairs, 1);
    for (int i = threadIdx.x; i < pairs * parts; i += kThreads) {
        const int pair = i % pairs;
        uint32_t total = 0;
        uint32_t total_high = 0;
        uint32_t earlier = 0;
        uint32_t earlier_high = 0;
#pragma unroll 32
        for (int share = i / pairs; share < gridDim.x; share += parts) {
            const uint32_t both = counts[share * pairs + pair];
            total += both & 0xffff;
            total_high += both >> 16;
            if (share < blockIdx.x) {
                earlier += both & 0xffff;
                earlier_high += both >> 16;
            }
        }
        atomicAdd(&rows.prefix[2 * pair], total);
        atomicAdd(&before[2 * pair], earlier);
        if (2 * pair + 1 < num_keys) {
            atomicAdd(&rows.prefix[2 * pair + 1], total_high);
            atomicAdd(&before[2 * pair + 1], earlier_high);
        }
    }
    __syncthreads();
}

// How many earlier rows have this thread's key, which all threads ask for together; `before` takes note of theirs. In
// `table`, [warps, num_keys], each warp leaves how many of its own have each key; without one the warps take turns.
__device__ __forceinline__ int rank_of(int* before, uint8_t* table, uint16_t key, int num_keys, int num_warps) {
    const int warp = threadIdx.x / 32;
    const uint32_t same = __match_any_sync(~0u, key);
    const int lower = __popc(same & ((1u << threadIdx.x % 32) - 1));
    const bool real = key != kNoKey;
    int rank = lower;
    if (table == nullptr) {
        for (int turn = 0; turn < num_warps; ++turn) {
            if (warp == turn && real) {
                rank += before[key];
                __syncwarp(same);
                if (lower == 0) before[key] += __popc(same);
            }
            __syncthreads();
        }
        return rank;
    }
    for (int i = threadIdx.x; i < ceil_div(num_warps * num_keys, 4); i += kThreads)
        reinterpret_cast<int*>(table)[i] = 0;
    __syncthreads();
    if (real && lower == 0) table[warp * num_keys + key] = __popc(same);
    __syncthreads();
    int sum = real ? before[key] : 0;
    if (real)
        for (int earlier = 0; earlier < warp; ++earlier) sum += table[earlier * num_keys + key];
    __syncthreads();
    if (real && lower == 0) atomicAdd(&before[key], __popc(same));
    __syncthreads();
    return rank + sum;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    wide_sort(const LayerArgs* layer, const int* topk_ids, const int* token_slots, const uint32_t* counts, int* places,
              int* place_tokens, TokenTile* tiles, int* num_tiles, LoraGroup* groups, int* num_groups, int* tickets,
              int top_k, int num_shared, int local_offset, int num_local, int num_slots, int tile_rows, int max_tokens,
              int group_rows, int balanced, int share) {
    extern __shared__ __align__(16) uint8_t shared[];
    const int choices = top_k + num_shared;
    Rows rows;
    carve(rows, shared, num_local + num_shared, num_slots + 1);
    rows.group_rows = group_rows;
    rows.max_rows = max_tokens * choices;
    const int num_keys = rows.num_experts * rows.buckets;
    int* before = rows.prefix + num_keys;
    uint8_t* table = num_keys <= kTableKeys ? reinterpret_cast<uint8_t*>(before + num_keys) : nullptr;
    grid_dependency_wait();
    grid_dependency_launch();
    rows.num_rows = layer->num_tokens * choices;
    add_counts(rows, before, counts, num_keys);
    place_experts(rows);

    if (blockIdx.x == 0) {
        write_tiles(rows, tile_rows, balanced, tiles, num_tiles, [](int, int, int) {});
        if (threadIdx.x < kTickets) tickets[threadIdx.x] = 0;
    }
    if (blockIdx.x == gridDim.x - 1 && num_slots > 0) write_groups(rows, groups, num_groups);

    const Routing routing{topk_ids, token_slots, top_k, choices, local_offset, num_local, rows.buckets};
    const int last = min(int(blockIdx.x + 1) * share, rows.max_rows);
    for (int first = blockIdx.x * share; first < last; first += kThreads) {
        const int row = first + threadIdx.x;
        const bool real = row < min(last, rows.num_rows);
        const uint16_t key = real ? routing.key_of(row) : kNoKey;
        const int rank = rank_of(before, table, key, num_keys, ceil_div(min(last - first, kThreads), 32));
        int place = -1;
        if (key != kNoKey) {
            place = rows.starts[key / rows.buckets] + rows.prefix[key] + rank;
            place_tokens[place] = row / choices;
        }
        if (row < last) places[row] = place;
    }
}
