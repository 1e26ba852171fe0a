// What a block of the token MLP has: its warps, its shared memory, and how both products are dealt to the blocks.
#pragma once

#define BLOCK_M 16  // weight rows of one warp's product
#include "common/barrier.cuh"
#include "common/few_rows.cuh"
#include "common/gemm_args.cuh"
#include "common/gemm_groups.cuh"
#include "common/ring.cuh"

constexpr int kConsumerWarps = 8;
constexpr int kConsumers = 32 * kConsumerWarps;
[[maybe_unused]] constexpr int kShrinkThreads = LORA ? 128 : 0;  // behind the producing warp
constexpr int kThreads = kConsumers + 32 + kShrinkThreads;
constexpr int kMaxStages = 32;
constexpr int kSliceBytes = BLOCK_M * kBlockBytes;  // 16 rows of a K-block
constexpr int kRowPadding = 16;   // bytes that keep token rows in shared memory off each other's banks
constexpr int kReadyBarrier = 2;  // named barriers beside the consumers' own
constexpr int kFirstStages = 4;   // that are under way before the block hears of its tiles; a ring has more
[[maybe_unused]] constexpr int kShrinkBarrier = 3;

// The two products: of gate_up an item is `slices` times 16 rows of one tile, of down 16 rows of all of them.
struct Mlp {
    Gemm gate_up;
    Gemm down;
    int slices;
    int parts;        // items of a tile,
    int part_share;   // and 2^30 by it, rounded up: what is multiplied by that needs no division
    int item_blocks;  // K-blocks that a stage holds of an item of gate_up,
    int down_blocks;  // and of 16 rows of down,
    int down_parts;   // which have so many stages,
    int last_blocks;  // the last of them of so many K-blocks
    int num_stages;   // of the ring,
    int stage_bytes;
    int num_tiles;

    __device__ __forceinline__ int num_items() const { return num_tiles * parts; }
    __device__ __forceinline__ Place place_of(int item) const {
        const int tile = int(uint64_t(item) * uint32_t(part_share) >> 30);
        const int first = (item - tile * parts) * slices;
        return Place{tile, first, min(slices, gate_up.row_tiles - first)};
    }

    // Of down, tiles come in groups of a warp each, the first group with what does not make a whole one; of a group
    // the first stages of all tiles, then their second ones, and at last a few K-blocks of each, so that every warp has
    // little to do once the last weights are there.
    __device__ __forceinline__ int first_group() const { return min((num_tiles - 1) % kConsumerWarps + 1, num_tiles); }
    // The K-block of down behind a stage that begins with `block`.
    __device__ __forceinline__ int down_end(int block) const {
        const int rest = down.k_blocks - block;
        return block + (rest > last_blocks ? min(down_blocks, rest - last_blocks) : rest);
    }
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

// One thread of the producing warp does this, which may then fill stages; all others once a barrier has followed.
__device__ __forceinline__ void init_barriers(const Memory& memory, int num_stages) {
    memory.ring.init(1, kConsumerWarps, num_stages);
    memory.ring.begun = 0;
    barrier_init_fence();
}

// The warp that keeps the ring full, from the first weight of gate_up to the last of down, which wait for nothing; a
// lane a copy.
struct TokenProducer {
    Mlp& mlp;
    const Memory& memory;
    TokenCursor cursor;
    const uint64_t policy = evict_first_policy();

    // K-blocks `block` to `end` of an expert's `slices` slices of 16 rows, from slice `first` on, `most` a stage.
    __device__ __forceinline__ void load(const Gemm& gemm, int expert, int first, int slices, int most, int block,
                                         int end) {
        const int64_t stride = int64_t(gemm.row_tiles) * kSliceBytes;  // from one K-block to the next
        const uint8_t* source = gemm.weights + first * kSliceBytes + expert * (stride * gemm.k_blocks);
        const int lane = threadIdx.x % 32;
        const int bytes = slices * kSliceBytes;
        for (; block < end; block += most) {
            const int count = min(most, end - block);
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
    // The first K-blocks of the block's first item, as many as `begin` says; the ring has room for them.
    __device__ __forceinline__ int begin(const FewRows& rows) {
        if (int(blockIdx.x) >= mlp.num_items()) return 0;
        const Place place = mlp.place_of(blockIdx.x);
        const int end = min(kFirstStages * mlp.item_blocks, mlp.gate_up.k_blocks);
        load(mlp.gate_up, rows.expert_of(place.tile), place.row_tile, place.row_tiles, mlp.item_blocks, 0, end);
        return end;
    }
    // 16 rows of down of a group of tiles.
    __device__ __forceinline__ void descend(int slice, int first, int last) {
        int end;
        for (int block = 0; block < mlp.down.k_blocks; block = end) {
            end = mlp.down_end(block);
            for (int tile = first; tile < last; ++tile)
                load(mlp.down, memory.direct[tile].expert, slice, 1, mlp.down_blocks, block, end);
        }
    }
    // All weights behind the first `begun` K-blocks.
    __device__ __forceinline__ void bring(int begun) {
        for (int item = blockIdx.x; item < mlp.num_items(); item += gridDim.x) {
            const Place place = mlp.place_of(item);
            load(mlp.gate_up, memory.direct[place.tile].expert, place.row_tile, place.row_tiles, mlp.item_blocks, begun,
                 mlp.gate_up.k_blocks);
            begun = 0;
        }
        for (int slice = blockIdx.x; slice < mlp.down.row_tiles; slice += gridDim.x)
            for (int first = 0, last = mlp.first_group(); first < mlp.num_tiles; first = last, last += kConsumerWarps)
                descend(slice, first, last);
    }
    // Makes the tiles and brings all weights. The block hears of its tiles once the first of those are under way.
    __device__ __forceinline__ void run(const Routing& routing, const int* num_tokens, int max_tokens) {
        const int max_rows = max_tokens * routing.choices;
        FewRows rows(routing, num_tokens, max_rows);
        if (threadIdx.x % 32 == 0) init_barriers(memory, mlp.num_stages);
        __syncwarp();
        rows.sort(routing, max_rows);
        mlp.num_tiles = rows.num_tiles();
        const int begun = begin(rows);
        rows.note(memory.direct, mlp.num_tiles, routing.buckets, max_rows);
        __syncwarp();
        named_barrier_arrive(kReadyBarrier, kThreads);
        bring(begun);
    }
};
