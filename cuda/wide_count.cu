// Counts the keys of many slot rows, each block those of its own share, for wide_sort.
#include "common/barrier.cuh"
#include "common/layer_args.cuh"
#include "common/layout.cuh"
#include "common/routing.cuh"

constexpr int kThreads = 1024;

extern "C" __global__ void __launch_bounds__(kThreads)
    wide_count(const LayerArgs* layer, const int* topk_ids, const int* token_slots, uint32_t* counts, int top_k,
               int num_shared, int local_offset, int num_local, int num_slots, int share) {
    extern __shared__ __align__(16) int count[];  // [num_keys]
    const int choices = top_k + num_shared;
    const int buckets = num_slots + 1;
    const int num_keys = (num_local + num_shared) * buckets;
    for (int i = threadIdx.x; i < num_keys; i += kThreads) count[i] = 0;
    grid_dependency_wait();
    grid_dependency_launch();
    __syncthreads();
    const Routing routing{topk_ids, token_slots, top_k, choices, local_offset, num_local, buckets};
    const int first = blockIdx.x * share;
    const int last = min(first + share, layer->num_tokens * choices);
    for (int row = first + threadIdx.x; row < last; row += kThreads) {
        const uint16_t key = routing.key_of(row);
        if (key != kNoKey) atomicAdd(&count[key], 1);
    }
    __syncthreads();
    // Two keys side by side: a share has fewer than 65536 rows.
    const int pairs = ceil_div(num_keys, 2);
    for (int i = threadIdx.x; i < pairs; i += kThreads)
        counts[blockIdx.x * pairs + i] = count[2 * i] | (2 * i + 1 < num_keys ? count[2 * i + 1] << 16 : 0);
}
