// Router logits to top-k experts and weights, one warp a token, fp32; ties go to the lower expert.
//
// Compile-time: METHOD, PER_LANE (experts of one lane: num_experts / 32 rounded up).
// A token with a NaN logit gets valid experts and NaN weights.
#include "common/barrier.cuh"
#include "common/layer_args.cuh"
#include "common/scan.cuh"

#define METHOD_SOFTMAX_TOPK 0     // softmax over all experts, then top-k
#define METHOD_TOPK_SOFTMAX 1     // top-k, then softmax over the chosen
#define METHOD_SIGMOID_GROUPED 2  // sigmoid + bias within the best groups; weights without the bias

constexpr int kWarps = 4;
#define kLowest __int_as_float(0xff800000)  // minus infinity
constexpr float kRenormalizeEpsilon = 1e-20f;

struct Best {
    float score;
    int expert;
    __device__ __forceinline__ bool beats(const Best& other) const {
        return score > other.score || (score == other.score && expert < other.expert);
    }
};

__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const Best other{__shfl_xor_sync(~0u, best.score, step), __shfl_xor_sync(~0u, best.expert, step)};
        if (other.beats(best)) best = other;
    }
    return best;
}

// The best expert that is not taken yet; `taken` has a bit for each expert of this lane.
__device__ __forceinline__ Best next_best(const float (&scores)[PER_LANE], uint32_t& taken, int num_experts) {
    const int lane = threadIdx.x % 32;
    Best mine{kLowest, num_experts};
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const Best candidate{scores[i], i * 32 + lane};
        if (candidate.expert < num_experts && !(taken >> i & 1) && candidate.beats(mine)) mine = candidate;
    }
    const Best best = warp_best(mine);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
        if (best.expert == i * 32 + lane) taken |= 1u << i;
    return best;
}

// Masks the experts outside the best groups; a group's score is the sum of its two best choices.
__device__ __forceinline__ void keep_best_groups(float (&choice)[PER_LANE], float* scratch, int num_experts,
                                                 int num_groups, int topk_groups) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
        if (i * 32 + lane < num_experts) scratch[i * 32 + lane] = choice[i];
    __syncwarp();
    const int group_size = num_experts / num_groups;
    float score = kLowest;
    if (lane < num_groups) {
        float first = kLowest;
        float second = kLowest;
        for (int i = 0; i < group_size; ++i) {
            const float value = scratch[lane * group_size + i];
            second = fmaxf(second, fminf(first, value));
            first = fmaxf(first, value);
        }
        score = group_size > 1 ? first + second : first;
    }
    int better = 0;
    for (int g = 0; g < num_groups; ++g) {
        const float other = __shfl_sync(~0u, score, g);
        better += other > score || (other == score && g < lane);
    }
    const uint32_t kept = __ballot_sync(~0u, lane < num_groups && better < topk_groups);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
        if (i * 32 + lane < num_experts && !(kept >> ((i * 32 + lane) / group_size) & 1)) choice[i] = kLowest;
    __syncwarp();
}

// Weight of the chosen expert before any normalisation, known to every lane.
__device__ __forceinline__ float chosen_weight(const float (&weights)[PER_LANE], int expert) {
    float mine = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
        if (expert == i * 32 + int(threadIdx.x % 32)) mine = weights[i];
    return __shfl_sync(~0u, mine, expert % 32);
}

extern "C" __global__ void __launch_bounds__(kWarps * 32, 2)
    route(const LayerArgs* layer, const float* logits, int* topk_ids, float* topk_weights, int num_experts, int top_k,
          int renormalize, int num_groups, int topk_groups, int has_bias, float scaling) {
    extern __shared__ float scratch[];  // [kWarps, num_experts], for grouped routing
    grid_dependency_wait();
    grid_dependency_launch();
    const int token = blockIdx.x * kWarps + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (token >= layer->num_tokens) return;

    float choice[PER_LANE];
    bool poisoned = false;
    float highest = kLowest;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int expert = i * 32 + lane;
        choice[i] = expert < num_experts ? logits[int64_t(token) * num_experts + expert] : kLowest;
        poisoned |= choice[i] != choice[i];
        if (choice[i] != choice[i]) choice[i] = kLowest;
        highest = fmaxf(highest, choice[i]);
    }
    poisoned = __any_sync(~0u, poisoned);

    float weights[PER_LANE];
#if METHOD == METHOD_SIGMOID_GROUPED
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int expert = i * 32 + lane;
        weights[i] = 1.0f / (1.0f + expf(-choice[i]));
        choice[i] = weights[i] + (has_bias && expert < num_experts ? layer->correction_bias[expert] : 0.0f);
    }
    if (num_groups > 1)
        keep_best_groups(choice, scratch + threadIdx.x / 32 * num_experts, num_experts, num_groups, topk_groups);
#else
#pragma unroll
    for (int step = 16; step > 0; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        weights[i] = i * 32 + lane < num_experts ? expf(choice[i] - highest) : 0.0f;
        total += weights[i];
    }
    total = warp_sum(total);
    const float inverse = METHOD == METHOD_SOFTMAX_TOPK ? 1.0f / total : 1.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) weights[i] *= inverse;
#endif

    uint32_t taken = 0;
    float sum = 0.0f;
    float mine = 0.0f;
    for (int k = 0; k < top_k; ++k) {
        const Best best = next_best(choice, taken, num_experts);
        const float weight = chosen_weight(weights, best.expert);
        sum += weight;
        if (lane == k) mine = weight;
        if (lane == 0) topk_ids[token * top_k + k] = best.expert;
    }
    if (renormalize || METHOD == METHOD_TOPK_SOFTMAX)
        mine = mine / (METHOD == METHOD_SIGMOID_GROUPED ? sum + kRenormalizeEpsilon : sum);
    mine *= scaling;
    if (lane < top_k) topk_weights[token * top_k + lane] = poisoned ? __int_as_float(0x7fc00000) : mine;
}
