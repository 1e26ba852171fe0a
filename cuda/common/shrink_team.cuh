// What the warps that shrink beside both products have in common. `Mlp`, `Memory` and the threads of a block are those
// of the kernel that includes this.
#pragma once

#include "common/gemm_args.cuh"
#include "common/shrink_item.cuh"

constexpr int kShrinkWarps = kShrinkThreads / 32;
constexpr int kWarpShares = kShares / kShrinkWarps;  // of K, that one of them sums

// Tokens of at most 2 GiB, BlockMajorK [K/64, rows, 64]: offsets in 32 bits save registers.
struct NearTokens {
    static constexpr bool kAwaited = false;
    const uint8_t* tokens;
    int rows;
    __device__ __forceinline__ int find(int row) const { return row; }
    __device__ __forceinline__ const uint4* address(int row, int step, int lane) const {
        const int chunk = step % 2 * 4 + lane % 4;
        const int offset = (step / 2 * rows + row) * kBlockBytes + (chunk ^ (row & 7)) * 16;
        return reinterpret_cast<const uint4*>(tokens + offset);
    }
    __device__ __forceinline__ uint4 load(int row, int step, int lane) const { return *address(row, step, lane); }
};

// The thread among those that shrink, read anew: keeps the compiler from holding what follows from it in registers
// from one part to the next.
__device__ __forceinline__ int team_thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread - (kThreads - kShrinkThreads);
}
// The block, read anew as well.
__device__ __forceinline__ int team_block() {
    int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return block;
}
__device__ __forceinline__ void team_sync() { named_barrier_sync(kShrinkBarrier, kShrinkThreads); }

// Waits until an expert's tokens are there, if they are `awaited`.
__device__ __forceinline__ void await_tokens(const int* awaited) {
    if (!awaited) return;
    if (threadIdx.x % 32 == 0) await_parts(awaited);
    __syncwarp();
}
// The end of a part, behind the team's barrier: an expert's h lacks one less.
__device__ __forceinline__ void finish_part(const Gemm& gemm, int expert, bool wrote) {
    if (team_thread() != 0) return;
    if (wrote) release_writes();
    count_down(const_cast<int*>(gemm.h_pending) + expert);
}
