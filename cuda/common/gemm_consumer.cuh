// The multiplying warpgroups of the grouped GEMM: the sum of a tile and its LoRA delta, both in registers.
#pragma once

#include "common/gemm_block.cuh"
#include "common/width.cuh"

struct Consumer {
    const Memory& memory;
    Cursor<STAGES> cursor;
    Cursor<2> lora_cursor;

    __device__ __forceinline__ void release(uint64_t* empty) {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty);
    }

    __device__ __forceinline__ uint32_t stage_address() const {
        return shared_address(memory.stages) + cursor.stage * kStageBytes;
    }
    // Waits until the stage is full; with `kGathered` threads have copied its tokens, and the tensor cores have yet to
    // see them. Returns where it lies.
    template <bool kGathered>
    __device__ __forceinline__ uint32_t await_stage() {
        barrier_wait(&memory.ring.barriers.full[cursor.stage], cursor.parity);
        if (kGathered) async_shared_fence();
        return stage_address();
    }
    // Adds one K-block's product of the weights by the tokens at these places.
    template <int N>
    __device__ __forceinline__ void add_product(float (&acc)[N / 2], uint32_t weights, uint32_t tokens) {
        const uint64_t a = operand_descriptor(weights + threadIdx.x / 128 * 64 * kBlockBytes);
        const uint64_t b = operand_descriptor(tokens);
#pragma unroll
        for (int k = 0; k < kBlockK / 16; ++k) Wgmma<N>::multiply(acc, a + 2 * k, b + 2 * k);
    }
    // Starts the product of the stage's weights, once it is full, by the tokens at `tokens(stage)`.
    template <int N, bool kGathered, typename Tokens>
    __device__ __forceinline__ void start(float (&acc)[N / 2], Tokens tokens) {
        const uint32_t stage = await_stage<kGathered>();
        wgmma_fence();
        add_product<N>(acc, stage, tokens(stage));
        wgmma_commit();
    }

    // The sum of one tile's K-blocks; with `kHidden` the tokens are all hidden states, in shared memory.
    template <int N, bool kHidden, bool kGathered>
    __device__ __forceinline__ void multiply(float (&acc)[N / 2], int k_blocks) {
        Barriers<STAGES>& barriers = memory.ring.barriers;
        int previous = -1;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[i] = 0.0f;
        for (int block = 0; block < k_blocks; ++block) {
            start<N, kGathered>(acc, [&](uint32_t stage) {
                return kHidden ? shared_address(memory.hidden) + block * kTokenBytes : stage + kWeightBytes;
            });
            wgmma_wait<1>();
            if (previous >= 0) release(&barriers.empty[previous]);
            previous = cursor.stage;
            cursor.advance();
        }
        wgmma_wait<0>();
        release(&barriers.empty[previous]);
    }

    // The sums of two row tiles, whose K-blocks take turns in the ring, by the tokens that come with the first's.
    template <int N>
    __device__ __forceinline__ void multiply_pair(float (&acc)[2][N / 2], int k_blocks) {
        Barriers<STAGES>& barriers = memory.ring.barriers;
#pragma unroll
        for (int i = 0; i < N; ++i) acc[i / (N / 2)][i % (N / 2)] = 0.0f;
        for (int block = 0; block < k_blocks; ++block) {
            const int first = cursor.stage;
            const uint32_t tokens = stage_address() + kWeightBytes;
            start<N, true>(acc[0], [&](uint32_t) { return tokens; });
            cursor.advance();
            start<N, true>(acc[1], [&](uint32_t) { return tokens; });
            wgmma_wait<0>();
            release(&barriers.empty[first]);
            release(&barriers.empty[cursor.stage]);
            cursor.advance();
        }
    }

    // The sums of a tile of more than MAX_N tokens, by half, for one row tile or two: each K-block is two stages.
    // Returns the item that they were of.
    template <int kRowTiles, bool kGathered>
    __device__ __forceinline__ int multiply_halves(float (&acc)[2 * kRowTiles][MAX_N / 2], int k_blocks) {
        Barriers<STAGES>& barriers = memory.ring.barriers;
#pragma unroll
        for (int i = 0; i < 2 * kRowTiles; ++i)
#pragma unroll
            for (int j = 0; j < MAX_N / 2; ++j) acc[i][j] = 0.0f;
        int item;
#pragma unroll 1
        for (int block = 0; block < k_blocks; ++block) {
            const int first = cursor.stage;
            const uint32_t near = await_stage<kGathered>();
            wgmma_fence();
            add_product<MAX_N>(acc[0], near, near + kWeightBytes);
            cursor.advance();
            const uint32_t far = await_stage<kGathered>();
            wgmma_fence();
            add_product<MAX_N>(acc[1], near, far + kWeightBytes);
            if constexpr (kRowTiles == 2) {
                add_product<MAX_N>(acc[2], far, near + kWeightBytes);
                add_product<MAX_N>(acc[3], far, far + kWeightBytes);
            }
            wgmma_commit();
            wgmma_wait<0>();
            item = memory.ring.item[first];
            __syncwarp();
            release(&barriers.empty[first]);
            release(&barriers.empty[cursor.stage]);
            cursor.advance();
        }
        return item;
    }

    // The tile's row of each column that this lane reads h of, -1 for none; they are the same unless the
    // columns are all tokens.
    template <int N, bool kHidden>
    __device__ __forceinline__ void column_rows(int (&column_row)[N / 8], const TokenTile& tile) {
        const int lane = volatile_lane();
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            const int column = 8 * j + lane / 4;
            column_row[j] = kHidden ? memory.direct.row_of_token(tile, column) : column;
        }
    }

    // delta += B h over one stage's entries; rows of other groups count as zero.
    template <int N, bool kDown>
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
            const uint8_t* block = h + entry.block * padded_rows * kHTokenBytes<kDown>;
#pragma unroll
            for (int j = 0; j < N / 8; ++j) {
                const int row = column_row[j];
                const bool mine = row >= entry.first_row && row < entry.last_row;
                const uint8_t* values = block + row * kHTokenBytes<kDown>;
                const uint32_t low = mine ? *reinterpret_cast<const uint32_t*>(values) : 0;
                float (&sums)[4] = reinterpret_cast<float (&)[4]>(delta[4 * j]);
                if constexpr (kDown) {
                    expand_down(sums, b, low);
                } else {
                    const uint32_t high = mine ? *reinterpret_cast<const uint32_t*>(values + kHRowBytes) : 0;
                    expand_gate_up(sums, b, low, high);
                }
            }
        }
    }

    template <int N, bool kDown>
    __device__ __forceinline__ void expand(float (&delta)[N / 2], const TokenTile& tile) {
        Barriers<2>& barriers = memory.lora.barriers;
        const int padded_rows = round_up(tile.num_rows, kRowAlign);
        int column_row[N / 8];
        column_rows<N, DIRECT && !kDown>(column_row, tile);
#pragma unroll
        for (int i = 0; i < N / 2; ++i) delta[i] = 0.0f;
        for (bool last = false; !last;) {
            barrier_wait(&barriers.full[lora_cursor.stage], lora_cursor.parity);
            last = memory.lora.last[lora_cursor.stage];
            expand_stage<N, kDown>(delta, column_row, padded_rows);
            __syncwarp();
            release(&barriers.empty[lora_cursor.stage]);
            lora_cursor.advance();
        }
#pragma unroll
        for (int i = 0; i < N / 2; ++i) delta[i] = round_to_bf16(delta[i]);
    }
};
