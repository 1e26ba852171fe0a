// Multiplies each expert's tokens by its weights, every weight byte streamed once, and finishes the tile.
//
// Weights are the M operand (BLOCK_M rows of a swizzled BlockMajorK matrix: one contiguous run per K-block),
// tokens the N operand. One warp keeps a ring of STAGES K-blocks in flight with bulk copies, across tiles;
// BLOCK_M / 64 warpgroups multiply. The grid is persistent over (token tile, row tile) items, which the blocks
// take from a ticket as they go: who computes a tile does not change its bits.
//
// Compile-time: BLOCK_M (64 or 128), MAX_N (tokens of the largest tile), STAGES, EPILOGUE.
#include "common/activation.cuh"
#include "common/barrier.cuh"
#include "common/layer_args.cuh"
#include "common/layout.cuh"
#include "common/tiles.cuh"
#include "common/width.cuh"

#define EPILOGUE_GATE_UP 0     // gate and up as fp32 pairs, [P, I]
#define EPILOGUE_ACTIVATION 1  // silu(gate) * up as the down projection's operand, BlockMajorK [I/64, P, 64]
#define EPILOGUE_DOWN 2        // bf16 rows, [P, H]

static_assert(BLOCK_M == 64 || BLOCK_M == 128, "a row tile is one or two warpgroups");
static_assert(MAX_N % 8 == 0 && MAX_N <= 256, "a token tile is a multiple of 8 up to 256");

constexpr int kConsumers = 2 * BLOCK_M;
constexpr int kWeightBytes = BLOCK_M * kBlockBytes;
constexpr int kTokenBytes = round_up(MAX_N * kBlockBytes, 1024);
constexpr int kStageBytes = kWeightBytes + kTokenBytes;
[[maybe_unused]] constexpr int kTileFeatures = BLOCK_M / 2;  // features of one gate_up tile
constexpr int kStagingBytes = EPILOGUE == EPILOGUE_ACTIVATION ? kTokenBytes : 0;

constexpr int kNoItem = -1;

struct Ring {
    uint64_t full[STAGES];
    uint64_t empty[STAGES];
    int item[STAGES];  // the item that a stage belongs to; kNoItem ends the work
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
    const uint8_t* weights;  // [E_local, k_blocks, row_tiles * BLOCK_M, 64]
    const uint8_t* tokens;   // [k_blocks, rows, 64]
    const TokenTile* tiles;
    int* ticket;  // items taken beyond the first of each block; zero at launch
    int num_items;
    int k_blocks;
    int row_tiles;
    int rows;
    void* out;
    int out_stride;
};

struct Source {
    const uint8_t* weights;
    const uint8_t* tokens;
    uint32_t token_bytes;

    __device__ __forceinline__ Source(const Gemm& gemm, int item) {
        const TokenTile tile = gemm.tiles[item / gemm.row_tiles];
        weights = gemm.weights +
                  (int64_t(tile.expert) * gemm.k_blocks * gemm.row_tiles + item % gemm.row_tiles) * kWeightBytes;
        tokens = gemm.tokens + int64_t(tile.first_row) * kBlockBytes;
        token_bytes = round_up(tile.num_rows, kRowAlign) * kBlockBytes;
    }
};

struct Producer {
    const Gemm& gemm;
    uint8_t* stages;
    Ring& ring;
    const uint64_t policy = evict_first_policy();

    __device__ __forceinline__ void load_weights(const Source& source, int item, int block, int stage) {
        ring.item[stage] = item;
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
        for (int block = 0; block < blocks; ++block) load_weights(source, item, block, block);
        grid_dependency_wait();
        for (int block = 0; block < blocks; ++block) load_tokens(source, block, block);
        return blocks;
    }
    __device__ __forceinline__ void load(const Source& source, int item, int first, int last, Cursor& cursor) {
        for (int block = first; block < last; ++block) {
            barrier_wait(&ring.empty[cursor.stage], cursor.parity ^ 1);
            load_weights(source, item, block, cursor.stage);
            load_tokens(source, block, cursor.stage);
            cursor.advance();
        }
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
                const int next = gridDim.x + atomicAdd(gemm.ticket, 1);
                const int half = max(block, gemm.k_blocks / 2);
                load(source, item, block, half, cursor);
                const Source upcoming(gemm, min(next, gemm.num_items - 1));
                load(source, item, half, gemm.k_blocks, cursor);
                if (next >= gemm.num_items) break;
                item = next;
                source = upcoming;
                block = 0;
            }
        } else {
            grid_dependency_wait();
        }
        barrier_wait(&ring.empty[cursor.stage], cursor.parity ^ 1);
        ring.item[cursor.stage] = kNoItem;
        barrier_arrive(&ring.full[cursor.stage]);
    }
};

template <int N>
__device__ __forceinline__ void multiply_tile(float (&acc)[N / 2], int k_blocks, const uint8_t* stages, Ring& ring,
                                              Cursor& cursor) {
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
        if (previous >= 0 && threadIdx.x % 32 == 0) barrier_arrive(&ring.empty[previous]);
        previous = cursor.stage;
        cursor.advance();
    }
    wgmma_wait<0>();
    if (threadIdx.x % 32 == 0) barrier_arrive(&ring.empty[previous]);
}

// The epilogues; `warp_row` is the first of this warp's 16 rows within the tile.
template <int N>
__device__ __forceinline__ void store_gate_up(const float (&acc)[N / 2], const Gemm& gemm, const TokenTile& tile,
                                              int row_tile, int warp_row) {
    const int lane = volatile_lane();
    const int feature = row_tile * kTileFeatures + gate_up_feature(warp_row, lane / 4);
    float2* out = static_cast<float2*>(gemm.out) + int64_t(tile.first_row) * gemm.out_stride + feature;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        const int token = 8 * j + 2 * (lane % 4);
        if (token < tile.num_rows) out[int64_t(token) * gemm.out_stride] = float2{acc[4 * j + 2], acc[4 * j]};
        if (token + 1 < tile.num_rows)
            out[int64_t(token + 1) * gemm.out_stride] = float2{acc[4 * j + 3], acc[4 * j + 1]};
    }
}

template <int N>
__device__ __forceinline__ void store_down(const float (&acc)[N / 2], const Gemm& gemm, const TokenTile& tile,
                                           int row_tile, int warp_row) {
    const int lane = volatile_lane();
    const int feature = row_tile * BLOCK_M + down_feature(warp_row, lane / 4);
    uint32_t* out = static_cast<uint32_t*>(gemm.out) + (int64_t(tile.first_row) * gemm.out_stride + feature) / 2;
    const int64_t stride = gemm.out_stride / 2;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        const int token = 8 * j + 2 * (lane % 4);
        if (token < tile.num_rows) out[token * stride] = pack_bf16(acc[4 * j], acc[4 * j + 2]);
        if (token + 1 < tile.num_rows) out[(token + 1) * stride] = pack_bf16(acc[4 * j + 1], acc[4 * j + 3]);
    }
}

template <int N>
__device__ __forceinline__ void store_activation(const float (&acc)[N / 2], const Gemm& gemm, const TokenTile& tile,
                                                 int row_tile, int warp_row, bf16* staging) {
    const int lane = volatile_lane();
    const int feature = (row_tile * kTileFeatures) % kBlockK + gate_up_feature(warp_row, lane / 4);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const int token = 8 * j + 2 * (lane % 4) + t;
            const float act = gated_silu(acc[4 * j + 2 + t], acc[4 * j + t], 0.0f, 0.0f);
            staging[block_major_offset(token, feature, 0)] = to_bf16(act);
        }
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
__device__ __forceinline__ void consume_tile(const Gemm& gemm, const TokenTile& tile, int row_tile,
                                             const uint8_t* stages, Ring& ring, Cursor& cursor, bf16* staging) {
    float acc[N / 2];
    multiply_tile<N>(acc, gemm.k_blocks, stages, ring, cursor);
    const int warp_row = threadIdx.x / 32 * 16;
#if EPILOGUE == EPILOGUE_GATE_UP
    store_gate_up<N>(acc, gemm, tile, row_tile, warp_row);
#elif EPILOGUE == EPILOGUE_ACTIVATION
    store_activation<N>(acc, gemm, tile, row_tile, warp_row, staging);
#else
    store_down<N>(acc, gemm, tile, row_tile, warp_row);
#endif
}

extern "C" __global__ void __launch_bounds__(kConsumers + 32, 1)
    grouped_gemm(const LayerArgs* layer, const uint8_t* tokens, const TokenTile* tiles, const int* num_tiles,
                 int* ticket, void* out, int k_blocks, int row_tiles, int rows, int out_stride) {
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
    // The down GEMM may start while gate_up runs: what it reads before its wait, permute wrote, and gate_up lets
    // it start only after its own wait for that. gate_up's own tiles come from its predecessor.
#if EPILOGUE != EPILOGUE_DOWN
    grid_dependency_wait();
#endif
    grid_dependency_launch();

    const uint8_t* weights = EPILOGUE == EPILOGUE_DOWN ? layer->down : layer->gate_up;
    const Gemm gemm{weights, tokens, tiles, ticket, *num_tiles * row_tiles, k_blocks, row_tiles, rows, out, out_stride};
    if (threadIdx.x >= kConsumers) {
        if (threadIdx.x == kConsumers) Producer{gemm, stages, ring}.run();
        return;
    }
    grid_dependency_wait();
    Cursor cursor;
    while (true) {
        barrier_wait(&ring.full[cursor.stage], cursor.parity);
        const int item = ring.item[cursor.stage];
        if (item == kNoItem) break;
        const TokenTile tile = gemm.tiles[item / row_tiles];
        with_tile_width(tile.num_rows, [&]<int N>(Width<N>) {
            consume_tile<N>(gemm, tile, item % row_tiles, stages, ring, cursor, staging);
        });
    }
}
