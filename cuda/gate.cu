// Router logits of every token, and the sigmoid gate of the shared experts: one warp a row of the router.
//
// Sums run in fp32 in an order that depends on H alone, so that a token's logits do not depend on the batch.
// Compile-time: ROUTER_FP32 (router stored in fp32, else bf16), SHARED_GATE.
#include "common/barrier.cuh"
#include "common/layer_args.cuh"
#include "common/scan.cuh"

constexpr int kWarps = 8;
constexpr int kTokens = 4;    // tokens that share one reading of a router row
constexpr int kElements = 8;  // elements of a 16-byte load

struct Elements {
    float value[kElements];
    __device__ __forceinline__ explicit Elements(const bf16* source) {
        const uint4 raw = *reinterpret_cast<const uint4*>(source);
        const uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            value[2 * i] = low_half(pairs[i]);
            value[2 * i + 1] = high_half(pairs[i]);
        }
    }
    __device__ __forceinline__ explicit Elements(const float* source) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) value[i] = source[i];
    }
};

template <typename Router>
__device__ __forceinline__ void dot_rows(float (&dots)[kTokens], const Router* router, const bf16* hidden,
                                         int num_tokens, int stride) {
    for (int k = threadIdx.x % 32 * kElements; k < stride; k += 32 * kElements) {
        const Elements weights(router + k);
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            if (t >= num_tokens) break;
            const Elements x(hidden + int64_t(t) * stride + k);
#pragma unroll
            for (int i = 0; i < kElements; ++i) dots[t] = __fmaf_rn(weights.value[i], x.value[i], dots[t]);
        }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) dots[t] = warp_sum(dots[t]);
}

#if ROUTER_FP32
using RouterElement = float;
#else
using RouterElement = bf16;
#endif

extern "C" __global__ void __launch_bounds__(kWarps * 32)
    gate(const LayerArgs* layer, const bf16* hidden, float* logits, float* shared_weights, int num_experts,
         int hidden_stride) {
    grid_dependency_wait();
    grid_dependency_launch();
    const int row = blockIdx.x * kWarps + threadIdx.x / 32;
    const int first_token = blockIdx.y * kTokens;
    const int num_tokens = min(kTokens, layer->num_tokens - first_token);
    if (num_tokens <= 0 || row >= num_experts + SHARED_GATE) return;
    const bf16* tokens = hidden + int64_t(first_token) * hidden_stride;
    float dots[kTokens] = {};
    if (row < num_experts)
        dot_rows(dots, static_cast<const RouterElement*>(layer->router) + int64_t(row) * hidden_stride, tokens,
                 num_tokens, hidden_stride);
    else
        dot_rows(dots, layer->shared_gate, tokens, num_tokens, hidden_stride);
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
        if (t >= num_tokens) break;
        if (row < num_experts)
            logits[int64_t(first_token + t) * num_experts + row] = dots[t];
        else
            shared_weights[first_token + t] = 1.0f / (1.0f + expf(-dots[t]));
    }
}
