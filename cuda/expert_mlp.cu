// The experts' two products in one persistent kernel: activation of gate_up, then down, with the LoRA delta or without.
//
// Weights stream without a break from the first to the last: those of down do not wait for the activations, only the
// tokens beside them do, by a count of parts that each expert still lacks. With LORA a team of warps shrinks beside
// them. With DIRECT, for few tokens, every block makes the tiles from the routing itself and multiplies each by all
// hidden states, which stay in its shared memory: an expert's tokens are columns of the product, put at their places as
// the tile is written. Of more tokens a warp, or two, gather those of each tile as it goes, by the sort's word; only
// which tile it begins with every block counts for itself, and has the first of those weights under way while the sort
// still runs.
#include "common/first_tile.cuh"
#include "common/mlp.cuh"
#if LORA && DIRECT
#include "common/direct_shrink_team.cuh"
#elif LORA
#include "common/sorted_shrink_team.cuh"
#endif

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    expert_mlp(const LayerArgs* layer, const bf16* hidden_states, const int* topk_ids, const int* token_slots,
               const int* place_tokens, const TokenTile* tiles, const LoraGroup* groups, const int* num_groups,
               const bf16* gate_up_h, const bf16* down_h, int* ticket, int* pending, void* act, void* down, int top_k,
               int num_shared, int local_offset, int num_local, int num_slots, int max_tokens, int num_experts,
               int hidden_blocks, int intermediate_blocks, int output_stride, int rows, int max_rank, int shrink_parts,
               int pair_items) {
    extern __shared__ __align__(1024) uint8_t shared[];
    constexpr int kFirstSignal = kConsumers + 32 + (LORA ? 32 : 0);
    const bool consumes = threadIdx.x < kConsumers;
    const bool shrinks = threadIdx.x >= kThreads - kShrinkThreads;
    Memory memory = carve(shared, hidden_blocks, num_experts);
    const Routing routing{topk_ids, token_slots, top_k, top_k + num_shared, local_offset, num_local, num_slots + 1};
    // Read at once, together with the routing: later they would be another trip to memory.
    const uint8_t* const gate_up_weights = layer->gate_up;
    const uint8_t* const down_weights = layer->down;
#if DIRECT
    int num_made = 0;
    if (threadIdx.x / 32 == kConsumers / 32)
        num_made = memory.direct.make(routing, &layer->num_tokens, max_tokens, num_experts, MAX_N,
                                      [&] { init_barriers(memory); });
    if (consumes) load_hidden<kConsumers>(memory, hidden_states, hidden_blocks, max_tokens);
#else
    if (threadIdx.x == kConsumers) init_barriers(memory);
    int* counts = reinterpret_cast<int*>(memory.stages);     // the first stage has room for 4096
    constexpr int kEach = HALVES > 1 || MAX_N > 64 ? 4 : 1;  // of many
    count_tokens<kConsumers, kEach>(routing, layer->num_tokens, max_tokens, counts);
#endif

    const int gate_up_tiles = intermediate_blocks * (2 * kBlockK / BLOCK_M);
    const int down_tiles = output_stride / BLOCK_M;
    const int* act_pending = pending;
    const int* gate_up_h_pending = LORA ? pending + num_experts : nullptr;
    const int* down_h_pending = LORA ? pending + 2 * num_experts : nullptr;
    Mlp mlp{
        Gemm{layer, gate_up_weights, DIRECT ? nullptr : reinterpret_cast<const uint8_t*>(hidden_states), tiles, groups,
             gate_up_h, nullptr, gate_up_h_pending, ticket, 0, num_experts, hidden_blocks, gate_up_tiles, rows,
             max_rank, act, intermediate_blocks * kBlockK, DIRECT ? nullptr : place_tokens},
        Gemm{layer, down_weights, static_cast<const uint8_t*>(act), tiles, groups, down_h, act_pending, down_h_pending,
             ticket, 0, num_experts, intermediate_blocks, down_tiles, rows, max_rank, down, output_stride},
        ticket, pair_items, 0};
    Producer<Mlp> producer{mlp, memory};
    int opened = 0;
#if DIRECT
    mlp.take(num_made);
    if (threadIdx.x == kConsumers) opened = producer.open();
    __syncthreads();
    mlp.take(*memory.direct.num_tiles);
    if (consumes) {
        memory.direct.place_rows<kConsumers>(routing, max_tokens);
        async_copies_wait();
    }
    if (consumes || shrinks) named_barrier_sync(kPlacedBarrier, kConsumers + kShrinkThreads);
#else
    __shared__ int num_made;
    __shared__ bool crowded;
    __shared__ TokenTile first_tile;
    if (threadIdx.x / 32 == kConsumers / 32) {
        const TileCount count(counts, num_experts, HALVES * MAX_N);
        const bool crowds = HALVES == 2 && count.is_crowded(MAX_N);
        mlp.take(count.total, crowds);
        const Place place = place_of(mlp.gate_up, blockIdx.x);
        const TokenTile tile = count.find(place.tile);
        async_shared_fence();  // weights take the place of the counts
        if (threadIdx.x == kConsumers) {
            if (tile.expert >= 0) opened = producer.open(source_of(mlp.gate_up, tile, place));
            num_made = count.total;
            crowded = crowds;
            first_tile = tile;
        }
    }
    __syncthreads();
    mlp.take(num_made, crowded);
    constexpr int kFirstGatherer = kFirstSignal + kSignalThreads;
    const bool gathers = kGathers && threadIdx.x >= kFirstGatherer && !shrinks;
    if (!gathers) grid_dependency_wait();
#endif
#if LORA && DIRECT
    __shared__ Partial partial;
    if (shrinks)
        return DirectShrinkTeam<NearTokens>{
            mlp, memory, partial, hidden_states, routing, max_tokens * routing.choices, shrink_parts}
            .run();
#elif LORA
    __shared__ TeamMemory team;
    if (shrinks) {
        if (kDealsRegisters) fewer_registers<kShrinkRegisters>();
        return SortedShrinkTeam{mlp, team, hidden_states, num_groups}.run();
    }
#endif
    if (!consumes) {
        if (kDealsRegisters) fewer_registers<kProducerRegisters>();
#if !DIRECT
        if (gathers) return Gatherer{mlp.gate_up, memory, int(threadIdx.x - kFirstGatherer) / 32}.run(first_tile);
#endif
        if (threadIdx.x >= kFirstSignal) return Signaller{mlp, memory, pending}.run();
        return produce(producer, opened);
    }
    if (kDealsRegisters) more_registers<kConsumerRegisters>();
    consume(memory, [&](Consumer& consumer, int item) {
        if (threadIdx.x == 0) memory.written_items.item = item;
        const bool is_down = mlp.is_down(item);
        const Gemm& gemm = is_down ? mlp.down : mlp.gate_up;
        const Place place = place_of(gemm, is_down ? item - mlp.gate_up.num_items : item);
        const TokenTile tile = tile_of(gemm, memory, place);
        if (is_down) {
            consume_item<EPILOGUE_DOWN>(consumer, mlp.down, mlp.gate_up.num_items, tile, place, tile.num_rows);
        } else {
            const int num_columns = DIRECT ? MAX_N : tile.num_rows;
            consume_item<EPILOGUE_ACTIVATION>(consumer, mlp.gate_up, 0, tile, place, num_columns);
            if (threadIdx.x == 0) memory.written_items.tell();
        }
    });
    if (threadIdx.x != 0) return;
    memory.written_items.item = kNoItem;
    memory.written_items.tell();
}
