// A ring of stages in shared memory: the barriers that tell full ones from empty ones, and a place among them. A short
// one of numbers, by which a thread tells other warps what is next.
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

// What a thread tells other warps, each of which hears every number.
struct Announcements {
    Barriers<2> barriers;
    int item[2];

    __device__ __forceinline__ void tell(Cursor<2>& told, int next) {
        barrier_wait(&barriers.empty[told.stage], told.parity ^ 1);
        item[told.stage] = next;
        barrier_arrive(&barriers.full[told.stage]);
        told.advance();
    }
    // A warp asks.
    __device__ __forceinline__ int hear(Cursor<2>& heard) {
        barrier_wait(&barriers.full[heard.stage], heard.parity);
        const int next = item[heard.stage];
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(&barriers.empty[heard.stage]);
        heard.advance();
        return next;
    }
};
