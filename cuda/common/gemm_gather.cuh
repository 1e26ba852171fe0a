// The producing warp that brings the tokens of gate_up from where they came, beside the thread that brings weights.
#pragma once

#include "common/gemm_producer.cuh"

constexpr int kBatchRows = 16;  // rows of which a lane brings its share at once

// The tokens of a tile that is gathered: a lane knows where those of row `lane / 8` and of every fourth from there
// begin.
struct GatheredRows {
    uint32_t offset[MAX_N / 4];  // bytes from the first token's hidden states
    int num_rows;

    // What the sort wrote while this kernel ran already: by loads that are no `__ldg`.
    __device__ __forceinline__ void load(const Gemm& gemm, const TokenTile& tile) {
        const int row_bytes = gemm.k_blocks * kBlockBytes;
        num_rows = tile.num_rows;
#pragma unroll
        for (int i = 0; i < MAX_N / 4; ++i) {
            const int row = 4 * i + threadIdx.x % 32 / 8;
            offset[i] = row < num_rows ? gemm.place_tokens[tile.first_row + row] * row_bytes : 0;
        }
    }
    // Rows `first` to `first + kBatchRows`: instead of those that are none the first token's, which nobody looks at.
    __device__ __forceinline__ void copy_batch(int first, uint8_t* even, uint8_t* odd, const uint8_t* hidden) const {
        uint32_t shared[kBatchRows / 4];
        const void* global[kBatchRows / 4];
#pragma unroll
        for (int i = 0; i < kBatchRows / 4; ++i) {
            const int row = first + 4 * i;
            shared[i] = shared_address((row % 8 ? odd : even) + row * kBlockBytes);
            global[i] = hidden + offset[row / 4];
        }
        async_copies16(shared, global);
    }
    // Starts bringing one K-block to `target`, swizzled, 16 bytes a lane of four rows at once; `hidden` is that of the
    // first token.
    __device__ __forceinline__ void copy(uint8_t* target, const uint8_t* hidden) const {
        const int lane = threadIdx.x % 32;
        const int mine = num_rows - lane / 8;  // rows at most, of every fourth
        uint8_t* const even = target + lane / 8 * kBlockBytes + (lane % 8 ^ lane / 8) * 16;
        uint8_t* const odd = target + lane / 8 * kBlockBytes + (lane % 8 ^ lane / 8 ^ 4) * 16;
        hidden += lane % 8 * 16;
#pragma unroll
        for (int first = 0; first < MAX_N; first += kBatchRows) {
            if (first >= num_rows) break;
            if constexpr (MAX_N >= kBatchRows)
                if (first + kBatchRows / 2 < num_rows) {
                    copy_batch(first, even, odd, hidden);
                    continue;
                }
#pragma unroll
            for (int row = first; row < min(first + kBatchRows / 2, MAX_N); row += 4) {
                if (row >= num_rows) break;
                async_copy16((row % 8 ? odd : even) + row * kBlockBytes, hidden + offset[row / 4], row < mine);
            }
        }
    }
};

// The warp that gathers the tokens of each item of `gemm`, as long as there are any; its lanes go together.
struct Gatherer {
    const Gemm& gemm;
    const Memory& memory;
    Cursor<STAGES> cursor;
    Cursor<2> heard;

    __device__ __forceinline__ void copy(const Source& source, const GatheredRows& rows, int first, int last) {
        for (int index = first; index < last; ++index) {
            if (!source.shares_tokens(index)) {
                barrier_wait(&memory.ring.barriers.empty[cursor.stage], cursor.parity ^ 1);
                rows.copy(memory.stages + cursor.stage * kStageBytes + kWeightBytes,
                          source.tokens + source.block(index) * kBlockBytes);
                async_copies_arrive(&memory.ring.barriers.full[cursor.stage]);
            }
            cursor.advance();
        }
    }
    __device__ __forceinline__ void find(Source& source, GatheredRows& rows, int item) const {
        const Place place = place_of(gemm, item);
        const TokenTile tile = tile_of(gemm, memory, place);
        source = source_of(gemm, tile, place);
        rows.load(gemm, tile);
    }
    // `first_tile` is that of this block's first item, known before the sort has ended; of later ones it is told.
    __device__ __forceinline__ void run(const TokenTile& first_tile) {
        int item = blockIdx.x;
        if (!is_gathered(gemm, item)) return;
        Source source = source_of(gemm, first_tile, place_of(gemm, item));
        GatheredRows rows;
        grid_dependency_wait();
        rows.load(gemm, first_tile);
        while (true) {
            // By the time that most of an item is under way the next one has been announced.
            const int most = source.stages * 3 / 4;
            copy(source, rows, 0, most);
            item = memory.gather_items.hear(heard);
            Source upcoming;
            GatheredRows upcoming_rows;
            if (is_gathered(gemm, item)) find(upcoming, upcoming_rows, item);
            copy(source, rows, most, source.stages);
            if (!is_gathered(gemm, item)) break;
            source = upcoming;
            rows = upcoming_rows;
        }
        async_copies_wait();
    }
};
