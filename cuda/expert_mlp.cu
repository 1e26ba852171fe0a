// The experts' two products in one persistent kernel: activation of gate_up, then down, with the LoRA delta or without.
//
// Weights stream without a break from the first to the last: those of down do not wait for the activations, only the
// tokens beside them do, by a count of parts that each expert still lacks. With LORA a team of warps shrinks beside
// them; of many tokens h of gate and up may be there before, for a shrink alone has the whole bandwidth. With DIRECT,
// for few tokens, every block makes the tiles from the routing itself and multiplies each by all hidden states, which
// stay in its shared memory: an expert's tokens are columns of the product, put at their places as the tile is written.
#define SHRINK_HALVES (DIRECT ? 1 : 2)
#define SHRINK_UNROLL (DIRECT && MAX_N == 8 ? 4 : 2)
#include "common/mlp.cuh"
#if LORA
#include "common/shrink_team.cuh"
#endif

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    expert_mlp(const LayerArgs* layer, const bf16* hidden_states, const int* topk_ids, const int* token_slots,
               const uint8_t* tokens, const TokenTile* tiles, const int* num_tiles, const LoraGroup* groups,
               const int* num_groups, const bf16* gate_up_h, const bf16* down_h, int* ticket, int* pending, void* act,
               void* down, int top_k, int num_shared, int local_offset, int num_local, int num_slots, int max_tokens,
               int num_experts, int hidden_blocks, int intermediate_blocks, int output_stride, int rows, int max_rank,
               int shrink_parts, int shrunk_before) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const bool consumes = threadIdx.x < kConsumers;
    const bool shrinks = threadIdx.x >= kThreads - kShrinkThreads;
    Memory memory = carve(shared, hidden_blocks, num_experts);
    const Routing routing{topk_ids, token_slots, top_k, top_k + num_shared, local_offset, num_local, num_slots + 1};
    if (threadIdx.x == kConsumers) init_barriers(memory);
#if DIRECT
    int num_made = 0;
    if (threadIdx.x / 32 == kConsumers / 32)
        num_made = memory.direct.make(routing, &layer->num_tokens, max_tokens, num_experts, MAX_N);
    if (consumes) load_hidden<MAX_N, kConsumers>(memory.hidden, hidden_states, hidden_blocks, max_tokens);
#else
    const int num_made = *num_tiles;
#endif

    const int gate_up_tiles = intermediate_blocks * (2 * kBlockK / BLOCK_M);
    const int down_tiles = output_stride / BLOCK_M;
    const int* act_pending = pending;
    // Whether the kernel before is a shrink, than which tokens are older; see Geometry.team.
    const bool early = LORA && MAX_N > 32 && shrunk_before;
    const int* gate_up_h_pending = LORA && !early ? pending + num_experts : nullptr;
    const int* down_h_pending = LORA ? pending + 2 * num_experts : nullptr;
    Mlp mlp{
        Gemm{layer, layer->gate_up, DIRECT ? nullptr : tokens, tiles, groups, gate_up_h, nullptr, gate_up_h_pending,
             ticket, 0, num_experts, hidden_blocks, gate_up_tiles, rows, max_rank, act, intermediate_blocks * kBlockK},
        Gemm{layer, layer->down, static_cast<const uint8_t*>(act), tiles, groups, down_h, act_pending, down_h_pending,
             ticket, 0, num_experts, intermediate_blocks, down_tiles, rows, max_rank, down, output_stride},
        ticket, 0};
    mlp.take(num_made);
    Producer<Mlp> producer{mlp, memory, early};
    const int opened = threadIdx.x == kConsumers ? producer.open() : 0;
    __syncthreads();
#if DIRECT
    mlp.take(*memory.direct.num_tiles);
    if (consumes) {
        memory.direct.place_rows<kConsumers>(routing, max_tokens);
        async_copies_wait();
    }
    if (consumes || shrinks) named_barrier_sync(kPlacedBarrier, kConsumers + kShrinkThreads);
#endif
#if LORA
    __shared__ Partial partial;
    if (shrinks)
        return ShrinkTeam{
            mlp, memory, partial, hidden_states, num_groups, routing, max_tokens * routing.choices, shrink_parts}
            .run();
#endif
    if (!consumes) return produce(producer, opened);
    if (!DIRECT && !early) grid_dependency_wait();
    consume(memory, [&](Consumer& consumer, int item) {
        if (mlp.is_down(item)) {
            const int index = item - mlp.gate_up.num_items;
            const TokenTile tile = tile_of(mlp.down, memory, index);
            consume_item<EPILOGUE_DOWN>(consumer, mlp.down, tile, index, tile.num_rows);
        } else {
            const TokenTile tile = tile_of(mlp.gate_up, memory, item);
            consume_item<EPILOGUE_ACTIVATION>(consumer, mlp.gate_up, tile, item, DIRECT ? MAX_N : tile.num_rows);
            if (threadIdx.x == 0) {
                release_writes();
                count_down(pending + tile.expert);
                count_down(pending + 3 * num_experts);
            }
        }
    });
}
