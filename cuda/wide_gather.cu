// Brings the hidden states of many tokens to their places in BlockMajorK, one warp a token.
//
// A row without a place (no local expert, or a padding token) is left out: nothing of it is written.
#include "common/barrier.cuh"
#include "common/layout.cuh"

constexpr int kWarps = 4;
constexpr int kHeld = 8;  // 16-byte chunks a lane: 2048 elements a warp

extern "C" __global__ void __launch_bounds__(kWarps * 32)
    wide_gather(const bf16* hidden, const int* places, bf16* tokens, int choices, int k_blocks, int padded_rows,
                int num_tokens) {
    const int lane = threadIdx.x % 32;
    const int token = blockIdx.x * kWarps + threadIdx.x / 32;
    const int num_chunks = k_blocks * (kBlockK / kChunk);
    const uint4* source =
        reinterpret_cast<const uint4*>(hidden + int64_t(min(token, num_tokens - 1)) * k_blocks * kBlockK);
    grid_dependency_wait();
    grid_dependency_launch();
    if (token >= num_tokens) return;
    for (int first = lane; first < num_chunks; first += kHeld * 32) {
        uint4 held[kHeld];
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
            if (first + i * 32 < num_chunks) held[i] = __ldg(source + first + i * 32);
        for (int batch = 0; batch < choices; batch += 32) {
            const int mine = batch + lane < choices ? places[token * choices + batch + lane] : -1;
            for (int choice = 0; choice < min(choices - batch, 32); ++choice) {
                const int place = __shfl_sync(~0u, mine, choice);
                if (place < 0) continue;
#pragma unroll
                for (int i = 0; i < kHeld; ++i)
                    if (first + i * 32 < num_chunks)
                        *reinterpret_cast<uint4*>(
                            tokens + block_major_offset(place, (first + i * 32) * kChunk, padded_rows)) = held[i];
            }
        }
    }
}
