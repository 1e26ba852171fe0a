// A layer of a few tokens from routing to output in one persistent kernel: both products, and the sum over choices.
//
// Every block makes the tiles from the routing itself and has its first weights under way at once. Of gate_up a block
// takes some rows of one expert, of down 16 rows of all experts that were chosen, so that what a token's choices gave
// lies in its own shared memory and it sums them. Weights stream without a break from the first to the last; only the
// activations, a few kilobytes, are waited for, and they tell by themselves that they are there. Bits are those of the
// expert MLP and finalize: the tensor cores' two instructions sum alike.
//
// Compile-time: LORA: a team of warps shrinks beside them and the deltas are added.
#define RANK_BLOCKS 1
#include "common/token_consumer.cuh"
#if LORA
#include "common/direct_shrink_team.cuh"
#endif

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    token_mlp(const LayerArgs* layer, const bf16* hidden_states, const int* topk_ids, const float* topk_weights,
              const int* token_slots, const float* shared_weights, const bf16* gate_up_h, const bf16* down_h, void* act,
              void* down, bf16* out, int top_k, int num_shared, int local_offset, int num_local, int num_slots,
              int max_tokens, int num_experts, int hidden_blocks, int intermediate_blocks, int output_stride, int rows,
              int max_rank, int shrink_parts, int slices, int parts, int part_share, int item_blocks, int down_blocks,
              int down_parts, int last_blocks, int num_stages, int stage_bytes, int stages_offset, int hidden_bytes,
              int act_bytes) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const bool consumes = threadIdx.x < kConsumers;
    const bool shrinks = threadIdx.x >= kThreads - kShrinkThreads;
    const Memory memory = carve(shared, stages_offset, hidden_bytes, act_bytes, rows, num_experts);
    const int choices = top_k + num_shared;
    const Routing routing{topk_ids, token_slots, top_k, choices, local_offset, num_local, num_slots + 1};
    Mlp mlp{
        Gemm{layer, layer->gate_up, reinterpret_cast<const uint8_t*>(hidden_states), nullptr, nullptr, gate_up_h,
             nullptr, nullptr, nullptr, 0, num_experts, hidden_blocks, intermediate_blocks * (2 * kBlockK / BLOCK_M),
             rows, max_rank, act, intermediate_blocks * kBlockK},
        Gemm{layer, layer->down, static_cast<const uint8_t*>(act), nullptr, nullptr, down_h, nullptr, nullptr, nullptr,
             0, num_experts, intermediate_blocks, output_stride / BLOCK_M, rows, max_rank, down, output_stride},
        slices,
        parts,
        part_share,
        item_blocks,
        down_blocks,
        down_parts,
        last_blocks,
        num_stages,
        stage_bytes,
        0};
    if (threadIdx.x / 32 == kConsumerWarps)
        return TokenProducer{mlp, memory}.run(routing, &layer->num_tokens, max_tokens);
    const int row = threadIdx.x;
    const ChoiceWeights routed{topk_weights, nullptr, top_k, choices};
    if (consumes) {
        load_hidden<kConsumers>(memory, hidden_states, hidden_blocks, max_tokens);
        if (row < max_tokens * choices) memory.weights[row] = routed.of(row / choices, row % choices);
        async_copies_land();
    }
    const int real_tokens = layer->num_tokens;  // what the sum needs is here long before it
    bf16* output = layer->output_or(out);
    named_barrier_sync(kReadyBarrier, kThreads);
    mlp.num_tiles = *memory.direct.num_tiles;
#if LORA
    __shared__ Partial partial;
    if (shrinks)
        return DirectShrinkTeam<AwaitedTokens>{
            mlp, memory, partial, hidden_states, routing, max_tokens * choices, shrink_parts}
            .run();
#endif
    TokenConsumer consumer{{mlp, memory}, max_tokens, token_slots};
    for (int item = blockIdx.x; item < mlp.num_items(); item += gridDim.x) consumer.activate(item);
    grid_dependency_wait();
    grid_dependency_launch();
    if (shared_weights && row < max_tokens * choices && row % choices >= top_k)  // which a kernel before has made
        memory.weights[row] =
            __uint_as_float(load_awaited(reinterpret_cast<const uint32_t*>(shared_weights) + row / choices));
    for (int slice = blockIdx.x; slice < mlp.down.row_tiles; slice += gridDim.x) {
        if (slice != blockIdx.x) named_barrier_sync(1, kConsumers);  // results make room for others
        consumer.descend(slice);
        named_barrier_sync(1, kConsumers);
        consumer.finalize(slice, real_tokens, choices, output);
    }
}
