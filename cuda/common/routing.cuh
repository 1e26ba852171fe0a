// How a slot row finds its expert and its adapter: the key that rows are sorted by.
#pragma once

#include "common/types.cuh"

constexpr uint16_t kNoKey = 0xffff;  // of a row without a local expert

struct Routing {
    const int* __restrict__ topk_ids;     // [tokens, top_k] global expert ids
    const int* __restrict__ token_slots;  // [tokens] adapter slot or -1
    int top_k;
    int choices;  // top_k + shared experts
    int local_offset;
    int num_local;
    int buckets;  // adapter slots + 1: bucket 0 is "no adapter"

    __device__ __forceinline__ int expert_of(int key) const { return buckets == 1 ? key : key / buckets; }

    // expert * buckets + bucket, local experts first, then shared ones. Reads the routing of padding tokens too, so
    // that no load waits for the number of real ones.
    __device__ __forceinline__ uint16_t key_of(int row) const {
        const bool shared = choices > top_k;
        const int token = shared || buckets > 1 ? row / choices : 0;
        const int choice = shared ? row - token * choices : 0;
        int expert = num_local + choice - top_k;
        if (choice < top_k) {
            const int index = shared ? token * top_k + choice : row;
            expert = __ldg(topk_ids + index) - local_offset;
            if (expert < 0 || expert >= num_local) return kNoKey;
        }
        const int bucket = buckets > 1 ? __ldg(token_slots + token) + 1 : 0;
        return uint16_t(expert * buckets + bucket);
    }
};
