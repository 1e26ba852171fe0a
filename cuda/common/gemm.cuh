// A grouped GEMM: each expert's tokens by its weights, every weight byte streamed once, the tile finished on the way
// out.
//
// Weights are the M operand (BLOCK_M rows of a swizzled BlockMajorK matrix: one contiguous run per K-block),
// tokens the N operand. One warp keeps a ring of STAGES K-blocks in flight with bulk copies, across tiles;
// BLOCK_M / 64 warpgroups multiply. The grid is persistent over (token tile, row tile) items, which the blocks
// take from a ticket as they go: who computes a tile does not change its bits. With LORA a second warp brings B and h
// of each tile's adapter groups through a short ring of its own, and the delta joins the sum before the epilogue.
//
// Compile-time: BLOCK_M (64 or 128), MAX_N (tokens of the largest tile, or of its half), HALVES (of a tile: 1 or 2),
// STAGES, EPILOGUE, LORA, DIRECT (tiles and tokens come from shared memory: expert_mlp.cu, direct_gemm.cu).
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
        uint32_t act[N / 8];
        activate<N>(act, acc, delta);
        store_activation<N>(act, gemm, tile, row_tile, warp_row, consumer.memory);
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

// A tile of more than MAX_N tokens by `kRowTiles` row tiles; `first_item` is the first of the product's.
template <int kRowTiles, int kEpilogue>
__device__ __forceinline__ void consume_halves(Consumer& consumer, const Gemm& gemm, int first_item) {
    constexpr int kSums = 2 * kRowTiles;
    float acc[kSums][MAX_N / 2];
    // What they are of is looked up anew: the sums leave no registers for it.
    const int item = consumer.multiply_halves<kRowTiles, !kIsDown<kEpilogue>>(acc, gemm.k_blocks);
    const Place place = place_of(gemm, item - first_item);
    const TokenTile tile = tile_of(gemm, consumer.memory, place);
    if constexpr (kIsDown<kEpilogue>) {
#pragma unroll
        for (int i = 0; i < kSums; ++i)
            finish_tile<MAX_N, kEpilogue>(consumer, acc[i], gemm, half_of(tile, i % 2), place.row_tile + i / 2);
    } else {
        uint32_t act[kSums][MAX_N / 8];
#pragma unroll
        for (int i = 0; i < kSums; ++i) activate<MAX_N>(act[i], acc[i], nullptr);
#pragma unroll
        for (int i = 0; i < kSums; ++i)
            store_activation<MAX_N>(act[i], gemm, half_of(tile, i % 2), place.row_tile + i / 2, threadIdx.x / 32 * 16,
                                    consumer.memory);
    }
}
template <int kEpilogue>
__device__ __forceinline__ void consume_halves(Consumer& consumer, const Gemm& gemm, int first_item, int row_tiles) {
    if constexpr (!kIsDown<kEpilogue>)
        if (row_tiles == 2) return consume_halves<2, kEpilogue>(consumer, gemm, first_item);
    consume_halves<1, kEpilogue>(consumer, gemm, first_item);
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

// One item of one product, whose items begin with `first_item`; `num_columns` tokens take part in it.
template <int kEpilogue>
__device__ __forceinline__ void consume_item(Consumer& consumer, const Gemm& gemm, int first_item,
                                             const TokenTile& tile, const Place& place, int num_columns) {
    if constexpr (HALVES == 2)
        if (num_columns > MAX_N) return consume_halves<kEpilogue>(consumer, gemm, first_item, place.row_tiles);
    with_tile_width(num_columns, [&]<int N>(Width<N>) { consume_tiles<N, kEpilogue>(consumer, gemm, tile, place); });
}
