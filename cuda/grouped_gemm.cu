// Multiplies each expert's tokens by its weights, every weight byte streamed once, and finishes the tile.
//
// Weights are the M operand (BLOCK_M rows of a swizzled BlockMajorK matrix: one contiguous run per K-block),
// tokens the N operand. One warp keeps a ring of STAGES K-blocks in flight with bulk copies, across tiles;
// BLOCK_M / 64 warpgroups multiply. The grid is persistent over (token tile, row tile) items, which the blocks
// take from a ticket as they go: who computes a tile does not change its bits. With LORA a tile's last stages are
// its adapter groups' B and h, and the delta joins the sum before the epilogue.
//
// Compile-time: BLOCK_M (64 or 128), MAX_N (tokens of the largest tile), STAGES, EPILOGUE, LORA.
#include "common/activation.cuh"
#include "common/barrier.cuh"
#include "common/layer_args.cuh"
#include "common/layout.cuh"
#include "common/lora.cuh"
#include "common/tiles.cuh"
#include "common/width.cuh"

#define EPILOGUE_GATE_UP 0     // gate and up as fp32 pairs, [P, I]
#define EPILOGUE_ACTIVATION 1  // silu(gate) * up as the down projection's operand, BlockMajorK [I/64, P, 64]
#define EPILOGUE_DOWN 2        // bf16 rows, [P, H]
#define EPILOGUE_DOWN_FP32 3   // fp32 rows, [P, H]
#define IS_DOWN (EPILOGUE == EPILOGUE_DOWN || EPILOGUE == EPILOGUE_DOWN_FP32)

static_assert(BLOCK_M == 64 || BLOCK_M == 128, "a row tile is one or two warpgroups");
static_assert(MAX_N % 8 == 0 && MAX_N <= 256, "a token tile is a multiple of 8 up to 256");
static_assert(!LORA || EPILOGUE == EPILOGUE_ACTIVATION || EPILOGUE == EPILOGUE_DOWN, "the others leave LoRA apart");

constexpr int kConsumers = 2 * BLOCK_M;
constexpr int kWeightBytes = BLOCK_M * kBlockBytes;
constexpr int kTokenBytes = round_up(MAX_N * kBlockBytes, 1024);
constexpr int kStageBytes = kWeightBytes + kTokenBytes;
[[maybe_unused]] constexpr int kTileFeatures = BLOCK_M / 2;  // features of one gate_up tile
constexpr int kStagingBytes = EPILOGUE == EPILOGUE_ACTIVATION ? kTokenBytes : 0;
constexpr int kNoItem = -1;

// LoRA stages: blocks of eight ranks, each BLOCK_M / 16 fragments of B and one run of h.
constexpr int kProjections = IS_DOWN ? 1 : 2;
constexpr int kTileFragmentBytes = BLOCK_M / 16 * kFragmentBytes;
constexpr int kStageRankBlocks = 8 / kProjections;

struct StageInfo {
    int item;         // the item that a stage belongs to; kNoItem ends the work
    int lora_stages;  // that follow the item's K-blocks
    int first_row;    // of a LoRA stage: its group's rows within the tile,
    int last_row;
    int rank_blocks;  // and its blocks of ranks
};

struct Ring {
    uint64_t full[STAGES];
    uint64_t empty[STAGES];
    StageInfo info[STAGES];
};

struct Cursor {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance(int stages = 1) {
        stage += stages;
        if (stage >= STAGES) {
            stage -= STAGES;
            parity ^= 1;
        }
    }
};

struct Gemm {
    const LayerArgs* layer;
    const uint8_t* weights;   // [experts, k_blocks, row_tiles * BLOCK_M, 64]
    const uint8_t* tokens;    // [k_blocks, rows, 64]
    const TokenTile* tiles;
    const LoraGroup* groups;
    const bf16* h;            // [R/8, rows, projections, 8]
    int* ticket;              // items taken beyond the first of each block; zero at launch
    int num_items;
    int num_experts;
    int k_blocks;
    int row_tiles;
    int rows;
    int max_rank;
    void* out;
    int out_stride;
};

// One adapter group of a tile; each lane of the producer holds one.
struct GroupSource {
    const uint8_t* b = nullptr;  // this row tile's fragments of the first block of ranks
    int first_row = 0;           // within the tile
    int last_row = 0;
    int rank_blocks = 0;

    GroupSource() = default;
    __device__ __forceinline__ GroupSource(const Gemm& gemm, const TokenTile& tile, int row_tile, int index) {
        if (index >= tile.groups >> 16) return;
        const LoraGroup group = gemm.groups[(tile.groups & 0xffff) + index];
        const LoraEntry entry = gemm.layer->lora[group.slot * gemm.num_experts + group.expert];
        first_row = max(group.first_row - tile.first_row, 0);
        last_row = min(group.first_row + group.num_rows - tile.first_row, tile.num_rows);
        const int rank = IS_DOWN ? entry.rank[2] : max(entry.rank[0], entry.rank[1]);
        rank_blocks = first_row < last_row ? ceil_div(rank, kRankBlock) : 0;
        const int source = IS_DOWN && entry.shared_b ? 0 : group.expert;
        const int64_t fragments = int64_t(gemm.row_tiles) * kTileFragmentBytes;
        b = (IS_DOWN ? gemm.layer->lora_b_down : gemm.layer->lora_b_gate_up) +
            (int64_t(group.slot) * gemm.num_experts + source) * fragments * (gemm.max_rank / kRankBlock) +
            int64_t(row_tile) * kTileFragmentBytes;
    }
    __device__ __forceinline__ GroupSource of_lane(int lane) const {
        GroupSource other;
        other.b = reinterpret_cast<const uint8_t*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(b), lane));
        other.first_row = __shfl_sync(~0u, first_row, lane);
        other.last_row = __shfl_sync(~0u, last_row, lane);
        other.rank_blocks = __shfl_sync(~0u, rank_blocks, lane);
        return other;
    }
};

struct Source {
    const uint8_t* weights;
    const uint8_t* tokens;
    uint32_t token_bytes;
    int row_tile;
    int lora_stages = 0;
    TokenTile tile;
    GroupSource group;

    __device__ __forceinline__ Source(const Gemm& gemm, int item) {
        tile = gemm.tiles[item / gemm.row_tiles];
        row_tile = item % gemm.row_tiles;
        weights = gemm.weights + (int64_t(tile.expert) * gemm.k_blocks * gemm.row_tiles + row_tile) * kWeightBytes;
        tokens = gemm.tokens + int64_t(tile.first_row) * kBlockBytes;
        token_bytes = round_up(tile.num_rows, kRowAlign) * kBlockBytes;
#if LORA
        const int lane = threadIdx.x % 32;
        group = GroupSource(gemm, tile, row_tile, lane);
        lora_stages = ceil_div(group.rank_blocks, kStageRankBlocks);
        for (int index = lane + 32; index < tile.groups >> 16; index += 32)
            lora_stages += ceil_div(GroupSource(gemm, tile, row_tile, index).rank_blocks, kStageRankBlocks);
        lora_stages = __reduce_add_sync(~0u, lora_stages);
#endif
    }
};

// The producer's warp; its lanes go together, the first one issues.
struct Producer {
    const Gemm& gemm;
    uint8_t* stages;
    Ring& ring;
    const uint64_t policy = evict_first_policy();
    const bool first_lane = threadIdx.x % 32 == 0;

    __device__ __forceinline__ void load_weights(const Source& source, int item, int block, int stage) {
        ring.info[stage].item = item;
        ring.info[stage].lora_stages = source.lora_stages;
        barrier_expect(&ring.full[stage], kWeightBytes + source.token_bytes);
        bulk_load(stages + stage * kStageBytes, source.weights + int64_t(block) * gemm.row_tiles * kWeightBytes,
                  kWeightBytes, &ring.full[stage], policy);
    }
    __device__ __forceinline__ void load_tokens(const Source& source, int block, int stage) {
        bulk_load(stages + stage * kStageBytes + kWeightBytes, source.tokens + int64_t(block) * gemm.rows * kBlockBytes,
                  source.token_bytes, &ring.full[stage], policy);
    }
    // Weights do not depend on the kernels before: a first ring of them is under way while those finish.
    __device__ __forceinline__ int start(const Source& source, int item) {
        const int blocks = min(STAGES, gemm.k_blocks);
        if (first_lane)
            for (int block = 0; block < blocks; ++block) load_weights(source, item, block, block);
        grid_dependency_wait();
        if (first_lane)
            for (int block = 0; block < blocks; ++block) load_tokens(source, block, block);
        return blocks;
    }
    __device__ __forceinline__ void load(const Source& source, int item, int first, int last, Cursor& cursor) {
        for (int block = first; block < last; ++block) {
            if (first_lane) {
                barrier_wait(&ring.empty[cursor.stage], cursor.parity ^ 1);
                load_weights(source, item, block, cursor.stage);
                load_tokens(source, block, cursor.stage);
            }
            cursor.advance();
        }
        __syncwarp();
    }
    // One stage of a group: `blocks` blocks of ranks from `first_block` on, a lane each.
    __device__ __forceinline__ void load_ranks(const Source& source, const GroupSource& group, int first_block,
                                               int blocks, int stage) {
        constexpr int kRowBytes = kProjections * kHRowBytes;
        const int padded_rows = round_up(source.tile.num_rows, kRowAlign);
        if (first_lane) {
            ring.info[stage].first_row = group.first_row;
            ring.info[stage].last_row = group.last_row;
            ring.info[stage].rank_blocks = blocks;
            barrier_expect(&ring.full[stage], blocks * (kTileFragmentBytes + padded_rows * kRowBytes));
        }
        __syncwarp();
        const int lane = threadIdx.x % 32;
        if (lane < blocks) {
            const int block = first_block + lane;
            uint8_t* target = stages + stage * kStageBytes;
            bulk_load(target + lane * kTileFragmentBytes,
                      group.b + int64_t(block) * gemm.row_tiles * kTileFragmentBytes, kTileFragmentBytes,
                      &ring.full[stage], policy);
            bulk_load(target + kWeightBytes + lane * padded_rows * kRowBytes,
                      gemm.h + h_offset(block, source.tile.first_row, 0, gemm.rows, kProjections),
                      padded_rows * kRowBytes, &ring.full[stage], policy);
        }
        __syncwarp();
    }
    __device__ __forceinline__ void load_groups(const Source& source, Cursor& cursor) {
        const int num_groups = source.tile.groups >> 16;
        for (int index = 0; index < num_groups; ++index) {
            const GroupSource group = index < 32 ? source.group.of_lane(index)
                                                 : GroupSource(gemm, source.tile, source.row_tile, index);
            for (int block = 0; block < group.rank_blocks; block += kStageRankBlocks) {
                if (first_lane) barrier_wait(&ring.empty[cursor.stage], cursor.parity ^ 1);
                __syncwarp();
                load_ranks(source, group, block, min(kStageRankBlocks, group.rank_blocks - block), cursor.stage);
                cursor.advance();
            }
        }
    }
    __device__ __forceinline__ int next_item() {
        int taken = 0;
        if (first_lane) taken = atomicAdd(gemm.ticket, 1);
        return gridDim.x + __shfl_sync(~0u, taken, 0);
    }
    __device__ __forceinline__ void run() {
        Cursor cursor;
        int item = blockIdx.x;
        if (item < gemm.num_items) {
            Source source(gemm, item);
            int block = start(source, item);
            cursor.advance(block);
            while (true) {
                // The next ticket and tile are fetched while this tile's blocks are being issued.
                const int next = next_item();
                const int half = max(block, gemm.k_blocks / 2);
                load(source, item, block, half, cursor);
                const Source upcoming(gemm, min(next, gemm.num_items - 1));
                load(source, item, half, gemm.k_blocks, cursor);
#if LORA
                load_groups(source, cursor);
#endif
                if (next >= gemm.num_items) break;
                item = next;
                source = upcoming;
                block = 0;
            }
        } else {
            grid_dependency_wait();
        }
        if (!first_lane) return;
        barrier_wait(&ring.empty[cursor.stage], cursor.parity ^ 1);
        ring.info[cursor.stage].item = kNoItem;
        barrier_arrive(&ring.full[cursor.stage]);
    }
};

struct Consumer {
    const uint8_t* stages;
    Ring& ring;
    Cursor cursor;

    __device__ __forceinline__ void release(int stage) {
        if (threadIdx.x % 32 == 0) barrier_arrive(&ring.empty[stage]);
    }

    template <int N>
    __device__ __forceinline__ void multiply(float (&acc)[N / 2], int k_blocks) {
        const int warpgroup = threadIdx.x / 128;
        int previous = -1;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[i] = 0.0f;
        for (int block = 0; block < k_blocks; ++block) {
            barrier_wait(&ring.full[cursor.stage], cursor.parity);
            const uint32_t stage = shared_address(stages) + cursor.stage * kStageBytes;
            const uint64_t a = operand_descriptor(stage + warpgroup * 64 * kBlockBytes);
            const uint64_t b = operand_descriptor(stage + kWeightBytes);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kBlockK / 16; ++k) Wgmma<N>::multiply(acc, a + 2 * k, b + 2 * k);
            wgmma_commit();
            wgmma_wait<1>();
            if (previous >= 0) release(previous);
            previous = cursor.stage;
            cursor.advance();
        }
        wgmma_wait<0>();
        release(previous);
    }

    // delta += B h over one stage's blocks of ranks; rows of other groups count as zero.
    template <int N>
    __device__ __forceinline__ void expand_stage(float (&delta)[N / 2], const StageInfo& info, int padded_rows) {
        constexpr int kRowBytes = kProjections * kHRowBytes;
        const int lane = volatile_lane();
        const uint8_t* fragments = stages + cursor.stage * kStageBytes + threadIdx.x / 32 * kFragmentBytes + lane * 8;
        const uint8_t* h = stages + cursor.stage * kStageBytes + kWeightBytes + lane / 4 * kRowBytes + lane % 4 * 4;
        for (int block = 0; block < info.rank_blocks; ++block) {
            const uint2 b = *reinterpret_cast<const uint2*>(fragments + block * kTileFragmentBytes);
#pragma unroll
            for (int j = 0; j < N / 8; ++j) {
                const int row = 8 * j + lane / 4;
                const bool mine = row >= info.first_row && row < info.last_row;
                const uint8_t* values = h + block * padded_rows * kRowBytes + 8 * j * kRowBytes;
                const uint32_t low = mine ? *reinterpret_cast<const uint32_t*>(values) : 0;
                float(&sums)[4] = reinterpret_cast<float(&)[4]>(delta[4 * j]);
#if IS_DOWN
                expand_down(sums, b, low);
#else
                const uint32_t high = mine ? *reinterpret_cast<const uint32_t*>(values + kHRowBytes) : 0;
                expand_gate_up(sums, b, low, high);
#endif
            }
        }
    }

    template <int N>
    __device__ __forceinline__ void expand(float (&delta)[N / 2], int num_stages, int padded_rows) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) delta[i] = 0.0f;
        for (int i = 0; i < num_stages; ++i) {
            barrier_wait(&ring.full[cursor.stage], cursor.parity);
            expand_stage<N>(delta, ring.info[cursor.stage], padded_rows);
            __syncwarp();
            release(cursor.stage);
            cursor.advance();
        }
#pragma unroll
        for (int i = 0; i < N / 2; ++i) delta[i] = round_to_bf16(delta[i]);
    }
};

// The epilogues; `warp_row` is the first of this warp's 16 rows within the tile.
template <int N>
__device__ __forceinline__ void store_gate_up(const float (&acc)[N / 2], const Gemm& gemm, const TokenTile& tile,
                                              int row_tile, int warp_row) {
    const int lane = volatile_lane();
    const int feature = row_tile * kTileFeatures + gate_up_feature(warp_row, lane / 4);
    float2* out = static_cast<float2*>(gemm.out) + int64_t(tile.first_row) * gemm.out_stride + feature;
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const int token = 8 * j + 2 * (lane % 4) + t;
            if (token < tile.num_rows)
                out[int64_t(token) * gemm.out_stride] = float2{acc[4 * j + 2 + t], acc[4 * j + t]};
        }
}

template <int N>
__device__ __forceinline__ void store_down(const float (&acc)[N / 2], const Gemm& gemm, const TokenTile& tile,
                                           int row_tile, int warp_row) {
    const int lane = volatile_lane();
    const int feature = row_tile * BLOCK_M + down_feature(warp_row, lane / 4);
    const int64_t first = (int64_t(tile.first_row) * gemm.out_stride + feature) / 2;
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const int token = 8 * j + 2 * (lane % 4) + t;
            if (token >= tile.num_rows) continue;
            const int64_t index = first + int64_t(token) * (gemm.out_stride / 2);
            if (EPILOGUE == EPILOGUE_DOWN_FP32)
                static_cast<float2*>(gemm.out)[index] = float2{acc[4 * j + t], acc[4 * j + 2 + t]};
            else
                static_cast<uint32_t*>(gemm.out)[index] = pack_bf16(acc[4 * j + t], acc[4 * j + 2 + t]);
        }
}

template <int N>
__device__ __forceinline__ void store_activation(const float (&acc)[N / 2], const float (&delta)[N / 2],
                                                 const Gemm& gemm, const TokenTile& tile, int row_tile, int warp_row,
                                                 bf16* staging) {
    const int lane = volatile_lane();
    const int feature = (row_tile * kTileFeatures) % kBlockK + gate_up_feature(warp_row, lane / 4);
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const int token = 8 * j + 2 * (lane % 4) + t;
            const int gate = 4 * j + 2 + t;
            const int up = 4 * j + t;
            const float act = gated_silu(acc[gate], acc[up], LORA ? delta[gate] : 0.0f, LORA ? delta[up] : 0.0f);
            staging[block_major_offset(token, feature, 0)] = to_bf16(act);
        }
    named_barrier_sync(1, kConsumers);
    // Rows of the staging tile are laid out as in global memory: copy this tile's chunks of each.
    constexpr int kChunks = kTileFeatures / kChunk;
    const int first_chunk = (row_tile * kTileFeatures) % kBlockK / kChunk;
    bf16* out = static_cast<bf16*>(gemm.out) +
                (int64_t(row_tile * kTileFeatures / kBlockK) * gemm.rows + tile.first_row) * kBlockK;
    for (int i = threadIdx.x; i < tile.num_rows * kChunks; i += kConsumers) {
        const int row = i / kChunks;
        const int offset = row * kBlockK + (((first_chunk + i % kChunks) ^ (row & 7)) * kChunk);
        *reinterpret_cast<uint4*>(out + offset) = *reinterpret_cast<const uint4*>(staging + offset);
    }
    named_barrier_sync(1, kConsumers);
}

template <int N>
__device__ __forceinline__ void consume_tile(Consumer& consumer, const Gemm& gemm, const TokenTile& tile, int row_tile,
                                             int lora_stages, bf16* staging) {
    float acc[N / 2];
    [[maybe_unused]] float delta[LORA ? N / 2 : 1];
    consumer.multiply<N>(acc, gemm.k_blocks);
    const int warp_row = threadIdx.x / 32 * 16;
#if LORA
    consumer.expand<N>(delta, lora_stages, round_up(tile.num_rows, kRowAlign));
#endif
#if EPILOGUE == EPILOGUE_GATE_UP
    store_gate_up<N>(acc, gemm, tile, row_tile, warp_row);
#elif EPILOGUE == EPILOGUE_ACTIVATION
    store_activation<N>(acc, reinterpret_cast<float(&)[N / 2]>(delta), gemm, tile, row_tile, warp_row, staging);
#else
#if LORA
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[i] = __fadd_rn(acc[i], delta[i]);
#endif
    store_down<N>(acc, gemm, tile, row_tile, warp_row);
#endif
}

extern "C" __global__ void __launch_bounds__(kConsumers + 32, 1)
    grouped_gemm(const LayerArgs* layer, const uint8_t* tokens, const TokenTile* tiles, const int* num_tiles,
                 const LoraGroup* groups, const bf16* h, int* ticket, void* out, int num_experts, int k_blocks,
                 int row_tiles, int rows, int max_rank, int out_stride) {
    extern __shared__ __align__(1024) uint8_t shared[];
    uint8_t* stages = shared;
    bf16* staging = reinterpret_cast<bf16*>(shared + STAGES * kStageBytes);
    Ring& ring = *reinterpret_cast<Ring*>(shared + STAGES * kStageBytes + kStagingBytes);

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&ring.full[i], 1);
            barrier_init(&ring.empty[i], kConsumers / 32);
        }
        barrier_init_fence();
    }
    __syncthreads();
    // The GEMM may start while its predecessor runs: what it reads before its wait, the sort wrote, and the
    // predecessor let it start only after its own wait for that.
    grid_dependency_launch();

    const Gemm gemm{layer, IS_DOWN ? layer->down : layer->gate_up,
                    tokens, tiles,
                    groups, h,
                    ticket, *num_tiles * row_tiles,
                    num_experts, k_blocks,
                    row_tiles, rows,
                    max_rank, out,
                    out_stride};
    if (threadIdx.x >= kConsumers) {
        Producer{gemm, stages, ring}.run();
        return;
    }
    grid_dependency_wait();
    Consumer consumer{stages, ring};
    while (true) {
        barrier_wait(&ring.full[consumer.cursor.stage], consumer.cursor.parity);
        const StageInfo& info = ring.info[consumer.cursor.stage];
        const int item = info.item;
        if (item == kNoItem) break;
        const int lora_stages = info.lora_stages;
        const TokenTile tile = gemm.tiles[item / row_tiles];
        with_tile_width(tile.num_rows, [&]<int N>(Width<N>) {
            consume_tile<N>(consumer, gemm, tile, item % row_tiles, lora_stages, staging);
        });
    }
}
