// The gated activation, written once so that every kernel that applies it gives the same bits.
#pragma once

#include "common/types.cuh"

// silu(gate + delta_gate) * (up + delta_up) in fp32.
// Every product and sum is rounded by itself, so that no kernel may contract them differently.
__device__ __forceinline__ float gated_silu(float gate, float up, float delta_gate, float delta_up) {
    const float g = __fadd_rn(gate, delta_gate);
    const float u = __fadd_rn(up, delta_up);
    const float sigmoid_inverse = __fadd_rn(1.0f, __expf(-g));
    return __fmul_rn(__fdividef(g, sigmoid_inverse), u);
}
