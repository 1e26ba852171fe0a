// The sort of up to 256 tokens in few blocks, so that what starts beside it finds most multiprocessors
// free: as sort.cu, to which a row's place is the same. `balanced`: an expert's token tiles are about equal.
//
// A thread holds the routing of four rows in registers, and that of the next four is on its way. Every block counts all
// rows in shared memory and places a share of them, a thread each; a row's rank is how many rows of its key are in
// earlier shares, in the chunks of 32 before its own, and before it in its own warp.
#include "common/barrier.cuh"
#include "common/layer_args.cuh"
#include "common/listing.cuh"

constexpr int kThreads = 512;
constexpr int kShare = 128;    // slot rows that a block places
constexpr int kBatch = 4;      // rows in flight per thread
constexpr int kChunkBits = 6;  // of a count of up to 32
constexpr int kEarlierShift = (kShare / 32 - 1) * kChunkBits;
// Slot rows at the most: those before the last share are counted. The twin of NARROW_ROWS.
constexpr int kMaxRows = 1 << (32 - kEarlierShift);

// What is counted for the ranks of a block's own rows: by key, the rows of earlier shares in the high bits, and below
// them those of each chunk of the own share but the last.
struct Earlier {
    uint32_t* counts;  // [num_keys]

    __device__ __forceinline__ void note(int key, int row) const {
        const int share = row / kShare;
        const int chunk = row % kShare / 32;
        if (share > blockIdx.x || (share == blockIdx.x && chunk == kShare / 32 - 1)) return;
        atomicAdd(&counts[key], 1u << (share < blockIdx.x ? kEarlierShift : chunk * kChunkBits));
    }
    // Rows of the key before chunk number `chunk` of the own share.
    __device__ __forceinline__ int before(int key, int chunk) const {
        const uint32_t held = counts[key];
        int sum = held >> kEarlierShift;
#pragma unroll
        for (int i = 0; i < kShare / 32 - 1; ++i)
            if (i < chunk) sum += held >> (i * kChunkBits) & ((1 << kChunkBits) - 1);
        return sum;
    }
};

// Counts all rows; returns the key of `own_row`, if it is this thread's.
__device__ __forceinline__ uint16_t count_rows(const Rows& rows, const Routing& routing, const LayerArgs* layer,
                                               const Divisor& per_token, const Earlier& earlier, int own_row) {
    uint16_t own_key = kNoKey;
    const int num_rows = layer->num_tokens * routing.choices;
    Batch<kBatch, kThreads> batch;
    batch.load(routing, per_token, 0, threadIdx.x, rows.max_rows);
    // The loads are under way meanwhile, and so are those of the next batch while one is counted.
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * rows.num_experts * rows.buckets; i += kThreads) rows.prefix[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int start = 0; start < rows.max_rows; start += batch.kSpan) {
        Batch<kBatch, kThreads> next;
        next.load(routing, per_token, start + batch.kSpan, threadIdx.x, rows.max_rows);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (start + i * kThreads >= rows.max_rows) break;
            const int row = start + i * kThreads + threadIdx.x;
            const uint16_t key = routing.key_of(batch.choices[i], batch.routed[i]);
            if (row >= num_rows || key == kNoKey) continue;
            atomicAdd(&rows.prefix[key], 1);
            earlier.note(key, row);
            if (row == own_row) own_key = key;
        }
        batch = next;
    }
    return own_key;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    narrow_sort(const LayerArgs* layer, const int* topk_ids, const int* token_slots, int* places, int* place_tokens,
                int* row_slots, TokenTile* tiles, int* num_tiles, LoraGroup* groups, int* num_groups, int* tickets,
                int* pending, int top_k, int num_shared, int local_offset, int num_local, int num_slots, int tile_rows,
                int group_rows, int max_tokens, int tile_parts, int group_parts, int row_parts, int balanced,
                uint32_t choices_inverse, uint32_t tile_rows_inverse, uint32_t buckets_inverse) {
    extern __shared__ __align__(16) uint8_t shared[];
    const int lane = threadIdx.x % 32;
    const int choices = top_k + num_shared;
    grid_dependency_wait();
    grid_dependency_launch();

    Rows rows;
    rows.group_rows = group_rows;
    rows.max_rows = max_tokens * choices;
    carve(rows, shared, num_local + num_shared, num_slots + 1);
    const int num_keys = rows.num_experts * rows.buckets;
    const Earlier earlier{reinterpret_cast<uint32_t*>(rows.prefix + num_keys)};
    const Tiling tiling{Divisor{tile_rows, tile_rows_inverse}, balanced != 0, rows.prefix + 2 * num_keys};
    const Routing routing{topk_ids, token_slots, top_k, choices, local_offset, num_local, rows.buckets};

    // Threads that hold the block's own rows place them; in their turn, others list tiles, and others groups.
    const int thread = (threadIdx.x + kThreads - blockIdx.x * kShare % kThreads) % kThreads;
    const int own_row = thread < kShare ? blockIdx.x * kShare + thread : -1;
    const Divisor per_token{choices, choices_inverse};
    const uint16_t key = count_rows(rows, routing, layer, per_token, earlier, own_row);
    const int lower = __popc(__match_any_sync(~0u, key) & ((1u << lane) - 1));
    __syncthreads();
    const int listed = begin_experts<kThreads>(rows, tiling);

    if (own_row >= 0 && own_row < rows.max_rows) {
        int place = -1;
        if (key != kNoKey) {
            const int expert = Divisor{rows.buckets, buckets_inverse}.divide(key);
            place = rows.starts[expert] + rows.prefix[key] + earlier.before(key, thread / 32) + lower;
            place_tokens[place] = per_token.divide(own_row);
            if (row_slots != nullptr) row_slots[place] = key - expert * rows.buckets - 1;
        }
        places[own_row] = place;
    }
    if (blockIdx.x == 0) {
        const Pending to_come{pending, tile_parts, group_parts, row_parts};
        list_tiles<kThreads>(rows, tiling, (thread + kThreads - kShare) % kThreads, tiles, to_come);
        if (threadIdx.x == 0) {
            *num_tiles = listed & 0xffff;
            to_come.write_total(rows, listed & 0xffff);
        }
        if (threadIdx.x < kTickets) tickets[threadIdx.x] = 0;
    }
    if (blockIdx.x == gridDim.x - 1 && num_slots > 0) {
        list_groups<kThreads>(rows, (thread + kThreads - 2 * kShare) % kThreads, groups);
        if (threadIdx.x == 0) *num_groups = listed >> 16;
    }
}
