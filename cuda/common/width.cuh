// The tensor-core width that multiplies a token tile.
#pragma once

#include "common/wgmma.cuh"

// The lane, read anew: keeps the compiler from holding every width's addresses in registers across tiles.
__device__ __forceinline__ int volatile_lane() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// Calls `run` with the smallest instruction width that holds `num_rows` tokens.
template <typename Run>
__device__ __forceinline__ void with_tile_width(int num_rows, Run run) {
#if MAX_N > 80
    if (num_rows > 96) return run(Width<128>{});
    if (num_rows > 64) return run(Width<96>{});
#elif MAX_N > 64
    if (num_rows > 64) return run(Width<80>{});
#endif
#if MAX_N > 32
    if (num_rows > 48) return run(Width<64>{});
    if (num_rows > 32) return run(Width<48>{});
#endif
#if MAX_N > 16
    if (num_rows > 24) return run(Width<32>{});
    if (num_rows > 16) return run(Width<24>{});
#endif
#if MAX_N > 8
    if (num_rows > 8) return run(Width<16>{});
#endif
    run(Width<8>{});
}
