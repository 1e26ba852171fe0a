// h = scaling * A x for every adapter group: [R/8, rows, PROJECTIONS, 8] bf16 from BlockMajorK operands.
//
// A block takes one group and RANK_BLOCKS blocks of eight ranks.
#include "common/shrink.cuh"

extern "C" __global__ void __launch_bounds__(kShares * 32, 2)
    lora_shrink(const LayerArgs* layer, const LoraGroup* groups, const int* num_groups, const bf16* tokens, bf16* h,
                int num_experts, int k_steps, int rows, int max_rank) {
    __shared__ Partial partial;
    const int warp = threadIdx.x / 32;
    const int parts = ceil_div(max_rank / kRankBlock, RANK_BLOCKS) * PROJECTIONS;
    const int num_items = *num_groups * parts;
    const PermutedTokens operand{tokens, rows};

    // A first item's A is under way before the tokens exist: groups and adapters are older than those.
    Weights ahead[2];
    for (int index = blockIdx.x; index < max(num_items, int(blockIdx.x) + 1); index += gridDim.x) {
        const bool real = index < num_items;
        Item item{};
        if (real) {
            item = read_item<PROJECTIONS>(layer, groups[index / parts], index % parts, num_experts, k_steps, max_rank);
            item.take(warp, k_steps);
            load_ahead(ahead, item);
        }
        if (index == blockIdx.x) {
            grid_dependency_wait();
            grid_dependency_launch();
        }
        if (item.written_blocks <= 0) continue;
        for (int row = 0; row < item.num_rows; row += kShrinkTokens) {
            if (row > 0) load_ahead(ahead, item);
            float acc[RANK_BLOCKS][4] = {};
            accumulate(acc, ahead, operand, item, row);
            keep(partial, acc, warp);
            __syncthreads();
            write_sums<PROJECTIONS>(partial, item, row, h, rows, threadIdx.x, kShares * 32);
            __syncthreads();
        }
    }
}
