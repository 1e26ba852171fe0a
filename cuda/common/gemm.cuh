// A grouped GEMM: each expert's tokens by its weights, every weight byte streamed once, the tile finished on the way
// out.
//
// Weights are the M operand (BLOCK_M rows of a swizzled BlockMajorK matrix: one contiguous run per K-block),
// tokens the N operand. One warp keeps a ring of STAGES K-blocks in flight with bulk copies, across tiles;
// BLOCK_M / 64 warpgroups multiply. The grid is persistent over (token tile, row tile) items, which the blocks
// take from a ticket as they go: who computes a tile does not change its bits. With LORA a second warp brings B and h
// of each tile's adapter groups through a short ring of its own, and the delta joins the sum before the epilogue.
//
// Compile-time: BLOCK_M (64 or 128), MAX_N (tokens of the largest tile), STAGES, EPILOGUE, LORA, DIRECT (tiles and
// tokens come from shared memory: direct_gemm.cu).
#pragma once

#include "common/activation.cuh"
#include "common/barrier.cuh"
#include "common/direct.cuh"
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
static_assert(MAX_N % 8 == 0 && MAX_N <= 128, "a token tile is a multiple of 8 up to 128");
static_assert(!DIRECT || (EPILOGUE == EPILOGUE_ACTIVATION && BLOCK_M == 128 && MAX_N <= 16), "few tokens, gate_up");
static_assert(!LORA || EPILOGUE == EPILOGUE_ACTIVATION || EPILOGUE == EPILOGUE_DOWN, "the others leave LoRA apart");

constexpr int kConsumers = 2 * BLOCK_M;
constexpr int kThreads = kConsumers + 32 + (LORA ? 32 : 0);
constexpr int kWeightBytes = BLOCK_M * kBlockBytes;
constexpr int kTokenBytes = round_up(MAX_N * kBlockBytes, 1024);  // of one K-block
constexpr int kStageBytes = kWeightBytes + (DIRECT ? 0 : kTokenBytes);
[[maybe_unused]] constexpr int kTileFeatures = BLOCK_M / 2;  // features of one gate_up tile
constexpr int kStagingBytes = EPILOGUE == EPILOGUE_ACTIVATION ? kTokenBytes : 0;
constexpr int kNoItem = -1;

// A LoRA stage: up to kEntries fragments-by-eight-ranks of B, and h of kHBlocks blocks of ranks for all tokens.
constexpr int kProjections = IS_DOWN ? 1 : 2;
constexpr int kHTokenBytes = kProjections * kHRowBytes;
constexpr int kTileFragmentBytes = BLOCK_M / 16 * kFragmentBytes;
constexpr int kEntries = 8;
constexpr int kHBlocks = MAX_N > 64 ? 4 : 8;
constexpr int kLoraStages = LORA ? 2 : 0;
constexpr int kLoraStageBytes = kEntries * kTileFragmentBytes + kHBlocks * MAX_N * kHTokenBytes;

template <int kStages>
struct Barriers {
    uint64_t full[kStages];
    uint64_t empty[kStages];
    __device__ __forceinline__ void init() {
        for (int i = 0; i < kStages; ++i) {
            barrier_init(&full[i], 1);
            barrier_init(&empty[i], kConsumers / 32);
        }
    }
};

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
struct LoraRing {
    Barriers<2> barriers;
    uint64_t announced[2];  // items that the first warp has taken, for the second,
    uint64_t noted[2];      // which has read them
    int item[2];
    int num_entries[2];
    int last[2];  // whether this is the tile's last LoRA stage; every tile has one at least
    LoraStageEntry entries[2][kEntries];
};

template <int kStages>
struct Cursor {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance(int stages = 1) {
        stage += stages;
        if (stage >= kStages) {
            stage -= kStages;
            parity ^= 1;
        }
    }
};

struct Memory {
    uint8_t* stages;
    uint8_t* hidden;  // DIRECT: [k_blocks, MAX_N, 64], swizzled
    DirectTiles direct;
    uint8_t* lora_stages;
    bf16* staging;
    Ring& ring;
    LoraRing& lora;
};

struct Gemm {
    const LayerArgs* layer;
    const uint8_t* weights;  // [experts, k_blocks, row_tiles * BLOCK_M, 64]
    const uint8_t* tokens;   // [k_blocks, rows, 64]
    const TokenTile* tiles;
    const LoraGroup* groups;
    const bf16* h;  // [R/8, rows, projections, 8]
    int* ticket;    // items taken beyond the first of each block; zero at launch
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

__device__ __forceinline__ TokenTile tile_of(const Gemm& gemm, const Memory& memory, int item) {
    const int index = item / gemm.row_tiles;
    return DIRECT ? memory.direct[index] : gemm.tiles[index];
}

struct Source {
    const uint8_t* weights;
    const uint8_t* tokens;
    uint32_t token_bytes;

    __device__ __forceinline__ Source(const Gemm& gemm, const Memory& memory, int item) {
        const TokenTile tile = tile_of(gemm, memory, item);
        const int row_tile = item % gemm.row_tiles;
        weights = gemm.weights + (int64_t(tile.expert) * gemm.k_blocks * gemm.row_tiles + row_tile) * kWeightBytes;
        tokens = gemm.tokens + int64_t(tile.first_row) * kBlockBytes;
        token_bytes = DIRECT ? 0 : round_up(tile.num_rows, kRowAlign) * kBlockBytes;
    }
};

// One thread that keeps the ring of K-blocks full.
struct Producer {
    const Gemm& gemm;
    const Memory& memory;
    Cursor<STAGES> cursor;
    Cursor<2> announcement;
    const uint64_t policy = evict_first_policy();

    __device__ __forceinline__ void load_weights(const Source& source, int item, int block, int stage) {
        uint64_t* full = &memory.ring.barriers.full[stage];
        memory.ring.item[stage] = item;
        barrier_expect(full, kWeightBytes + source.token_bytes);
        bulk_load(memory.stages + stage * kStageBytes, source.weights + int64_t(block) * gemm.row_tiles * kWeightBytes,
                  kWeightBytes, full, policy);
    }
    __device__ __forceinline__ void load_tokens(const Source& source, int block, int stage) {
        if (DIRECT) return;
        bulk_load(memory.stages + stage * kStageBytes + kWeightBytes,
                  source.tokens + int64_t(block) * gemm.rows * kBlockBytes, source.token_bytes,
                  &memory.ring.barriers.full[stage], policy);
    }
    // Weights do not depend on the kernels before: a first ring of them is under way while those finish. With LORA the
    // kernel before is the shrink, which had the tokens itself: only the adapters' warp must wait for its end.
    __device__ __forceinline__ int start(const Source& source, int item) {
        if (DIRECT) return 0;
        const int blocks = min(STAGES, gemm.k_blocks);
        for (int block = 0; block < blocks; ++block) load_weights(source, item, block, block);
        if (!LORA) grid_dependency_wait();
        for (int block = 0; block < blocks; ++block) load_tokens(source, block, block);
        cursor.advance(blocks);
        return blocks;
    }
    __device__ __forceinline__ void load(const Source& source, int item, int first, int last) {
        for (int block = first; block < last; ++block) {
            barrier_wait(&memory.ring.barriers.empty[cursor.stage], cursor.parity ^ 1);
            load_weights(source, item, block, cursor.stage);
            load_tokens(source, block, cursor.stage);
            cursor.advance();
        }
    }
    __device__ __forceinline__ void announce(int item) {
#if LORA
        barrier_wait(&memory.lora.noted[announcement.stage], announcement.parity ^ 1);
        memory.lora.item[announcement.stage] = item;
        barrier_arrive(&memory.lora.announced[announcement.stage]);
        announcement.advance();
#endif
    }
    // Waits for the kernels before. The next one may read early what they made: DIRECT lets it start only now.
    __device__ __forceinline__ void depend() {
        grid_dependency_wait();
        if (DIRECT) grid_dependency_launch();
    }
    __device__ __forceinline__ void run() {
        int item = blockIdx.x;
        if (item < gemm.num_items) {
            announce(item);
            Source source(gemm, memory, item);
            int block = start(source, item);
            if (DIRECT) {
                // The tickets are the sort's: by the time that half a tile is under way it has ended.
                block = gemm.k_blocks / 2;
                load(source, item, 0, block);
                depend();
            }
            while (true) {
                // The next ticket and tile are fetched while this tile's blocks are being issued.
                const int next = gridDim.x + atomicAdd(gemm.ticket, 1);
                const int half = max(block, gemm.k_blocks / 2);
                load(source, item, block, half);
                const Source upcoming(gemm, memory, min(next, gemm.num_items - 1));
                load(source, item, half, gemm.k_blocks);
                if (next >= gemm.num_items) break;
                announce(next);
                item = next;
                source = upcoming;
                block = 0;
            }
        } else {
            depend();
        }
        announce(kNoItem);
        barrier_wait(&memory.ring.barriers.empty[cursor.stage], cursor.parity ^ 1);
        memory.ring.item[cursor.stage] = kNoItem;
        barrier_arrive(&memory.ring.barriers.full[cursor.stage]);
    }
};

// The warp that brings the adapters' part of each announced item; its lanes go together.
struct LoraProducer {
    const Gemm& gemm;
    const Memory& memory;
    Cursor<2> cursor;
    Cursor<2> announcement;
    const uint64_t policy = evict_first_policy();
    const int lane = threadIdx.x % 32;

    __device__ __forceinline__ int next_item() {
        LoraRing& lora = memory.lora;
        barrier_wait(&lora.announced[announcement.stage], announcement.parity);
        const int item = lora.item[announcement.stage];
        __syncwarp();
        if (lane == 0) barrier_arrive(&lora.noted[announcement.stage]);
        announcement.advance();
        return item;
    }
    // Entries of one stage: a lane an entry of B, a lane a block of h. None: the tile's end alone.
    __device__ __forceinline__ void load_stage(const TokenTile& tile, const GroupSource& mine, int block,
                                               int num_entries, int first_h_block, int h_blocks, bool last) {
        LoraRing& lora = memory.lora;
        const int stage = cursor.stage;
        const int padded_rows = round_up(tile.num_rows, kRowAlign);
        barrier_wait(&lora.barriers.empty[stage], cursor.parity ^ 1);
        if (lane < num_entries)
            lora.entries[stage][lane] =
                LoraStageEntry{int16_t(mine.first_row), int16_t(mine.last_row), block - first_h_block};
        if (lane == 0) {
            lora.num_entries[stage] = num_entries;
            lora.last[stage] = last;
        }
        __syncwarp();
        uint64_t* full = &lora.barriers.full[stage];
        if (lane == 0) barrier_expect(full, num_entries * kTileFragmentBytes + h_blocks * padded_rows * kHTokenBytes);
        __syncwarp();
        uint8_t* target = memory.lora_stages + stage * kLoraStageBytes;
        if (lane < num_entries)
            bulk_load(target + lane * kTileFragmentBytes, mine.b + int64_t(block) * gemm.row_tiles * kTileFragmentBytes,
                      kTileFragmentBytes, full, policy);
        if (lane < h_blocks)
            bulk_load(target + kEntries * kTileFragmentBytes + lane * padded_rows * kHTokenBytes,
                      gemm.h + h_offset(first_h_block + lane, tile.first_row, 0, gemm.rows, kProjections),
                      padded_rows * kHTokenBytes, full, policy);
        cursor.advance();
    }
    // Entries are the (group, block of ranks) pairs whose block lies in one chunk of kHBlocks, numbered group by group.
    __device__ __forceinline__ void load_tile(const TokenTile& tile, int row_tile) {
        const int num_groups = tile.groups >> 16;
        for (int batch = 0; batch < num_groups; batch += 32) {
            const GroupSource group(gemm, tile, row_tile, batch + lane);
            const int most = __reduce_max_sync(~0u, group.rank_blocks);
            for (int first = 0; first < most; first += kHBlocks) {
                const int mine = min(max(group.rank_blocks - first, 0), kHBlocks);
                int end = mine;
#pragma unroll
                for (int step = 1; step < 32; step *= 2) {
                    const int lower = __shfl_up_sync(~0u, end, step);
                    if (lane >= step) end += lower;
                }
                const int total = __shfl_sync(~0u, end, 31);
                for (int entry = 0; entry < total; entry += kEntries) {
                    // This lane's entry belongs to the first group that ends beyond it.
                    int owner = 0;
                    for (int other = 0; other < min(num_groups - batch, 32) - 1; ++other)
                        owner += __shfl_sync(~0u, end, other) <= entry + lane;
                    const int block = first + entry + lane - __shfl_sync(~0u, end - mine, owner);
                    const bool last = batch + 32 >= num_groups && first + kHBlocks >= most && entry + kEntries >= total;
                    load_stage(tile, group.of_lane(owner), block, min(kEntries, total - entry), first,
                               min(most - first, kHBlocks), last);
                }
            }
            if (most == 0 && batch + 32 >= num_groups) load_stage(tile, group, 0, 0, 0, 0, true);
        }
        if (num_groups == 0) load_stage(tile, GroupSource{}, 0, 0, 0, 0, true);
    }
    __device__ __forceinline__ void run() {
        grid_dependency_wait();
        for (int item = next_item(); item != kNoItem; item = next_item())
            load_tile(gemm.tiles[item / gemm.row_tiles], item % gemm.row_tiles);
    }
};

struct Consumer {
    const Memory& memory;
    Cursor<STAGES> cursor;
    Cursor<2> lora_cursor;

    __device__ __forceinline__ void release(uint64_t* empty) {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty);
    }

    template <int N>
    __device__ __forceinline__ void multiply(float (&acc)[N / 2], int k_blocks) {
        Barriers<STAGES>& barriers = memory.ring.barriers;
        const int warpgroup = threadIdx.x / 128;
        int previous = -1;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[i] = 0.0f;
        for (int block = 0; block < k_blocks; ++block) {
            barrier_wait(&barriers.full[cursor.stage], cursor.parity);
            const uint32_t stage = shared_address(memory.stages) + cursor.stage * kStageBytes;
            const uint64_t a = operand_descriptor(stage + warpgroup * 64 * kBlockBytes);
            const uint64_t b =
                operand_descriptor(DIRECT ? shared_address(memory.hidden) + block * kTokenBytes : stage + kWeightBytes);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kBlockK / 16; ++k) Wgmma<N>::multiply(acc, a + 2 * k, b + 2 * k);
            wgmma_commit();
            wgmma_wait<1>();
            if (previous >= 0) release(&barriers.empty[previous]);
            previous = cursor.stage;
            cursor.advance();
        }
        wgmma_wait<0>();
        release(&barriers.empty[previous]);
    }

    // The tile's row of each column that this lane reads h of, -1 for none; without DIRECT they are the same.
    template <int N>
    __device__ __forceinline__ void column_rows(int (&column_row)[N / 8], const TokenTile& tile) {
        const int lane = volatile_lane();
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            const int column = 8 * j + lane / 4;
            column_row[j] = DIRECT ? memory.direct.row_of_token(tile, column) : column;
        }
    }

    // delta += B h over one stage's entries; rows of other groups count as zero.
    template <int N>
    __device__ __forceinline__ void expand_stage(float (&delta)[N / 2], const int (&column_row)[N / 8],
                                                 int padded_rows) {
        const int lane = volatile_lane();
        const uint8_t* stage = memory.lora_stages + lora_cursor.stage * kLoraStageBytes;
        const uint8_t* fragments = stage + threadIdx.x / 32 * kFragmentBytes + lane * 8;
        const uint8_t* h = stage + kEntries * kTileFragmentBytes + lane % 4 * 4;
        const int num_entries = memory.lora.num_entries[lora_cursor.stage];
        for (int i = 0; i < num_entries; ++i) {
            const LoraStageEntry entry = memory.lora.entries[lora_cursor.stage][i];
            const uint2 b = *reinterpret_cast<const uint2*>(fragments + i * kTileFragmentBytes);
            const uint8_t* block = h + entry.block * padded_rows * kHTokenBytes;
#pragma unroll
            for (int j = 0; j < N / 8; ++j) {
                const int row = column_row[j];
                const bool mine = row >= entry.first_row && row < entry.last_row;
                const uint8_t* values = block + row * kHTokenBytes;
                const uint32_t low = mine ? *reinterpret_cast<const uint32_t*>(values) : 0;
                float (&sums)[4] = reinterpret_cast<float (&)[4]>(delta[4 * j]);
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
    __device__ __forceinline__ void expand(float (&delta)[N / 2], const TokenTile& tile) {
        Barriers<2>& barriers = memory.lora.barriers;
        const int padded_rows = round_up(tile.num_rows, kRowAlign);
        int column_row[N / 8];
        column_rows<N>(column_row, tile);
#pragma unroll
        for (int i = 0; i < N / 2; ++i) delta[i] = 0.0f;
        for (bool last = false; !last;) {
            barrier_wait(&barriers.full[lora_cursor.stage], lora_cursor.parity);
            last = memory.lora.last[lora_cursor.stage];
            expand_stage<N>(delta, column_row, padded_rows);
            __syncwarp();
            release(&barriers.empty[lora_cursor.stage]);
            lora_cursor.advance();
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
                                                 const Memory& memory) {
    bf16* staging = memory.staging;
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
    // Columns of the staging tile are laid out as rows in global memory: copy this tile's chunks of each.
    constexpr int kChunks = kTileFeatures / kChunk;
    const int first_chunk = (row_tile * kTileFeatures) % kBlockK / kChunk;
    bf16* out = static_cast<bf16*>(gemm.out) +
                (int64_t(row_tile * kTileFeatures / kBlockK) * gemm.rows + tile.first_row) * kBlockK;
    for (int i = threadIdx.x; i < tile.num_rows * kChunks; i += kConsumers) {
        const int row = i / kChunks;
        const int column = DIRECT ? memory.direct.token_of(tile, row) : row;
        const int chunk = first_chunk + i % kChunks;
        *reinterpret_cast<uint4*>(out + row * kBlockK + (chunk ^ (row & 7)) * kChunk) =
            *reinterpret_cast<const uint4*>(staging + column * kBlockK + (chunk ^ (column & 7)) * kChunk);
    }
    named_barrier_sync(1, kConsumers);
}

template <int N>
__device__ __forceinline__ void consume_tile(Consumer& consumer, const Gemm& gemm, const TokenTile& tile,
                                             int row_tile) {
    float acc[N / 2];
    [[maybe_unused]] float delta[LORA ? N / 2 : 1];
    consumer.multiply<N>(acc, gemm.k_blocks);
    const int warp_row = threadIdx.x / 32 * 16;
    if (DIRECT) grid_dependency_wait();
#if LORA
    consumer.expand<N>(delta, tile);
#endif
#if EPILOGUE == EPILOGUE_GATE_UP
    store_gate_up<N>(acc, gemm, tile, row_tile, warp_row);
#elif EPILOGUE == EPILOGUE_ACTIVATION
    store_activation<N>(acc, reinterpret_cast<float (&)[N / 2]>(delta), gemm, tile, row_tile, warp_row,
                        consumer.memory);
#else
#if LORA
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[i] = __fadd_rn(acc[i], delta[i]);
#endif
    store_down<N>(acc, gemm, tile, row_tile, warp_row);
#endif
}

// Where everything lies in a block's shared memory; the twin of GemmConfig.shared_bytes in graphs/geometry.py.
__device__ __forceinline__ Memory carve(uint8_t* shared, int k_blocks, int num_experts) {
    uint8_t* hidden = shared + STAGES * kStageBytes;
    uint8_t* lora_stages = hidden + (DIRECT ? k_blocks * kTokenBytes : 0);
    uint8_t* staging = lora_stages + kLoraStages * kLoraStageBytes;
    uint8_t* ring = staging + kStagingBytes;
    uint8_t* lora_ring = ring + round_up(sizeof(Ring), 16);
    uint8_t* direct = lora_ring + round_up(sizeof(LoraRing), 16);
    return Memory{shared,
                  hidden,
                  DirectTiles(direct, num_experts),
                  lora_stages,
                  reinterpret_cast<bf16*>(staging),
                  *reinterpret_cast<Ring*>(ring),
                  *reinterpret_cast<LoraRing*>(lora_ring)};
}

// One thread does this; a block-wide barrier must follow.
__device__ __forceinline__ void init_barriers(const Memory& memory) {
    memory.ring.barriers.init();
    if (LORA) {
        memory.lora.barriers.init();
        for (int i = 0; i < 2; ++i) {
            barrier_init(&memory.lora.announced[i], 1);
            barrier_init(&memory.lora.noted[i], 1);
        }
    }
    barrier_init_fence();
}

// The threads behind the consumers.
__device__ __forceinline__ void produce(const Gemm& gemm, const Memory& memory) {
    if (threadIdx.x >= kConsumers + 32)
        LoraProducer{gemm, memory}.run();
    else if (threadIdx.x == kConsumers)
        Producer{gemm, memory}.run();
}

// The warpgroups that multiply.
__device__ __forceinline__ void consume(const Gemm& gemm, const Memory& memory) {
    Consumer consumer{memory};
    while (true) {
        const int stage = consumer.cursor.stage;
        barrier_wait(&memory.ring.barriers.full[stage], consumer.cursor.parity);
        const int item = memory.ring.item[stage];
        if (item == kNoItem) break;
        const TokenTile tile = tile_of(gemm, memory, item);
        with_tile_width(DIRECT ? MAX_N : tile.num_rows,
                        [&]<int N>(Width<N>) { consume_tile<N>(consumer, gemm, tile, item % gemm.row_tiles); });
    }
}
