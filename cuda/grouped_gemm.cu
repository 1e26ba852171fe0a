// The grouped GEMM over the tiles that the sort wrote: gate_up or down, raw or finished, with the LoRA delta or
// without.
#define DIRECT 0
#define HALVES 1
#include "common/gemm.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm(const LayerArgs* layer, const uint8_t* tokens, const TokenTile* tiles, const int* num_tiles,
                 const LoraGroup* groups, const bf16* h, int* ticket, void* out, int num_experts, int k_blocks,
                 int row_tiles, int rows, int max_rank, int out_stride) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const Memory memory = carve(shared, k_blocks, num_experts);
    if (threadIdx.x == 0) init_barriers(memory);
    __syncthreads();
    // The GEMM may start while its predecessor runs: what it reads before its wait was there before the predecessor
    // let it start.
    grid_dependency_launch();

    const Gemm gemm{layer,       IS_DOWN ? layer->down : layer->gate_up,
                    tokens,      tiles,
                    groups,      h,
                    nullptr,     nullptr,
                    ticket,      *num_tiles * row_tiles,
                    num_experts, k_blocks,
                    row_tiles,   rows,
                    max_rank,    out,
                    out_stride};
    if (threadIdx.x >= kConsumers) {
        Producer<Gemm> producer{gemm, memory};
        return produce(producer, threadIdx.x == kConsumers ? producer.open() : 0);
    }
    if (!LORA) grid_dependency_wait();
    consume(memory, [&](Consumer& consumer, int item) {
        const Place place = place_of(gemm, item);
        const TokenTile tile = tile_of(gemm, memory, place);
        consume_item<EPILOGUE>(consumer, gemm, 0, tile, place, tile.num_rows);
    });
}
