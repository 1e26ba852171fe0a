// out[t] = sum over choices of weight * down, fp32 in choice order, rounded once to bf16.
//
// Choices without a local expert (place -1) contribute nothing. Compile-time: LORA: down is fp32 and its delta apart;
// their sum is rounded to bf16 first, as the GEMM that adds the delta itself rounds it.
#include "common/barrier.cuh"
#include "common/layer_args.cuh"
#include "common/weighted_sum.cuh"

constexpr int kThreads = 128;
constexpr int kBatch = LORA ? 4 : 8;  // choices summed together

// One choice's row: down as it is, or with its delta.
#if LORA
struct Row {
    float4 down[2];
    uint4 delta{0, 0, 0, 0};
    __device__ __forceinline__ void load(const float* down_row, const bf16* delta_row, bool has_adapter) {
        down[0] = reinterpret_cast<const float4*>(down_row)[0];
        down[1] = reinterpret_cast<const float4*>(down_row)[1];
        if (has_adapter) delta = *reinterpret_cast<const uint4*>(delta_row);
    }
    __device__ __forceinline__ uint4 total() const {
        return uint4{pack_bf16(down[0].x + low_half(delta.x), down[0].y + high_half(delta.x)),
                     pack_bf16(down[0].z + low_half(delta.y), down[0].w + high_half(delta.y)),
                     pack_bf16(down[1].x + low_half(delta.z), down[1].y + high_half(delta.z)),
                     pack_bf16(down[1].z + low_half(delta.w), down[1].w + high_half(delta.w))};
    }
};
using DownElement = float;
#else
struct Row {
    uint4 down;
    __device__ __forceinline__ void load(const bf16* down_row, const bf16*, bool) {
        down = *reinterpret_cast<const uint4*>(down_row);
    }
    __device__ __forceinline__ uint4 total() const { return down; }
};
using DownElement = bf16;
#endif

extern "C" __global__ void __launch_bounds__(kThreads)
    finalize(const LayerArgs* layer, const int* places, const float* topk_weights, const float* shared_weights,
             const int* token_slots, const DownElement* down, const bf16* delta, bf16* out, int top_k, int num_shared,
             int hidden_stride) {
    const int token = blockIdx.x;
    const int column = (blockIdx.y * kThreads + threadIdx.x) * kColumns;
    const int choices = top_k + num_shared;
    const bool real = token < layer->num_tokens && column < hidden_stride;
    bf16* const target = layer->output_or(out);
    const ChoiceWeights weights{topk_weights, shared_weights, top_k, choices};
    const bool has_adapter = LORA && token_slots[token] >= 0;
    Sum sum;
    for (int first = 0; first < choices; first += kBatch) {
        // All of a batch is in flight before the first of it is summed.
        int place[kBatch];
        float weight[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int choice = first + i;
            place[i] = real && choice < choices ? places[token * choices + choice] : -1;
            weight[i] = weights.of(token, choice);
        }
        // Places and weights are older than the kernel before, which made the down outputs.
        if (first == 0) {
            grid_dependency_wait();
            grid_dependency_launch();
        }
        Row rows[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int64_t offset = int64_t(max(place[i], 0)) * hidden_stride + column;
            if (place[i] >= 0) rows[i].load(down + offset, delta + offset, has_adapter);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (place[i] >= 0) sum.add(weight[i], rows[i].total());
    }
    if (!real) return;
    *reinterpret_cast<uint4*>(target + int64_t(token) * hidden_stride + column) = sum.packed();
}
