// Both products of the experts under one ticket: all items of gate_up, then those of down.
#pragma once

#include "common/gemm.cuh"

constexpr int kPlacedBarrier = 2;  // named barriers beside the consumers' own
constexpr int kShrinkBarrier = 3;

// An item of down waits until the activations of its expert are there. None of gate_up waits for another, and whoever
// waits has taken its item later than those that it waits for were taken: all end.
struct Mlp {
    Gemm gate_up;
    Gemm down;
    int* ticket;
    int pair_items;  // pairs of row tiles of gate_up from which on they are items
    int num_items;

    // The items of `num_tiles` token tiles.
    __device__ __forceinline__ void take(int num_tiles) {
        gate_up.item_tiles = kGathers && num_tiles * ceil_div(gate_up.row_tiles, 2) >= pair_items ? 2 : 1;
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

// One of those that write what others await: of each count that goes down it tells the warp below, and goes on.
struct Teller {
    Written& written;
    __device__ __forceinline__ void tell(int count, int parts) { written.tell(count | parts << 16); }
    __device__ __forceinline__ void end() { written.tell(kNoItem); }
};

// The warp that counts down what has been written. The fence before that takes microseconds while weights stream, for
// which neither those that multiply nor those that shrink can stop.
struct Signaller {
    const Memory& memory;
    int* pending;  // [3, num_experts], and the sum of the first
    int num_experts;

    // Hears what was told, if anything, or that there is no more.
    __device__ __forceinline__ static int hear(Written& written, Cursor<2>& heard, bool& open) {
        if (!open || !written.ring.is_told(heard)) return kNoItem;
        const int told = written.ring.hear(heard);
        open = told != kNoItem;
        return told;
    }
    __device__ __forceinline__ void count(int told) const {
        if (told == kNoItem || threadIdx.x % 32 != 0) return;
        const int index = told & 0xffff;
        count_down(pending + index, told >> 16);
        if (index < num_experts) count_down(pending + 3 * num_experts, told >> 16);
    }
    __device__ __forceinline__ void run() const {
        constexpr int kPause = 64;  // nanoseconds
        Cursor<2> heard_activations;
        Cursor<2> heard_h;
        bool activations = true;
        bool h = LORA;
        grid_dependency_wait();  // the counts are the sort's
        while (activations || h) {
            const int of_activations = hear(memory.written.activations, heard_activations, activations);
            const int of_h = LORA ? hear(memory.written.h, heard_h, h) : kNoItem;
            if (of_activations == kNoItem && of_h == kNoItem) {
                __nanosleep(kPause);
                continue;
            }
            release_writes();
            count(of_activations);
            count(of_h);
        }
    }
};
