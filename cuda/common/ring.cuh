// A ring of stages in shared memory: the barriers that tell full ones from empty ones, and a place among them.
#pragma once

#include "common/barrier.cuh"

template <int kStages>
struct Barriers {
    uint64_t full[kStages];
    uint64_t empty[kStages];

    // Of the first `stages`; one thread does this.
    __device__ __forceinline__ void init(int full_arrivals, int empty_arrivals, int stages = kStages) {
        for (int i = 0; i < stages; ++i) {
            barrier_init(&full[i], full_arrivals);
            barrier_init(&empty[i], empty_arrivals);
        }
    }
};

template <int kStages>
struct Cursor {
    int stage = 0;
    uint32_t parity = 0;

    // By a round at the most, of a ring that has `length` stages.
    __device__ __forceinline__ void advance(int stages = 1, int length = kStages) {
        stage += stages;
        const bool wraps = stage >= length;
        if (wraps) stage -= length;
        parity ^= wraps;
    }
};
