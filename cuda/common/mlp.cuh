// Both products of the experts under one ticket: all items of gate_up, then those of down.
#pragma once

#include "common/gemm.cuh"

constexpr int kPlacedBarrier = 2;  // named barriers beside the consumers' own
constexpr int kShrinkBarrier = 3;
constexpr int kCrowdedDivisor = 6;  // of the pairs that are asked for otherwise

// An item of down waits until the activations of its expert are there. None of gate_up waits for another, and whoever
// waits has taken its item later than those that it waits for were taken: all end.
struct Mlp {
    Gemm gate_up;
    Gemm down;
    int* ticket;
    int pair_items;  // pairs of row tiles of gate_up from which on they are items
    int num_items;

    // The items of `num_tiles` token tiles. Of crowded ones, whose halves are both in use, a few pairs are enough.
    __device__ __forceinline__ void take(int num_tiles, bool crowded = false) {
        const int least = crowded ? pair_items / kCrowdedDivisor : pair_items;
        gate_up.item_tiles = kGathers && num_tiles * ceil_div(gate_up.row_tiles, 2) >= least ? 2 : 1;
        gate_up.num_items = num_tiles * items_of_tile(gate_up);
        num_items = gate_up.num_items + num_tiles * down.row_tiles;
    }
    // The count of all activations, behind those by expert.
    __device__ __forceinline__ const int* all_pending() const { return down.tokens_pending + 3 * down.num_experts; }
    __device__ __forceinline__ bool is_down(int item) const { return item >= gate_up.num_items; }
};

__device__ __forceinline__ Source source_of(const Mlp& mlp, const Memory& memory, int item) {
    if (mlp.is_down(item)) return source_of(mlp.down, memory, item - mlp.gate_up.num_items);
    return source_of(mlp.gate_up, memory, item);
}

__device__ __forceinline__ bool is_gathered(const Mlp& mlp, int item) { return is_gathered(mlp.gate_up, item); }

__device__ __forceinline__ void load_item(LoraProducer<Mlp>& producer, const Mlp& mlp, int item) {
    if (mlp.is_down(item))
        producer.load_tiles<true>(mlp.down, item - mlp.gate_up.num_items);
    else
        producer.load_tiles<false>(mlp.gate_up, item);
}

// The warp that counts down what has been written, as whoever awaits activations must see it. The fence before that
// takes microseconds while weights stream, and those that multiply cannot stop for as long.
struct Signaller {
    const Mlp& mlp;
    const Memory& memory;
    int* pending;  // [experts] parts of activations that are still to come, and behind h's the sum of them

    __device__ __forceinline__ void run() const {
        Cursor<2> heard;
        grid_dependency_wait();  // the counts are the sort's
        while (true) {
            const int item = memory.written_items.ring.hear(heard);
            if (item == kNoItem) break;
            const Place place = place_of(mlp.gate_up, item);
            const int expert = tile_of(mlp.gate_up, memory, place).expert;
            if (threadIdx.x % 32 != 0) continue;
            async_writes_fence();
            release_writes();
            count_down(pending + expert, place.row_tiles);
            count_down(pending + 3 * mlp.gate_up.num_experts, place.row_tiles);
        }
    }
};
