// The sort of up to 32 slot rows for a token MLP, which makes tiles and adapter groups for itself: where each row's
// outputs lie, the same as by sort.cu, and what the token MLP awaits, missing.
//
// Every warp has all slot rows in its registers and waits for no other, so that activations of few bytes find theirs
// cleared in time. It reads nothing but the input and writes what is its own: kernels before are waited for at the end
// alone, for those behind it.
#include "common/awaited.cuh"
#include "common/barrier.cuh"
#include "common/few_rows.cuh"
#include "common/layer_args.cuh"
#include "common/layout.cuh"
#include "common/lora.cuh"

constexpr int kThreads = 512;

// What a token MLP awaits without a count: activations and h, which have a row of each slot row.
struct Awaited {
    bf16* act;  // [blocks, rows, 64]
    bf16* gate_up_h;
    bf16* down_h;
    int blocks;
    int rows;
    int rank_blocks;  // of h, which may be none

    // Has all of a row missing, by a warp.
    __device__ __forceinline__ void clear(int row) const {
        const int lane = threadIdx.x % 32;
        const uint4 missing{kMissing, kMissing, kMissing, kMissing};
#pragma unroll 1
        for (int i = lane; i < blocks * 8; i += 32)
            *reinterpret_cast<uint4*>(act + (int64_t(i / 8) * rows + row) * kBlockK + i % 8 * kChunk) = missing;
#pragma unroll 1
        for (int block = lane; block < rank_blocks; block += 32) {
            *reinterpret_cast<uint4*>(gate_up_h + h_offset(block, row, 0, rows, 2)) = missing;
            *reinterpret_cast<uint4*>(gate_up_h + h_offset(block, row, 1, rows, 2)) = missing;
            *reinterpret_cast<uint4*>(down_h + h_offset(block, row, 0, rows, 1)) = missing;
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    few_sort(const LayerArgs* layer, const int* topk_ids, const int* token_slots, int* places, int top_k,
             int num_shared, int local_offset, int num_local, int num_slots, int max_tokens, bf16* act, bf16* gate_up_h,
             bf16* down_h, int act_blocks, int act_rows, int rank_blocks) {
    constexpr int kWarps = kThreads / 32;
    const int lane = threadIdx.x % 32;
    const int max_rows = max_tokens * (top_k + num_shared);
    const Routing routing{topk_ids, token_slots, top_k, top_k + num_shared, local_offset, num_local, num_slots + 1};
    grid_dependency_launch();
    FewRows rows(routing, &layer->num_tokens, max_rows);
    rows.sort(routing, max_rows);
    const int rank = rows.rank(routing.buckets, max_rows);
    const int place = rows.expert >= 0 ? rows.before * kRowAlign + rank : -1;
    const Awaited awaited{act, gate_up_h, down_h, act_blocks, act_rows, rank_blocks};
#pragma unroll 1
    for (int row = blockIdx.x * kWarps + threadIdx.x / 32; row < max_rows; row += gridDim.x * kWarps) {
        const int cleared = __shfl_sync(~0u, place, row);
        if (cleared >= 0) awaited.clear(cleared);
    }
    if (blockIdx.x == 0 && threadIdx.x < max_rows) places[lane] = place;
    grid_dependency_wait();
}
