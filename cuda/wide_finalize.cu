// out[t] = sum over choices of weight * down of many tokens: as finalize.cu, from a down output in BlockMajorK.
//
// Blocks go from token to token, and ask for the next one's places while the rows of this one are on their way.
#include "common/barrier.cuh"
#include "common/layer_args.cuh"
#include "common/layout.cuh"
#include "common/weighted_sum.cuh"

constexpr int kThreads = 128;
constexpr int kBatch = 8;  // choices summed together

// Where a token's choices lie, and what they weigh.
struct Choices {
    const int* places;
    ChoiceWeights weights;
    int place[kBatch];
    float weight[kBatch];

    __device__ __forceinline__ void load(int token, int first) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int choice = first + i;
            place[i] = choice < weights.choices ? __ldg(places + token * weights.choices + choice) : -1;
            weight[i] = weights.of(token, choice);
        }
    }
};

struct Rows {
    uint4 row[kBatch];

    __device__ __forceinline__ void load(const Choices& of, const bf16* down, int column, int rows) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (of.place[i] >= 0)
                row[i] = *reinterpret_cast<const uint4*>(down + block_major_offset(of.place[i], column, rows));
    }
    __device__ __forceinline__ void add_to(Sum& sum, const Choices& of) const {
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (of.place[i] >= 0) sum.add(of.weight[i], row[i]);
    }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    wide_finalize(const LayerArgs* layer, const int* places, const float* topk_weights, const float* shared_weights,
                  const bf16* down, bf16* out, int top_k, int num_shared, int hidden_stride, int rows) {
    grid_dependency_wait();
    grid_dependency_launch();
    const int choices = top_k + num_shared;
    bf16* const target = layer->output_or(out);
    const int parts = ceil_div(hidden_stride, kThreads * kColumns);
    const int num_items = layer->num_tokens * parts;
    Choices next{places, {topk_weights, shared_weights, top_k, choices}};
    if (blockIdx.x < num_items) next.load(blockIdx.x / parts, 0);
    for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
        const int token = item / parts;
        const int column = (item % parts * kThreads + threadIdx.x) * kColumns;
        const bool real = column < hidden_stride;
        Choices now = next;
        Rows held;
        if (real) held.load(now, down, column, rows);
        if (item + gridDim.x < num_items) next.load((item + gridDim.x) / parts, 0);
        if (!real) continue;
        Sum sum;
        held.add_to(sum, now);
        for (int first = kBatch; first < choices; first += kBatch) {
            now.load(token, first);
            held.load(now, down, column, rows);
            held.add_to(sum, now);
        }
        *reinterpret_cast<uint4*>(target + int64_t(token) * hidden_stride + column) = sum.packed();
    }
}
