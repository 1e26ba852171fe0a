// The routing of several slot rows of a thread, on its way together.
#pragma once

#include "common/routing.cuh"

// Divides by a product, with the inverse that `inverse_of` in graphs/sort_launches.py makes: of numbers whose product
// with the divisor is less than 2^32.
struct Divisor {
    int divisor;
    uint32_t inverse;

    __device__ __forceinline__ int divide(int number) const {
        return divisor == 1 ? number : __umulhi(number, inverse);
    }
};

// Of kRows rows, kStep after one another.
template <int kRows, int kStep>
struct Batch {
    static constexpr int kSpan = kRows * kStep;  // rows of all threads together
    Choice choices[kRows];
    Routed routed[kRows];

    // From number `start` on, of which this thread has number `thread`; none that all threads would have from `end` on.
    __device__ __forceinline__ void load(const Routing& routing, const Divisor& per_token, int start, int thread,
                                         int end) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (start + i * kStep >= end) break;
            const int row = min(start + i * kStep + thread, end - 1);
            const int token = per_token.divide(row);
            const int number = row - token * routing.choices;
            choices[i] = Choice{token, number, token * routing.top_k + number};
            routed[i] = routing.load(choices[i]);
        }
    }
};
