// What a block of the token MLP has: its warps, its shared memory, and how both products are dealt to the blocks.
#pragma once

#define BLOCK_M 16  // weight rows of one warp's product
#include "common/barrier.cuh"
#include "common/direct.cuh"
#include "common/gemm_args.cuh"
#include "common/gemm_groups.cuh"
#include "common/ring.cuh"

constexpr int kConsumerWarps = 8;
constexpr int kConsumers = 32 * kConsumerWarps;
[[maybe_unused]] constexpr int kShrinkThreads = LORA ? 128 : 0;  // behind the producing warp
constexpr int kThreads = kConsumers + 32 + kShrinkThreads;
constexpr int kMaxStages = 32;
constexpr int kSliceBytes = BLOCK_M * kBlockBytes;  // 16 rows of a K-block
constexpr int kRowPadding = 16;    // bytes that keep token rows in shared memory off each other's banks
constexpr int kPlacedBarrier = 2;  // named barriers beside the consumers' own
[[maybe_unused]] constexpr int kShrinkBarrier = 3;

// The two products: of gate_up an item is `slices` times 16 rows of one tile, of down 16 rows of all of them.
struct Mlp {
    Gemm gate_up;
    Gemm down;
    int slices;
    int num_stages;  // of the ring,
    int stage_bytes;
    int num_tiles;

    __device__ __forceinline__ int parts() const { return ceil_div(gate_up.row_tiles, slices); }
    __device__ __forceinline__ int num_items() const { return num_tiles * parts(); }
    __device__ __forceinline__ Place place_of(int item) const {
        const int first = item % parts() * slices;
        return Place{item / parts(), first, min(slices, gate_up.row_tiles - first)};
    }
    // K-blocks of so many slices that a stage holds.
    __device__ __forceinline__ int stage_blocks(int of_slices) const { return stage_bytes / (of_slices * kSliceBytes); }
};

struct Ring : Barriers<kMaxStages> {
    int begun;  // stages that the producer has begun to fill, of all rounds
    int reserved;
};

// A place in a ring of `length` stages, and how many are before it, of all rounds.
struct TokenCursor : Cursor<kMaxStages> {
    int before = 0;

    __device__ __forceinline__ void advance(int length) {
        ++before;
        Cursor::advance(1, length);
    }
    __device__ __forceinline__ void skip(int stages, int length) {
        before += stages;
        for (; stages > length; stages -= length) parity ^= 1;
        Cursor::advance(stages, length);
    }
};

struct Memory {
    uint8_t* stages;    // [num_stages, stage_bytes]
    uint8_t* hidden;    // [tokens, row_bytes]
    uint8_t* act;       // [kConsumerWarps, tokens, row_bytes]
    uint32_t* results;  // [rows, 8] pairs of down outputs: 16 rows of the product of each permuted row
    float* weights;     // [tokens, choices]
    Ring& ring;
    DirectTiles direct;

    // Bytes of a token's row of what is multiplied.
    static __device__ __forceinline__ int row_bytes(int k_blocks) { return k_blocks * kBlockBytes + kRowPadding; }
    __device__ __forceinline__ uint8_t* hidden_chunk(int token, int chunk, int k_blocks) const {
        return hidden + token * row_bytes(k_blocks) + chunk * 16;
    }
};

// Where everything lies, the ring's stages last; the twin of `TokenMlp` in graphs/token_mlp.py.
__device__ __forceinline__ Memory carve(uint8_t* shared, int stages_offset, int hidden_bytes, int act_bytes, int rows,
                                        int num_experts) {
    uint8_t* act = shared + hidden_bytes;
    uint8_t* results = act + act_bytes;
    uint8_t* weights = results + rows * 32;
    uint8_t* ring = weights + kDirectRows * 4;
    return Memory{shared + stages_offset,
                  shared,
                  act,
                  reinterpret_cast<uint32_t*>(results),
                  reinterpret_cast<float*>(weights),
                  *reinterpret_cast<Ring*>(ring),
                  DirectTiles(ring + sizeof(Ring), num_experts)};
}

// One thread does this.
__device__ __forceinline__ void init_barriers(const Memory& memory, int num_stages) {
    memory.ring.init(1, kConsumerWarps, num_stages);
    memory.ring.begun = 0;
    barrier_init_fence();
}

// The warp that keeps the ring full, from the first weight of gate_up to the last of down, which wait for nothing; a
// lane a copy.
struct TokenProducer {
    const Mlp& mlp;
    const Memory& memory;
    TokenCursor cursor;
    const uint64_t policy = evict_first_policy();

    // All K-blocks of an expert's `slices` slices of 16 rows, from slice `first` on.
    __device__ __forceinline__ void load(const Gemm& gemm, int expert, int first, int slices) {
        const int64_t stride = int64_t(gemm.row_tiles) * kSliceBytes;  // from one K-block to the next
        const uint8_t* source = gemm.weights + first * kSliceBytes + expert * (stride * gemm.k_blocks);
        const int lane = threadIdx.x % 32;
        const int bytes = slices * kSliceBytes;
        const int most = mlp.stage_blocks(slices);
        for (int block = 0; block < gemm.k_blocks; block += most) {
            const int count = min(most, gemm.k_blocks - block);
            uint64_t* full = &memory.ring.full[cursor.stage];
            barrier_wait(&memory.ring.empty[cursor.stage], cursor.parity ^ 1);
            if (lane == 0) {
                barrier_expect(full, count * bytes);
                atomicAdd(&memory.ring.begun, 1);
            }
            __syncwarp();
            if (lane < count)
                bulk_load((memory.stages + cursor.stage * mlp.stage_bytes) + lane * bytes,
                          source + (block + lane) * stride, bytes, full, policy);
            cursor.advance(mlp.num_stages);
        }
    }
    __device__ __forceinline__ void run() {
        for (int item = blockIdx.x; item < mlp.num_items(); item += gridDim.x) {
            const Place place = mlp.place_of(item);
            load(mlp.gate_up, memory.direct[place.tile].expert, place.row_tile, place.row_tiles);
        }
        for (int slice = blockIdx.x; slice < mlp.down.row_tiles; slice += gridDim.x)
            for (int tile = 0; tile < mlp.num_tiles; ++tile) load(mlp.down, memory.direct[tile].expert, slice, 1);
    }
};
