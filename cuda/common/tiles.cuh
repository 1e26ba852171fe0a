// What sort makes of a batch: token tiles for the GEMMs and adapter groups for the LoRA kernels.
#pragma once

#include "common/types.cuh"

// Tokens of one expert that are multiplied together; the twin of TOKEN_TILE in graphs/buffers.py.
struct alignas(16) TokenTile {
    int expert;     // local expert index
    int first_row;  // permuted row of the first token, a multiple of 8
    int num_rows;   // tokens, at most HALVES * MAX_N
    int groups;     // the expert's adapter groups: the first in the low half, how many in the high half

    __device__ __forceinline__ int first_group() const { return groups & 0xffff; }
    __device__ __forceinline__ int num_groups() const { return groups >> 16; }
};

// Tokens of one (expert, adapter slot) pair, consecutive permuted rows: all of them, or as many as a group may have.
// The twin of LORA_GROUP.
struct alignas(16) LoraGroup {
    int expert;
    int slot;
    int first_row;
    int num_rows;
};
