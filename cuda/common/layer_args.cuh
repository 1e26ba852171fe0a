// What a forward finds in device memory: the layer's tensors and the adapters' tables.
#pragma once

#include "common/types.cuh"

// One (slot, expert) of one layer: true ranks (0: none) and fp32 scalings of gate, up and down. Bit p of
// shared_a: projection p's A is that of expert 0, for all experts; shared_b: so is the down B. The twin of
// LORA_ENTRY in graphs/buffers.py.
struct alignas(32) LoraEntry {
    int rank[3];
    float scaling[3];
    int shared_a;
    int shared_b;
};

// The head of every input block: it travels with the tokens, so that one graph serves every layer and any
// number of tokens up to its shape. The twin of graphs/buffers.py's LAYER_ARGS.
struct alignas(16) LayerArgs {
    const uint8_t* gate_up;         // [E, H/64, 2I, 64] swizzled BlockMajorK
    const uint8_t* down;            // [E, I/64, H, 64]
    const void* router;             // [num_experts, H] bf16 or fp32
    const float* correction_bias;   // [num_experts]
    const bf16* shared_gate;        // [H]
    const uint8_t* lora_a_gate_up;  // [L, E, 2, R/8, H/32, 8, 32]
    const uint8_t* lora_b_gate_up;  // [L, E, R/8, I/8, 32 lanes, 4]
    const uint8_t* lora_a_down;     // [L, E, R/8, I/32, 8, 32]
    const uint8_t* lora_b_down;     // [L, E, R/8, H/16, 32 lanes, 4]
    const LoraEntry* lora;          // [L, E]
    bf16* output;  // page-locked host memory that this forward's output goes to; null: to the arena's buffer
    int num_tokens;
    int reserved;

    __device__ __forceinline__ const LoraEntry& entry_of(int slot, int expert, int num_experts) const {
        return lora[slot * num_experts + expert];
    }
    // Where the output goes, `arena` being the arena's buffer for it.
    __device__ __forceinline__ bf16* output_or(bf16* arena) const { return output ? output : arena; }
};
