// Brings the hidden states of many tokens to their places in BlockMajorK, one warp a token.
//
// A row without a place (no local expert, or a padding token) is left out: nothing of it is written.
#include "common/barrier.cuh"
#include "common/hidden_row.cuh"

constexpr int kWarps = 4;

extern "C" __global__ void __launch_bounds__(kWarps * 32)
    wide_gather(const bf16* hidden, const int* places, bf16* tokens, int choices, int k_blocks, int padded_rows,
                int num_tokens) {
    const int lane = threadIdx.x % 32;
    const int token = blockIdx.x * kWarps + threadIdx.x / 32;
    const int num_chunks = k_blocks * (kBlockK / kChunk);
    const bf16* source = hidden + int64_t(token) * k_blocks * kBlockK;
    grid_dependency_wait();
    grid_dependency_launch();
    if (token >= num_tokens) return;
    for (int chunk = 0; chunk < num_chunks; chunk += HiddenRow::kStride) {
        HiddenRow held;
        held.load(source, chunk, num_chunks);
        for (int batch = 0; batch < choices; batch += 32) {
            const int mine = batch + lane < choices ? places[token * choices + batch + lane] : -1;
            for (int choice = 0; choice < min(choices - batch, 32); ++choice) {
                const int place = __shfl_sync(~0u, mine, choice);
                if (place >= 0) held.store(tokens, chunk, num_chunks, place, padded_rows);
            }
        }
    }
}
