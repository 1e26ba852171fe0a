// h of gate and up for a few tokens, beside the sort: a block takes one slot row and RANK_BLOCKS blocks of eight ranks.
//
// It reads the tokens where they came, and works out the row's place for itself.
#include "common/direct.cuh"
#include "common/shrink.cuh"

static_assert(kShares * 32 == kDirectRows, "a slot row a thread");

struct SentToken {
    const bf16* hidden;  // one token
    __device__ __forceinline__ uint4 load(int, int step, int lane) const {
        return __ldg(reinterpret_cast<const uint4*>(hidden + step * 32 + lane % 4 * 8));
    }
};

extern "C" __global__ void __launch_bounds__(kShares * 32, 2)
    direct_shrink(const LayerArgs* layer, const bf16* hidden_states, const int* topk_ids, const int* token_slots,
                  bf16* h, int top_k, int num_shared, int local_offset, int num_local, int num_slots, int max_tokens,
                  int num_experts, int k_steps, int rows, int max_rank) {
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ Partial partial;
    grid_dependency_launch();
    const Routing routing{topk_ids, token_slots, top_k, top_k + num_shared, local_offset, num_local, num_slots + 1};
    const int parts = ceil_div(max_rank / kRankBlock, RANK_BLOCKS) * PROJECTIONS;
    const int row = blockIdx.x / parts;
    const uint16_t key = routing.key_of(row);
    const int token = row / routing.choices;
    const bool real = key != kNoKey && key % routing.buckets > 0 && token < layer->num_tokens;
    Item item{};
    Weights ahead[2];
    if (real) {
        const LoraGroup group{key / routing.buckets, key % routing.buckets - 1, 0, 1};
        item = read_item<PROJECTIONS>(layer, group, blockIdx.x % parts, num_experts, k_steps, max_rank);
        item.take(threadIdx.x / 32, k_steps);
        load_ahead(ahead, item);
    }
    if (item.written_blocks > 0) {
        // The place is worked out while A is on its way.
        DirectTiles direct(shared, num_experts);
        if (threadIdx.x < 32) direct.make(routing, &layer->num_tokens, max_tokens, num_experts, kShrinkTokens);
        __syncthreads();
        item.first_row = direct.place_of(routing, row, key);
        float acc[RANK_BLOCKS][4] = {};
        accumulate(acc, ahead, SentToken{hidden_states + int64_t(token) * k_steps * 32}, item, 0);
        keep(partial, acc, threadIdx.x / 32);
        __syncthreads();
        write_sums<PROJECTIONS>(partial, item, 0, h, rows, threadIdx.x, kShares * 32);
    }
    // It needs nothing of the kernels before. One block waits for them, so that this kernel does not end before they
    // do.
    if (blockIdx.x == 0) grid_dependency_wait();
}
