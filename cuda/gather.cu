// Brings hidden states to their places in BlockMajorK, one warp a slot row.
//
// A row without a place (no local expert, or a padding token) is left out: nothing of it is read or written.
#include "common/barrier.cuh"
#include "common/hidden_row.cuh"

constexpr int kWarps = 4;

extern "C" __global__ void __launch_bounds__(kWarps * 32)
    gather(const bf16* hidden, const int* places, bf16* tokens, int choices, int k_blocks, int padded_rows,
           int max_rows) {
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
    for (int chunk = 0; chunk < num_chunks; chunk += HiddenRow::kStride) {
        if (chunk != 0) held.load(source, chunk, num_chunks);
        held.store(tokens, chunk, num_chunks, place, padded_rows);
    }
}
