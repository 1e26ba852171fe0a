// The gate_up GEMM of a few tokens, which begins with the forward: it needs nothing of the sort or the gather.
//
// Every block makes the tiles from the routing itself and multiplies each by all hidden states, which stay in its
// shared memory: an expert's tokens are columns of the product, put at their places as the tile is written.
#define DIRECT 1
#define HALVES 1
#include "common/gemm.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    direct_gemm(const LayerArgs* layer, const bf16* hidden_states, const int* topk_ids, const int* token_slots,
                int* ticket, void* out, int top_k, int num_shared, int local_offset, int num_local, int num_slots,
                int max_tokens, int num_experts, int k_blocks, int row_tiles, int rows, int max_rank, int out_stride) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const Memory memory = carve(shared, k_blocks, num_experts);
    const Routing routing{topk_ids, token_slots, top_k, top_k + num_shared, local_offset, num_local, num_slots + 1};
    const uint8_t* const weights = layer->gate_up;  // together with the routing
    int num_tiles = 0;
    if (threadIdx.x < kConsumers)
        load_hidden<kConsumers>(memory, hidden_states, k_blocks, max_tokens);
    else if (threadIdx.x < kConsumers + 32)
        num_tiles = memory.direct.make(routing, &layer->num_tokens, max_tokens, num_experts, MAX_N,
                                       [&] { init_barriers(memory); });

    const Gemm gemm{
        layer,       weights,  nullptr,   nullptr, nullptr,  nullptr, nullptr,   nullptr, ticket, num_tiles * row_tiles,
        num_experts, k_blocks, row_tiles, rows,    max_rank, out,     out_stride};
    Producer<Gemm> producer{gemm, memory};
    const int opened = threadIdx.x == kConsumers ? producer.open() : 0;
    __syncthreads();
    if (threadIdx.x >= kConsumers) return produce(producer, opened);
    memory.direct.place_rows<kConsumers>(routing, max_tokens);
    async_copies_wait();
    named_barrier_sync(1, kConsumers);
    consume(memory, [&](Consumer& consumer, int item) {
        const Place place = place_of(gemm, item);
        consume_item<EPILOGUE>(consumer, gemm, 0, tile_of(gemm, memory, place), place, MAX_N);
    });
}
