// A warp's share of one token's hidden state, on its way through registers to its place in BlockMajorK.
#pragma once

#include "common/layout.cuh"

struct HiddenRow {
    static constexpr int kHeld = 8;  // 16-byte chunks a lane: 2048 elements a warp
    static constexpr int kStride = 32 * kHeld;
    uint4 chunk[kHeld];

    // The chunks from `first` on, of `num_chunks`.
    __device__ __forceinline__ void load(const bf16* hidden, int first, int num_chunks) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const int index = first + i * 32 + threadIdx.x % 32;
            if (index < num_chunks) chunk[i] = __ldg(reinterpret_cast<const uint4*>(hidden) + index);
        }
    }
    __device__ __forceinline__ void store(bf16* tokens, int first, int num_chunks, int place, int padded_rows) const {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const int index = first + i * 32 + threadIdx.x % 32;
            if (index < num_chunks)
                *reinterpret_cast<uint4*>(tokens + block_major_offset(place, index * kChunk, padded_rows)) = chunk[i];
        }
    }
};
