// The weighted sum over a token's choices, of some of its columns, and what each choice weighs.
#pragma once

#include "common/types.cuh"

// Choices after top_k are the shared experts, weighted by their gate, or by one where `shared_weights` is null.
struct ChoiceWeights {
    const float* topk_weights;    // [tokens, top_k]
    const float* shared_weights;  // [tokens]
    int top_k;
    int choices;

    __device__ __forceinline__ float of(int token, int choice) const {
        return choice < top_k                       ? __ldg(topk_weights + token * top_k + choice)
               : choice < choices && shared_weights ? __ldg(shared_weights + token)
                                                    : 1.0f;
    }
};

constexpr int kColumns = 8;  // of a thread: 16 bytes of a row

struct Sum {
    float value[kColumns] = {};

    __device__ __forceinline__ uint4 packed() const {
        return uint4{pack_bf16(value[0], value[1]), pack_bf16(value[2], value[3]), pack_bf16(value[4], value[5]),
                     pack_bf16(value[6], value[7])};
    }
    __device__ __forceinline__ void add(float weight, const uint4& row) {
        const uint32_t pairs[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            value[2 * i] = __fmaf_rn(weight, low_half(pairs[i]), value[2 * i]);
            value[2 * i + 1] = __fmaf_rn(weight, high_half(pairs[i]), value[2 * i + 1]);
        }
    }
};
