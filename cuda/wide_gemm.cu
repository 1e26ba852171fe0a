// The grouped GEMM of many tokens, gate_up with its activation or down, with the LoRA delta or without.
//
// A cluster of two blocks shares a token tile, up to MAX_N tokens of one expert, and each has a row tile of weights of
// its own: both halves of the tokens come once from L2 and go to both blocks, so that L2 gives up to a third less than
// it would for tiles apart. In a block one warp keeps a ring of STAGES K-blocks full and two warpgroups multiply 64
// weight rows each; they leave the tile apart, so that one multiplies while the other stores. Clusters take items from
// a ticket as they go: who computes a tile does not change its bits.
//
// With LORA the blocks of ranks of the tile's adapter groups are K-blocks too, before the others, brought by three
// more warps: B from registers, h with zeros for the rows of other groups. The delta is a part of the fp32 sum and is
// not rounded by itself.
//
// Activations are BlockMajorK, [I/64, P, 64], down outputs rows, [P, H]. Compile-time: BLOCK_M (128), MAX_N, STAGES,
// EPILOGUE, LORA.
#include "common/wide_consumer.cuh"
#include "common/wide_producer.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    wide_gemm(const LayerArgs* layer, const uint8_t* tokens, const TokenTile* tiles, const int* num_tiles,
              const LoraGroup* groups, const bf16* h, int* ticket, void* out, int num_experts, int k_blocks,
              int row_tiles, int rows, int max_rank, int out_stride) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const WideMemory memory = carve(shared);
    if (threadIdx.x == 0) init_barriers(memory);
    cluster_sync();
    grid_dependency_launch();

    const Gemm gemm{layer,       IS_DOWN ? layer->down : layer->gate_up,
                    tokens,      tiles,
                    groups,      h,
                    nullptr,     nullptr,
                    ticket,      *num_tiles * ceil_div(row_tiles, kCluster),
                    num_experts, k_blocks,
                    row_tiles,   rows,
                    max_rank,    out,
                    out_stride};
    if (LORA && threadIdx.x >= kConsumers + 32) {
        WideLoraProducer{gemm, memory}.run();
    } else if (threadIdx.x >= kConsumers) {
        WideProducer{gemm, memory}.run();
    } else {
        grid_dependency_wait();
        WideConsumer{gemm, memory}.run();
    }
    // Neither block may end while the other still writes into it.
    cluster_sync();
}
