// The producing warp that brings the tokens of gate_up from where they came, beside the thread that brings weights.
#pragma once

#include "common/gemm_producer.cuh"

constexpr int kRowGroups = MAX_N / kRowAlign / kGatherWarps;  // of eight rows, that a warp gathers
constexpr int kWarpStride = kGatherWarps * kRowAlign;         // rows from one of its groups to the next

// The tokens of a tile that is gathered, as far as they are one warp's: a lane knows where those of row `lane / 8` of
// each of its groups and of the fourth from there begin.
struct GatheredRows {
    uint32_t offset[HALVES][kRowGroups][2];  // bytes from the first token's hidden states
    int num_rows;                            // from the warp's first row on

    // What the sort wrote while this kernel ran already, by loads that are no `__ldg`: all in one trip to memory, for
    // none is looked at before all are under way. A row that is none is the first token's.
    __device__ __forceinline__ void load(const Gemm& gemm, const TokenTile& tile, int warp) {
        constexpr int kMine = 2 * kRowGroups * HALVES;
        const int row_bytes = gemm.k_blocks * kBlockBytes;
        const int first = warp * kRowAlign + threadIdx.x % 32 / 8;
        const int* places = gemm.place_tokens + tile.first_row + first;
        asm("" : "+l"(places));  // so that the places' addresses are it and a constant each
        num_rows = tile.num_rows - warp * kRowAlign;
        int token[kMine];
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const int row = i / 2 * kWarpStride + i % 2 * 4;  // from the lane's first
            asm volatile(
                "{\n.reg .pred real;\nsetp.lt.s32 real, %2, %3;\nmov.b32 %0, 0;\n@real ld.global.s32 %0, [%1];\n}"
                : "=&r"(token[i])
                : "l"(places + row), "r"(row), "r"(tile.num_rows - first));
        }
#pragma unroll
        for (int i = 0; i < kMine; ++i) offset[i / 2 / kRowGroups][i / 2 % kRowGroups][i % 2] = token[i] * row_bytes;
    }
    // Groups `first` and `first + 1`: instead of those rows that are none the first one, which nobody looks at.
    template <int kHalf>
    __device__ __forceinline__ void copy_two_groups(int first, const uint32_t (&rows)[2], const uint8_t* hidden) const {
        uint32_t shared[4];
        const void* global[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            shared[i] = rows[i % 2] + (first + i / 2) * kWarpStride * kBlockBytes;
            global[i] = hidden + offset[kHalf][first + i / 2][i % 2];
        }
        async_copies16(shared, global);
    }
    template <int kHalf>
    __device__ __forceinline__ void copy_last_group(int group, const uint32_t (&rows)[2], const uint8_t* hidden) const {
        const int here = num_rows - kHalf * MAX_N;
        const int mine = here - threadIdx.x % 32 / 8;  // rows at most, of every fourth
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = group * kWarpStride + i * 4;
            if (row >= here) break;
            async_copy16(rows[i] + group * kWarpStride * kBlockBytes, hidden + offset[kHalf][group][i], row < mine);
        }
    }
    // Starts bringing one K-block of a half to `target`, swizzled, 16 bytes a lane of four rows at once; `hidden` is
    // that of the first token.
    template <int kHalf>
    __device__ __forceinline__ void copy(uint8_t* target, const uint8_t* hidden, int warp) const {
        const int lane = threadIdx.x % 32;
        const int here = num_rows - kHalf * MAX_N;
        const uint32_t first = shared_address(target) + (warp * kRowAlign + lane / 8) * kBlockBytes;
        const uint32_t rows[2] = {first + (lane % 8 ^ lane / 8) * 16,
                                  first + (lane % 8 ^ lane / 8 ^ 4) * 16 + 4 * kBlockBytes};
        hidden += lane % 8 * 16;
#pragma unroll
        for (int group = 0; group < kRowGroups; group += 2) {
            if (group * kWarpStride >= here) break;
            if (kRowGroups > 1 && (group + 1) * kWarpStride < here)
                copy_two_groups<kHalf>(group, rows, hidden);
            else
                copy_last_group<kHalf>(group, rows, hidden);
        }
    }
};

// A warp that gathers the tokens of each item of `gemm`, or its share of them, as long as there are any; its lanes go
// together.
struct Gatherer {
    const Gemm& gemm;
    const Memory& memory;
    const int warp;  // of those that gather
    Cursor<STAGES> cursor;
    Cursor<2> heard;

    template <bool kHalved, int kHalf>
    __device__ __forceinline__ void copy_stage(const Source& source, const GatheredRows& rows, int index) {
        barrier_wait(&memory.ring.barriers.empty[cursor.stage], cursor.parity ^ 1);
        rows.copy<kHalf>(memory.stages + cursor.stage * kStageBytes + kWeightBytes,
                         source.tokens + source.template block<kHalved>(index) * kBlockBytes, warp);
        async_copies_arrive(&memory.ring.barriers.full[cursor.stage]);
    }
    __device__ __forceinline__ void copy(const Source& source, const GatheredRows& rows, int first, int last) {
        if (source.halved()) {
            for (int index = first; index < last; index += 2) {
                copy_stage<true, 0>(source, rows, index);
                cursor.advance();
                copy_stage<true, HALVES - 1>(source, rows, index);
                cursor.advance();
            }
            return;
        }
        for (int index = first; index < last; ++index) {
            if (source.template has_tokens<false>(index)) copy_stage<false, 0>(source, rows, index);
            cursor.advance();
        }
    }
    __device__ __forceinline__ void find(Source& source, GatheredRows& rows, int item) const {
        const Place place = place_of(gemm, item);
        const TokenTile tile = tile_of(gemm, memory, place);
        source = source_of(gemm, tile, place);
        rows.load(gemm, tile, warp);
    }
    // `first_tile` is that of this block's first item, known before the sort has ended; of later ones it is told.
    __device__ __forceinline__ void run(const TokenTile& first_tile) {
        int item = blockIdx.x;
        if (!is_gathered(gemm, item)) return;
        Source source = source_of(gemm, first_tile, place_of(gemm, item));
        GatheredRows rows;
        grid_dependency_wait();
        rows.load(gemm, first_tile, warp);
        while (true) {
            // By the time that most of an item is under way the next one has been announced.
            const int most = source.stages * 3 / 8 * 2;
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
