// The warps that shrink beside the token MLP: those of few tokens, but activations and h are awaited without counts.
#pragma once

#define SHRINK_UNROLL 4
#define SHRINK_HALVES 1
#include "common/shrink.cuh"
#include "common/shrink_team.cuh"

// Activations, BlockMajorK, some of which may be missing yet.
struct AwaitedTokens {
    static constexpr bool kAwaited = true;
    NearTokens tokens;
    __device__ __forceinline__ AwaitedTokens(const uint8_t* tokens, int rows) : tokens{tokens, rows} {}
    __device__ __forceinline__ uint4 load(int row, int step, int lane) const {
        return load_awaited(tokens.address(row, step, lane));
    }
};
using DownTokens = AwaitedTokens;
constexpr bool kCountsParts = false;

#include "common/direct_shrink_team.cuh"
