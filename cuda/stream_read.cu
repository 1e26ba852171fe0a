// Reads memory once with bulk copies, as the grouped GEMM brings its weights in, and does nothing else with it:
// the read bandwidth that a layer's time is measured against.
//
// One lane keeps a ring of STAGES chunks of STAGE_BYTES in flight; another takes the first word of each chunk and
// gives its stage back. Chunks are dealt to the blocks in turn. `result[block]` is the XOR of the block's words,
// so that a chunk that was left out shows.
//
// Compile-time: STAGE_BYTES, STAGES.
#include "common/ring.cuh"

static_assert(STAGE_BYTES % 1024 == 0, "a stage is whole lines, and the ring's barriers lie behind the stages");

constexpr int kProducer = 0;   // first lane of the first warp
constexpr int kConsumer = 32;  // first lane of the second

using Ring = Barriers<STAGES>;

__device__ __forceinline__ void produce(const uint8_t* source, int64_t num_chunks, uint64_t policy, uint8_t* stages,
                                        Ring& ring) {
    Cursor<STAGES> cursor;
    for (int64_t chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
        barrier_wait(&ring.empty[cursor.stage], cursor.parity ^ 1);
        barrier_expect(&ring.full[cursor.stage], STAGE_BYTES);
        bulk_load(stages + cursor.stage * STAGE_BYTES, source + chunk * STAGE_BYTES, STAGE_BYTES,
                  &ring.full[cursor.stage], policy);
        cursor.advance();
    }
}

__device__ __forceinline__ uint32_t consume(int64_t num_chunks, const uint8_t* stages, Ring& ring) {
    uint32_t words = 0;
    Cursor<STAGES> cursor;
    for (int64_t chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
        barrier_wait(&ring.full[cursor.stage], cursor.parity);
        words ^= *reinterpret_cast<const volatile uint32_t*>(stages + cursor.stage * STAGE_BYTES);
        barrier_arrive(&ring.empty[cursor.stage]);
        cursor.advance();
    }
    return words;
}

// `evict_first`: read as weights are, leaving the rest of L2 alone; else as plain loads do, which fills L2.
extern "C" __global__ void __launch_bounds__(64, 1)
    stream_read(const uint8_t* source, uint32_t* result, int64_t num_chunks, int evict_first) {
    extern __shared__ __align__(1024) uint8_t shared[];
    Ring& ring = *reinterpret_cast<Ring*>(shared + STAGES * STAGE_BYTES);
    if (threadIdx.x == 0) {
        ring.init(1, 1);
        barrier_init_fence();
    }
    __syncthreads();
    grid_dependency_wait();
    grid_dependency_launch();
    if (threadIdx.x == kProducer)
        produce(source, num_chunks, evict_first ? evict_first_policy() : evict_normal_policy(), shared, ring);
    if (threadIdx.x == kConsumer) result[blockIdx.x] = consume(num_chunks, shared, ring);
}
