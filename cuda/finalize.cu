// out[t] = sum over choices of weight * (down + down_delta), fp32 in choice order, rounded once to bf16.
//
// Choices without a local expert (place -1) contribute nothing. The choices after top_k are the shared
// experts, weighted by their gate (or by one). Compile-time: LORA.
#include "common/barrier.cuh"
#include "common/layer_args.cuh"

constexpr int kThreads = 128;
constexpr int kColumns = 8;
constexpr int kBatch = LORA ? 4 : 8;  // choices summed together

struct Sum {
    float value[kColumns] = {};
    __device__ __forceinline__ void add(float weight, const uint4& row, const uint4& delta) {
        const uint32_t rows[4] = {row.x, row.y, row.z, row.w};
        const uint32_t deltas[4] = {delta.x, delta.y, delta.z, delta.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            value[2 * i] = __fmaf_rn(weight, __fadd_rn(low_half(rows[i]), low_half(deltas[i])), value[2 * i]);
            value[2 * i + 1] = __fmaf_rn(weight, __fadd_rn(high_half(rows[i]), high_half(deltas[i])), value[2 * i + 1]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    finalize(const LayerArgs* layer, const int* places, const float* topk_weights, const float* shared_weights,
             const int* token_slots, const bf16* down, const bf16* delta, bf16* out, int top_k, int num_shared,
             int hidden_stride) {
    grid_dependency_wait();
    grid_dependency_launch();
    const int token = blockIdx.x;
    const int column = (blockIdx.y * kThreads + threadIdx.x) * kColumns;
    if (token >= layer->num_tokens || column >= hidden_stride) return;
    const int choices = top_k + num_shared;
#if LORA
    const bool has_adapter = token_slots[token] >= 0;
#endif
    Sum sum;
    for (int first = 0; first < choices; first += kBatch) {
        // All of a batch is in flight before the first of it is summed.
        int place[kBatch];
        float weight[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int choice = first + i;
            place[i] = choice < choices ? places[token * choices + choice] : -1;
            weight[i] = choice < top_k                       ? topk_weights[token * top_k + choice]
                        : choice < choices && shared_weights ? shared_weights[token]
                                                             : 1.0f;
        }
        uint4 rows[kBatch];
        uint4 deltas[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int64_t offset = int64_t(max(place[i], 0)) * hidden_stride + column;
            deltas[i] = uint4{0, 0, 0, 0};
            if (place[i] < 0) continue;
            rows[i] = *reinterpret_cast<const uint4*>(down + offset);
#if LORA
            if (has_adapter) deltas[i] = *reinterpret_cast<const uint4*>(delta + offset);
#endif
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (place[i] >= 0) sum.add(weight[i], rows[i], deltas[i]);
    }
    uint4 packed{pack_bf16(sum.value[0], sum.value[1]), pack_bf16(sum.value[2], sum.value[3]),
                 pack_bf16(sum.value[4], sum.value[5]), pack_bf16(sum.value[6], sum.value[7])};
    *reinterpret_cast<uint4*>(out + int64_t(token) * hidden_stride + column) = packed;
}
