// The weighted sum over a token's choices, of some of its columns.
#pragma once

#include "common/types.cuh"

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
