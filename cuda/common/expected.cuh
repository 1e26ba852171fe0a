// What a sort leaves for an expert MLP besides places: how many parts are to come.
#pragma once

#include "common/layout.cuh"
#include "common/sorting.cuh"

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
