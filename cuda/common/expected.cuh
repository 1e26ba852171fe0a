// What a sort leaves for the kernels behind it besides places: how many parts are to come, and what is missing.
#pragma once

#include "common/awaited.cuh"
#include "common/layout.cuh"
#include "common/lora.cuh"
#include "common/sorting.cuh"

constexpr int kTickets = 2;  // of the two grouped GEMMs that follow

// What an expert MLP counts down to zero: activations, h of gate and up, and h of down, by expert.
struct Pending {
    int* parts;       // [3, num_experts], and the sum of the first; null where no expert MLP follows
    int tile_parts;   // row tiles of gate_up
    int group_parts;  // parts of a shrink for an adapter group,
    int row_parts;    // or for each of its rows and each projection

    __device__ __forceinline__ void write(const Rows& rows, int expert, int num_tiles, int num_groups) const {
        if (!parts) return;
        parts[expert] = num_tiles * tile_parts;
        const int bare = rows.buckets > 1 ? rows.prefix[expert * rows.buckets + 1] : rows.counts[expert];
        const int of_groups = num_groups * group_parts;
        const int of_rows = (rows.counts[expert] - bare) * row_parts;
        parts[rows.num_experts + expert] = of_groups + 2 * of_rows;
        parts[2 * rows.num_experts + expert] = of_groups + of_rows;
    }
    __device__ __forceinline__ void write_total(const Rows& rows, int num_tiles) const {
        if (parts) parts[3 * rows.num_experts] = num_tiles * tile_parts;
    }
};

// What a token MLP awaits without a count: activations and h, which have a row of each slot row.
struct Awaited {
    bf16* act;  // [blocks, rows, 64]; null where nothing is awaited so
    bf16* gate_up_h;
    bf16* down_h;
    int blocks;
    int rows;
    int rank_blocks;  // of h, which may be none

    // Has all of a row missing, by a warp.
    __device__ __forceinline__ void clear(int row) const {
        const int lane = threadIdx.x % 32;
        const uint4 missing{kMissing, kMissing, kMissing, kMissing};
#pragma unroll 2
        for (int i = lane; i < blocks * 8; i += 32)
            *reinterpret_cast<uint4*>(act + (int64_t(i / 8) * rows + row) * kBlockK + i % 8 * kChunk) = missing;
#pragma unroll 1
        for (int i = lane; i < rank_blocks * 3; i += 32) {
            const int block = i / 3;
            bf16* h = i % 3 < 2 ? gate_up_h + h_offset(block, row, i % 3, rows, 2)
                                : down_h + h_offset(block, row, 0, rows, 1);
            *reinterpret_cast<uint4*>(h) = missing;
        }
    }
};
