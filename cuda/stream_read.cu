// Reads memory once with bulk copies, as the grouped GEMM brings its weights in, and does nothing else with it:
// the read bandwidth that a layer's time is measured against.
//
// One lane keeps a ring of STAGES chunks of STAGE_BYTES in flight; another takes the first word of each chunk and
// gives its stage back. Chunks are dealt to the blocks in turn. `result[block]` is the XOR of the block's words,
// so that a chunk that was left out shows.
//
// Compile-time: STAGE_BYTES, STAGES.
#include "common/barrier.cuh"

static_assert(STAGE_BYTES % 1024 == 0, "a stage is whole lines, and the ring's barriers lie behind the stages");

constexpr int kProducer = 0;   // first lane of the first warp
constexpr int kConsumer = 32;  // first lane of the second

struct Ring {
    uint64_t full[STAGES];
    uint64_t empty[STAGES];
};

__device__ __forceinline__ uint64_t evict_normal_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void produce(const uint8_t* source, int64_t num_chunks, uint64_t policy, uint8_t* stages,
                                        Ring& ring) {
    int stage = 0;
    uint32_t parity = 0;
    for (int64_t chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
        barrier_wait(&ring.empty[stage], parity ^ 1);
        barrier_expect(&ring.full[stage], STAGE_BYTES);
        bulk_load(stages + stage * STAGE_BYTES, source + chunk * STAGE_BYTES, STAGE_BYTES, &ring.full[stage], policy);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

__device__ __forceinline__ uint32_t consume(int64_t num_chunks, const uint8_t* stages, Ring& ring) {
    uint32_t words = 0;
    int stage = 0;
    uint32_t parity = 0;
    for (int64_t chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
        barrier_wait(&ring.full[stage], parity);
        words ^= *reinterpret_cast<const volatile uint32_t*>(stages + stage * STAGE_BYTES);
        barrier_arrive(&ring.empty[stage]);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    return words;
}

// `evict_first`: read as weights are, leaving the rest of L2 alone; else as plain loads do, which fills L2.
extern "C" __global__ void __launch_bounds__(64, 1)
    stream_read(const uint8_t* source, uint32_t* result, int64_t num_chunks, int evict_first) {
    extern __shared__ __align__(1024) uint8_t shared[];
    Ring& ring = *reinterpret_cast<Ring*>(shared + STAGES * STAGE_BYTES);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&ring.full[i], 1);
            barrier_init(&ring.empty[i], 1);
        }
        barrier_init_fence();
    }
    __syncthreads();
    grid_dependency_wait();
    grid_dependency_launch();
    if (threadIdx.x == kProducer)
        produce(source, num_chunks, evict_first ? evict_first_policy() : evict_normal_policy(), shared, ring);
    if (threadIdx.x == kConsumer) result[blockIdx.x] = consume(num_chunks, shared, ring);
}
