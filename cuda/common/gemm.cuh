// A grouped GEMM: each expert's tokens by its weights, every weight byte streamed once, the tile finished on the way
// out.
//
// Weights are the M operand (BLOCK_M rows of a swizzled BlockMajorK matrix: one contiguous run per K-block),
// tokens the N operand. One warp keeps a ring of STAGES K-blocks in flight with bulk copies, across tiles;
// BLOCK_M / 64 warpgroups multiply. The grid is persistent over (token tile, row tile) items, which the blocks
// take from a ticket as they go: who computes a tile does not change its bits. With LORA a second warp brings B and h
// of each tile's adapter groups through a short ring of its own, and the delta joins the sum before the epilogue.
//
// Compile-time: BLOCK_M (64 or 128), MAX_N (tokens of the largest tile), STAGES, EPILOGUE, LORA, DIRECT (tiles and
// tokens come from shared memory: expert_mlp.cu, direct_gemm.cu).
#pragma once

#include "common/gemm_consumer.cuh"
#include "common/gemm_epilogue.cuh"
#include "common/gemm_gather.cuh"
#include "common/gemm_lora_producer.cuh"
#include "common/gemm_producer.cuh"

// One row tile's sum, finished on the way out.
template <int N, int kEpilogue>
__device__ __forceinline__ void finish_tile(Consumer& consumer, float (&acc)[N / 2], const Gemm& gemm,
                                            const TokenTile& tile, int row_tile) {
    [[maybe_unused]] float delta[LORA ? N / 2 : 1];
    const int warp_row = threadIdx.x / 32 * 16;
    if (DIRECT) grid_dependency_wait();
#if LORA
    consumer.expand<N, kIsDown<kEpilogue>>(delta, tile);
#endif
    if constexpr (kEpilogue == EPILOGUE_GATE_UP) {
        store_gate_up<N>(acc, gemm, tile, row_tile, warp_row);
    } else if constexpr (kEpilogue == EPILOGUE_ACTIVATION) {
        store_activation<N>(acc, reinterpret_cast<float (&)[N / 2]>(delta), gemm, tile, row_tile, warp_row,
                            consumer.memory);
    } else {
#if LORA
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[i] = __fadd_rn(acc[i], delta[i]);
#endif
        store_down<N, kEpilogue>(acc, gemm, tile, row_tile, warp_row);
    }
}

// Two row tiles of the same tokens, which are brought once.
template <int N, int kEpilogue>
__device__ __forceinline__ void consume_pair(Consumer& consumer, const Gemm& gemm, const TokenTile& tile,
                                             const Place& place) {
    float acc[2][N / 2];
    consumer.multiply_pair<N>(acc, gemm.k_blocks);
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        finish_tile<N, kEpilogue>(consumer, acc[0], gemm, tile, place.row_tile + i);
#pragma unroll
        for (int j = 0; j < N / 2; ++j) acc[0][j] = acc[1][j];
    }
}

template <int N, int kEpilogue>
__device__ __forceinline__ void consume_tiles(Consumer& consumer, const Gemm& gemm, const TokenTile& tile,
                                              const Place& place) {
    constexpr bool kOfHidden = !kIsDown<kEpilogue>;
    if constexpr (kGathers && kOfHidden && N <= kPairWidth)
        if (place.row_tiles == 2) return consume_pair<N, kEpilogue>(consumer, gemm, tile, place);
#pragma unroll 1
    for (int i = 0; i < (kGathers && kOfHidden ? place.row_tiles : 1); ++i) {
        float acc[N / 2];
        consumer.multiply<N, DIRECT && kOfHidden, kGathers && kOfHidden>(acc, gemm.k_blocks);
        finish_tile<N, kEpilogue>(consumer, acc, gemm, tile, place.row_tile + i);
    }
}

// The threads behind the consumers, less those that gather and that shrink.
template <typename Work>
__device__ __forceinline__ void produce(Producer<Work>& producer, int opened) {
    if (threadIdx.x >= kConsumers + 32)
        LoraProducer<Work>{producer.work, producer.memory}.run();
    else if (threadIdx.x == kConsumers)
        producer.run(opened);
}

// The warpgroups that multiply: `consume_item` takes each item as it comes.
template <typename ConsumeItem>
__device__ __forceinline__ void consume(const Memory& memory, ConsumeItem consume_item) {
    Consumer consumer{memory};
    while (true) {
        const int stage = consumer.cursor.stage;
        barrier_wait(&memory.ring.barriers.full[stage], consumer.cursor.parity);
        const int item = memory.ring.item[stage];
        if (item == kNoItem) break;
        consume_item(consumer, item);
    }
}

// One item of one product; `num_columns` tokens take part in it.
template <int kEpilogue>
__device__ __forceinline__ void consume_item(Consumer& consumer, const Gemm& gemm, const TokenTile& tile,
                                             const Place& place, int num_columns) {
    with_tile_width(num_columns, [&]<int N>(Width<N>) { consume_tiles<N, kEpilogue>(consumer, gemm, tile, place); });
}
