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
constexpr int kThreads = 256;
constexpr int kTickets = 2;  // of the two grouped GEMMs that follow

struct Rows {
    int num_rows;     // num_tokens * choices
    int max_rows;     // of the captured shape
    int choices;      // top_k + num_shared
    int num_experts;  // local experts, then shared ones
    int buckets;      // adapter slots + 1: bucket 0 is "no adapter"
    uint16_t* keys;   // [num_rows] expert * buckets + bucket
    int* prefix;      // [num_experts, buckets] rows of the expert in earlier buckets
    int* counts;      // [num_experts]
    int* starts;      // [num_experts] first permuted row
    int* warp_sums;   // [32]
};

struct Routing {
    const int* __restrict__ topk_ids;     // [tokens, top_k] global expert ids
    const int* __restrict__ token_slots;  // [tokens] adapter slot or -1
    int top_k;
    int local_offset;
    int num_local;
};

// Sort key of a slot row, kNoKey without a local expert. Reads the routing of padding tokens too, so that no load
// waits for the number of real ones.
__device__ __forceinline__ uint16_t key_of(const Rows& rows, const Routing& routing, int row) {
    const int token = row / rows.choices;
    const int choice = row % rows.choices;
    int expert = routing.num_local + choice - routing.top_k;
    if (choice < routing.top_k) {
        expert = __ldg(routing.topk_ids + token * routing.top_k + choice) - routing.local_offset;
        if (expert < 0 || expert >= routing.num_local) return kNoKey;
    }
    const int bucket = rows.buckets > 1 ? __ldg(routing.token_slots + token) + 1 : 0;
    return uint16_t(expert * rows.buckets + bucket);
}

__device__ __forceinline__ void count_rows(const Rows& rows, const Routing& routing) {
    constexpr int kBatch = 8;  // keys in flight per thread
    for (int start = 0; start < rows.max_rows; start += kBatch * kThreads) {
        const int first = start + threadIdx.x;
        uint16_t keys[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int row = first + i * kThreads;
            keys[i] = row < rows.max_rows ? key_of(rows, routing, row) : kNoKey;
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
            tiles[index++] = TokenTile{expert, rows.starts[expert] + row, min(tile_rows, rows.counts[expert] - row), 0};
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
#pragma unroll 8
    for (int i = threadIdx.x % 32; i < row; i += 32) before += rows.keys[i] == key;
    return __reduce_add_sync(~0u, before);
}

// A warp's share of one token's hidden state, on its way through registers.
struct HiddenRow {
    static constexpr int kHeld = 8;  // 16-byte chunks a lane: 2048 elements a warp
    uint4 chunk[kHeld];

    __device__ __forceinline__ void load(const bf16* hidden, int first, int num_chunks) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const int index = first + i * 32 + threadIdx.x % 32;
            if (index < num_chunks) chunk[i] = __ldg(reinterpret_cast<const uint4*>(hidden) + index);
        }
    }
    __device__ __forceinline__ void store(bf16* tokens, int first, int num_chunks, int place, int padded_rows) const {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const int index = first + i * 32 + threadIdx.x % 32;
            if (index < num_chunks)
                *reinterpret_cast<uint4*>(tokens + block_major_offset(place, index * kChunk, padded_rows)) = chunk[i];
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    permute(const LayerArgs* layer, const bf16* hidden, const int* topk_ids, const int* token_slots, int* places,
            int* row_slots, bf16* tokens, TokenTile* tiles, int* num_tiles, LoraGroup* groups, int* num_groups,
            int* tickets, int top_k, int num_shared, int local_offset, int num_local, int num_slots, int k_blocks,
            int padded_rows, int tile_rows, int max_tokens) {
    extern __shared__ __align__(16) uint8_t shared[];
    constexpr int kWarps = kThreads / 32;
    constexpr int kStride = HiddenRow::kHeld * 32;
    const int lane = threadIdx.x % 32;
    const int num_chunks = k_blocks * (kBlockK / kChunk);
    grid_dependency_wait();
    grid_dependency_launch();

    Rows rows;
    rows.choices = top_k + num_shared;
    rows.num_experts = num_local + num_shared;
    rows.buckets = num_slots + 1;
    // The first row's hidden state is fetched before anything is known of its place.
    const int first_row = blockIdx.x * kWarps + threadIdx.x / 32;
    HiddenRow held;
    held.load(hidden + int64_t(min(first_row / rows.choices, max_tokens - 1)) * k_blocks * kBlockK, 0, num_chunks);
    rows.num_rows = layer->num_tokens * rows.choices;
    rows.max_rows = max_tokens * rows.choices;
    rows.warp_sums = reinterpret_cast<int*>(shared);
    rows.counts = rows.warp_sums + 32;
    rows.starts = rows.counts + rows.num_experts;
    rows.prefix = rows.starts + rows.num_experts;
    rows.keys = reinterpret_cast<uint16_t*>(rows.prefix + rows.num_experts * rows.buckets);
    count_rows(rows, Routing{topk_ids, token_slots, top_k, local_offset, num_local});
    place_experts(rows);

    if (blockIdx.x == 0) {
        write_tiles(rows, tile_rows, tiles, num_tiles);
        if (threadIdx.x < kTickets) tickets[threadIdx.x] = 0;
    }
    if (blockIdx.x == gridDim.x - 1 && num_slots > 0) write_groups(rows, groups, num_groups);

    for (int row = first_row; row < rows.max_rows; row += gridDim.x * kWarps) {
        int place = -1;
        if (row < rows.num_rows && rows.keys[row] != kNoKey) {
            const int key = rows.keys[row];
            place = rows.starts[key / rows.buckets] + rows.prefix[key] + rank_of(rows, row);
            const bf16* source = hidden + int64_t(row / rows.choices) * k_blocks * kBlockK;
            for (int chunk = 0; chunk < num_chunks; chunk += kStride) {
                if (row != first_row || chunk != 0) held.load(source, chunk, num_chunks);
                held.store(tokens, chunk, num_chunks, place, padded_rows);
            }
            if (num_slots > 0 && lane == 0) row_slots[place] = key % rows.buckets - 1;
        }
        if (lane == 0) places[row] = place;
    }
}
