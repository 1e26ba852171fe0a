// What a block of the grouped GEMM has: its sizes, its shared memory and the launch's arguments.
#pragma once

#include "common/barrier.cuh"
#include "common/direct.cuh"
#include "common/gemm_args.cuh"
#include "common/gemm_groups.cuh"
#include "common/layout.cuh"
#include "common/ring.cuh"

static_assert(BLOCK_M == 64 || BLOCK_M == 128, "a row tile is one or two warpgroups");
static_assert(MAX_N % 8 == 0 && MAX_N <= 128, "a token tile is a multiple of 8 up to 128");
static_assert(!DIRECT || !LORA || EPILOGUE == EPILOGUE_BOTH, "with adapters few tokens are one kernel's");
static_assert(!DIRECT || ((EPILOGUE == EPILOGUE_ACTIVATION || EPILOGUE == EPILOGUE_BOTH) && MAX_N == 8), "few tokens");
static_assert(HALVES == 1 || (HALVES == 2 && EPILOGUE == EPILOGUE_BOTH && !DIRECT && !LORA),
              "halves are of many tokens");
static_assert(!LORA || (EPILOGUE != EPILOGUE_GATE_UP && EPILOGUE != EPILOGUE_DOWN_FP32), "those leave LoRA apart");

constexpr bool kBoth = EPILOGUE == EPILOGUE_BOTH;
constexpr bool kGathers = kBoth && !DIRECT;  // a warp brings tokens of gate_up from where they came
constexpr int kGatherWarps = HALVES;
constexpr int kConsumers = 2 * BLOCK_M;
[[maybe_unused]] constexpr int kShrinkThreads = LORA && kBoth ? 128 : 0;  // behind the producers
constexpr int kGatherThreads = kGathers ? 32 * kGatherWarps : 0;
constexpr int kSignalThreads = kBoth ? 32 : 0;
constexpr int kThreads = kConsumers + 32 + (LORA ? 32 : 0) + kSignalThreads + kGatherThreads + kShrinkThreads;
// Where sums need more registers than an equal share of them, warpgroups have so many a thread: together what a launch
// of as many threads may have.
constexpr bool kDealsRegisters = HALVES == 2 || (LORA && kBoth && MAX_N > 64);
constexpr int kConsumerRegisters = LORA ? 152 : 208;
constexpr int kProducerRegisters = 88;
constexpr int kShrinkRegisters = 120;
static_assert(!kDealsRegisters ||
              kConsumers * kConsumerRegisters + 128 * kProducerRegisters + kShrinkThreads * kShrinkRegisters ==
                  65536 / kThreads / 8 * 8 * kThreads);
constexpr int kWeightBytes = BLOCK_M * kBlockBytes;
constexpr int kTokenBytes = round_up(MAX_N * kBlockBytes, 1024);  // of one K-block
constexpr int kStageBytes = kWeightBytes + kTokenBytes;
[[maybe_unused]] constexpr int kTileFeatures = BLOCK_M / 2;  // features of one gate_up tile
// Tokens up to which two row tiles of an item are multiplied side by side; beyond, in turn, for want of registers.
constexpr int kPairWidth = LORA && !kDealsRegisters ? 32 : 64;
constexpr int kFullArrivals = 1 + kGatherThreads;  // of the thread that brings weights, and of each that gathers
constexpr int kStagingBytes = EPILOGUE == EPILOGUE_ACTIVATION || kBoth ? kTokenBytes : 0;

template <int kEpilogue>
constexpr bool kIsDown = kEpilogue == EPILOGUE_DOWN || kEpilogue == EPILOGUE_DOWN_FP32;

// A LoRA stage: up to kEntries fragments-by-eight-ranks of B, and h of kHBlocks blocks of ranks for all tokens.
template <bool kDown>
constexpr int kProjections = kDown ? 1 : 2;
template <bool kDown>
constexpr int kHTokenBytes = kProjections<kDown> * kHRowBytes;
constexpr int kEntries = kBoth && MAX_N > 64 ? 5 : 8;
constexpr int kHBlocks = MAX_N > 64 ? 4 : 8;
constexpr int kLoraStages = LORA ? 2 : 0;
constexpr int kLoraStageBytes = kEntries * kTileFragmentBytes + kHBlocks * MAX_N * kHTokenBytes<IS_DOWN>;

// One group's block of ranks within a LoRA stage.
struct LoraStageEntry {
    int16_t first_row;  // of the group within the tile
    int16_t last_row;
    int block;  // of h
};

struct Ring {
    Barriers<STAGES> barriers;
    int item[STAGES];  // the item that a stage belongs to; kNoItem ends the work
};
// The items whose activations this block has written, for the warp that lets others know.
struct WrittenItems {
    Announcements ring;
    int count;  // not in registers, which are few
    int item;   // that is being written

    __device__ __forceinline__ void init() {
        ring.barriers.init(1, 1);
        count = 0;
    }
    // By one thread alone, that `item` is done.
    __device__ __forceinline__ void tell() {
        Cursor<2> told{count % 2, uint32_t(count / 2 % 2)};
        ring.tell(told, item);
        ++count;
    }
};
struct LoraRing {
    Barriers<2> barriers;
    Announcements items;
    int num_entries[2];
    int last[2];  // whether this is the tile's last LoRA stage; every tile has one at least
    LoraStageEntry entries[2][kEntries];
};

struct Memory {
    uint8_t* stages;
    uint8_t* hidden;  // DIRECT: [k_blocks, MAX_N, 64], swizzled
    DirectTiles direct;
    uint8_t* lora_stages;
    bf16* staging;
    Ring& ring;
    LoraRing& lora;
    Announcements& gather_items;
    WrittenItems& written_items;

    __device__ __forceinline__ uint8_t* hidden_chunk(int token, int chunk, int) const {
        return hidden + block_major_offset(token, chunk * kChunk, MAX_N) * 2;
    }
};

// Items that a token tile makes: an item is of one row tile or of two, so that nothing is divided.
__device__ __forceinline__ int items_of_tile(const Gemm& gemm) {
    return kGathers ? (gemm.row_tiles + gemm.item_tiles - 1) >> (gemm.item_tiles - 1) : gemm.row_tiles;
}
// Whether the tokens of an announced item are gathered.
__device__ __forceinline__ bool is_gathered(const Gemm& gemm, int item) {
    return kGathers && item != kNoItem && item < gemm.num_items;
}
__device__ __forceinline__ Place place_of(const Gemm& gemm, int item) {
    const int items = items_of_tile(gemm);
    const int first = item % items * (kGathers ? gemm.item_tiles : 1);
    return Place{item / items, first, kGathers ? min(gemm.item_tiles, gemm.row_tiles - first) : 1};
}
__device__ __forceinline__ TokenTile tile_of(const Gemm& gemm, const Memory& memory, const Place& place) {
    return DIRECT ? memory.direct[place.tile] : gemm.tiles[place.tile];
}
// A tile's first MAX_N tokens, or those behind them.
__device__ __forceinline__ TokenTile half_of(const TokenTile& tile, int half) {
    const int before = half * MAX_N;
    return TokenTile{tile.expert, tile.first_row + before, min(tile.num_rows - before, MAX_N), tile.groups};
}

// Where everything lies in a block's shared memory; the twin of GemmConfig.shared_bytes in graphs/gemm_config.py.
__device__ __forceinline__ Memory carve(uint8_t* shared, int k_blocks, int num_experts) {
    uint8_t* hidden = shared + STAGES * kStageBytes;
    uint8_t* lora_stages = hidden + (DIRECT ? k_blocks * kTokenBytes : 0);
    uint8_t* staging = lora_stages + kLoraStages * kLoraStageBytes;
    uint8_t* ring = staging + kStagingBytes;
    uint8_t* lora_ring = ring + round_up(sizeof(Ring), 16);
    uint8_t* gather_items = lora_ring + round_up(sizeof(LoraRing), 16);
    uint8_t* written_items = gather_items + round_up(sizeof(Announcements), 16);
    uint8_t* direct = written_items + round_up(sizeof(WrittenItems), 16);
    return Memory{shared,
                  hidden,
                  DirectTiles(direct, num_experts),
                  lora_stages,
                  reinterpret_cast<bf16*>(staging),
                  *reinterpret_cast<Ring*>(ring),
                  *reinterpret_cast<LoraRing*>(lora_ring),
                  *reinterpret_cast<Announcements*>(gather_items),
                  *reinterpret_cast<WrittenItems*>(written_items)};
}

// One thread does this; a block-wide barrier must follow.
__device__ __forceinline__ void init_barriers(const Memory& memory) {
    memory.ring.barriers.init(kFullArrivals, kConsumers / 32);
    if (LORA) {
        memory.lora.barriers.init(1, kConsumers / 32);
        memory.lora.items.barriers.init(1, 1);
    }
    if (kGathers) memory.gather_items.barriers.init(1, kGatherWarps);
    if (kBoth) memory.written_items.init();
    barrier_init_fence();
}
