// Brings hidden states to their places in BlockMajorK, one warp a slot row.
//
// A row without a place (no local expert, or a padding token) is left out: nothing of it is read or written.
#include "common/barrier.cuh"
#include "common/layout.cuh"

constexpr int kWarps = 4;

// A warp's share of one token's hidden state, on its way through registers.
struct HiddenRow {
    static constexpr int kHeld = 8;  // 16-byte chunks a lane: 2048 elements a warp
    uint4 chunk[kHeld];

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

extern "C" __global__ void __launch_bounds__(kWarps * 32)
    gather(const bf16* hidden, const int* places, bf16* tokens, int choices, int k_blocks, int padded_rows,
           int max_rows) {
    constexpr int kStride = HiddenRow::kHeld * 32;
    const int row = blockIdx.x * kWarps + threadIdx.x / 32;
    const int num_chunks = k_blocks * (kBlockK / kChunk);
    const bf16* source = hidden + int64_t(min(row, max_rows - 1) / choices) * k_blocks * kBlockK;
    // The hidden state is on its way while the sort still runs: it was there before it.
    HiddenRow held;
    held.load(source, 0, num_chunks);
    grid_dependency_wait();
    grid_dependency_launch();
    if (row >= max_rows) return;
    const int place = places[row];
    if (place < 0) return;
    for (int chunk = 0; chunk < num_chunks; chunk += kStride) {
        if (chunk != 0) held.load(source, chunk, num_chunks);
        held.store(tokens, chunk, num_chunks, place, padded_rows);
    }
}
