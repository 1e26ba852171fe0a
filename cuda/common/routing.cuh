// How a slot row finds its expert and its adapter: the key that rows are sorted by.
#pragma once

#include "common/types.cuh"

constexpr uint16_t kNoKey = 0xffff;  // of a row without a local expert

// Where a slot row's routing lies, as far as its key depends on it.
struct Choice {
    int token;
    int number;  // among the token's choices
    int index;   // among all top-k ids, if it is one of those
};
// What lies there.
struct Routed {
    int id;
    int slot;
};

struct Routing {
    const int* __restrict__ topk_ids;     // [tokens, top_k] global expert ids
    const int* __restrict__ token_slots;  // [tokens] adapter slot or -1
    int top_k;
    int choices;  // top_k + shared experts
    int local_offset;
    int num_local;
    int buckets;  // adapter slots + 1: bucket 0 is "no adapter"

    __device__ __forceinline__ int expert_of(int key) const { return buckets == 1 ? key : key / buckets; }

    __device__ __forceinline__ Choice choice_of(int row) const {
        const bool shared = choices > top_k;
        const int token = shared || buckets > 1 ? row / choices : 0;
        const int number = shared ? row - token * choices : 0;
        return Choice{token, number, shared ? token * top_k + number : row};
    }
    // As it was loaded, with nothing that waits for it, so that loads of several rows are on their way together. Reads
    // the routing of padding tokens too, so that no load waits for the number of real ones, and the slot of every row,
    // so that none waits for its expert.
    __device__ __forceinline__ Routed load(const Choice& choice) const {
        return Routed{choice.number < top_k ? __ldg(topk_ids + choice.index) : 0,
                      buckets > 1 ? __ldg(token_slots + choice.token) : -1};
    }
    // expert * buckets + bucket, local experts first, then shared ones.
    __device__ __forceinline__ uint16_t key_of(const Choice& choice, const Routed& routed) const {
        const bool chosen = choice.number < top_k;
        const int expert = chosen ? routed.id - local_offset : num_local + choice.number - top_k;
        const bool local = !chosen || (expert >= 0 && expert < num_local);
        return local ? uint16_t(expert * buckets + routed.slot + 1) : kNoKey;
    }
    __device__ __forceinline__ uint16_t key_of(int row) const {
        const Choice choice = choice_of(row);
        return key_of(choice, load(choice));
    }
};
