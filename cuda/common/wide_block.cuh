// What a block of the wide grouped GEMM has: its sizes, and its shared memory with rings and barriers.
#pragma once

#include "common/cluster.cuh"
#include "common/gemm_args.cuh"
#include "common/gemm_groups.cuh"
#include "common/layout.cuh"
#include "common/ring.cuh"

static_assert(BLOCK_M == 128, "a row tile is two warpgroups");
static_assert(MAX_N == 128 || MAX_N == 160 || MAX_N == 256, "a wide token tile");
static_assert(EPILOGUE == EPILOGUE_ACTIVATION || EPILOGUE == EPILOGUE_DOWN, "nothing is left to other kernels");

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2 * kWarpgroup;
constexpr int kLoraWarps = LORA ? 3 : 0;  // that bring B and h
constexpr int kThreads = kConsumers + 32 * (1 + kLoraWarps);
constexpr int kWeightBytes = BLOCK_M * kBlockBytes;
constexpr int kTokenBytes = MAX_N * kBlockBytes;  // of one K-block
constexpr int kStageBytes = kWeightBytes + kTokenBytes;

// Finished sums on their way out, of one warpgroup: activations of its 32 features, or down rows of its 64, the latter
// in two pieces of kPiece tokens that take turns.
constexpr int kPiece = 64;
constexpr int kStagingBytes = IS_DOWN ? 2 * kPiece * kBlockBytes : MAX_N * kBlockBytes / 2;

// A LoRA stage holds columns of h, [MAX_N, 8] each, and of as many ranks the row tile's fragments of B.
constexpr int kProjections = IS_DOWN ? 1 : 2;
constexpr int kColumnBytes = MAX_N * kHRowBytes;
constexpr int kColumns = 8;                                  // of a stage
constexpr int kColumnsPerStep = 2;                           // 16 elements along K
constexpr int kLoraBlocks = kColumns / kProjections;         // blocks of ranks in a stage
constexpr int kStepBlocks = kColumnsPerStep / kProjections;  // and in a step
constexpr int kStepPairs = kColumns / kColumnsPerStep / 2;   // pairs of steps, which are multiplied together
static_assert(kColumns * kColumnBytes <= kTokenBytes && kLoraBlocks * kTileFragmentBytes <= kWeightBytes);
static_assert(kStepPairs == 2 && kLoraWarps <= STAGES && MAX_N % 32 == 0);
constexpr int kFullArrivals = 1 + LORA;

// What a LoRA stage holds: so many blocks of ranks; how many of the tile's rows each pair of its steps is multiplied
// over, h being undefined behind the instruction that holds those; and whether it is the tile's last one.
struct alignas(8) LoraStage {
    int16_t rows[kStepPairs];
    int16_t blocks;
    int16_t last;
};

// Items that the first block of a cluster may take before the second has read them: it is ahead by as many as a ring
// can hold, were each a single stage, and by two.
constexpr int kSent = STAGES + 2;

struct WideRing : Barriers<STAGES> {
    TokenTile tile[STAGES];  // of the item that a LoRA stage or the first K-block belongs to
    uint64_t sent[kSent];
    LoraStage lora[STAGES];
    int item[STAGES];  // kNoItem ends the work
    int next[kSent];
    // LORA: items that have adapters' stages, told ahead; and where in the ring those begin, once it is their turn.
    Announcements lora_items;
    Announcements lora_starts;
};

struct WideMemory {
    uint8_t* stages;
    uint8_t* staging;
    WideRing& ring;
};

constexpr int kHalfWidth = MAX_N / 2;  // the one of two widths of the adapters' products that is not MAX_N

// Where everything lies in a block's shared memory; the twin of GemmConfig.shared_bytes in graphs/gemm_config.py.
__device__ __forceinline__ WideMemory carve(uint8_t* shared) {
    uint8_t* staging = shared + STAGES * kStageBytes;
    uint8_t* ring = staging + 2 * kStagingBytes;
    return WideMemory{shared, staging, *reinterpret_cast<WideRing*>(ring)};
}

// One thread does this; a cluster-wide barrier must follow.
__device__ __forceinline__ void init_barriers(const WideMemory& memory) {
    // Full by whoever fills a stage, and with LORA by the warp that passes over it or fills it in its turn, so that no
    // stage is a round ahead of that warp; empty for both blocks' warps: tokens come to both at once.
    memory.ring.init(kFullArrivals, kCluster * kConsumers / 32);
    for (int i = 0; i < kSent; ++i) {
        barrier_init(&memory.ring.sent[i], 1);
        barrier_expect(&memory.ring.sent[i], sizeof(int));
    }
    if (LORA) {
        memory.ring.lora_items.barriers.init(1, kLoraWarps);
        memory.ring.lora_starts.barriers.init(1, kLoraWarps);
    }
    barrier_init_fence();
}

// An item is a token tile and two row tiles, one for each block of the cluster. Of an odd number of row tiles the last
// is multiplied by both blocks, and stored by one.
__device__ __forceinline__ int row_tile_pairs(const Gemm& gemm) { return ceil_div(gemm.row_tiles, kCluster); }
__device__ __forceinline__ int row_tile_of(const Gemm& gemm, int item, int rank) {
    return item % row_tile_pairs(gemm) * kCluster + rank;
}
__device__ __forceinline__ int multiplied_row_tile_of(const Gemm& gemm, int item, int rank) {
    return min(row_tile_of(gemm, item, rank), gemm.row_tiles - 1);
}
