// A part of a token tile on its way through shared memory, where it meets the adapters' A: h of its rows.
//
// A block has kRows rows in stages of one K-block, as they lie in BlockMajorK, and beside them A of kColumns columns of
// h: one warpgroup multiplies them. More columns take more passes over all of K, of which the next begins before one
// has ended, and which bring no rows but those that have the columns. A row's h does not depend on its neighbours.
#pragma once

#include "common/barrier.cuh"
#include "common/wgmma.cuh"
#include "common/wide_columns.cuh"

constexpr int kRows = 64;
constexpr int kParts = (MAX_N + kRows - 1) / kRows;
constexpr bool kAlike = MAX_N <= 128;  // parts have about equally many rows; else as many as they can have, and a rest
constexpr int kThreads = 128;
constexpr int kBlocks = 3;  // that an SM is to hold
constexpr int kChunksPerRow = kBlockK / kChunk;
constexpr int kRowBytes = kRows * kBlockBytes;  // of a stage
constexpr int kRowsPerThread = kRows * kChunksPerRow / kThreads;
constexpr int kRowStep = kThreads / kChunksPerRow;        // from one of a thread's rows to the next
constexpr int kChunksPerColumn = kColumnBytes / 16;       // of a K-block
constexpr int kColumnStep = kThreads / kChunksPerColumn;  // from one of a thread's columns to the next
static_assert(kRowStep % 8 == 0, "a thread's chunks are swizzled alike");

// A block's part of the tiles, as its threads go together over it.
template <int kColumns, int kStages>
struct Part {
    static constexpr int kStageBytes = kRowBytes + kColumns * kColumnBytes;
    static constexpr int kBytes = kStages * kStageBytes;  // of shared memory
    static constexpr int kColumnsPerThread = kColumns / kColumnStep;
    int first_row;  // permuted, a multiple of 8
    int num_rows;
    int k_blocks;
    int rows;          // of all tiles
    int64_t k_stride;  // bytes from a row's K-block to its next
    uint8_t* stages;
    const Columns& columns;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;

    // This thread's chunk of the first K-block of each of its rows.
    using Source = const uint8_t* const (&)[kRowsPerThread];

    // What is brought next: a K-block of a pass, to a stage; the rows from the first to the last that the pass's
    // columns have, which are listed group by group as rows are; and this thread's part of A's first K-block.
    struct Ahead {
        int begin = 0;  // the pass's first column
        int block = 0;
        int stage = 0;
        Range wanted;
        const uint8_t* a[kColumnsPerThread];
    };

    __device__ __forceinline__ Range all_rows() const { return Range{0, num_rows}; }
    static __device__ __forceinline__ int following(int stage) { return stage + 1 == kStages ? 0 : stage + 1; }
    __device__ __forceinline__ uint8_t* stage_of(int stage) const { return stages + stage * kStageBytes; }

    __device__ __forceinline__ void load_rows(int stage, Source source, int block, const Range& wanted) const {
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
            const int row = threadIdx.x / kChunksPerRow + i * kRowStep;
            if (row >= wanted.first && row < wanted.last)
                async_copy16(stage_of(stage) + (threadIdx.x + i * kThreads) * 16, source[i] + block * k_stride, true);
        }
    }
    // A's rows are ranks, swizzled as the tokens' are.
    __device__ __forceinline__ void load_a(const Ahead& ahead, int stage, int block) const {
        const int chunk = threadIdx.x % kChunksPerColumn;  // eight ranks by 32 elements of K, twice
        const int rank = chunk % 32 / 4;
        const int offset = rank * kBlockBytes + ((chunk / 32 * 4 + chunk % 4) ^ rank) * 16;
        uint8_t* target = stage_of(stage) + kRowBytes + threadIdx.x / kChunksPerColumn * kColumnBytes + offset;
#pragma unroll
        for (int i = 0; i < kColumnsPerThread; ++i)
            if (ahead.a[i] != nullptr)
                async_copy16(target + i * kColumnStep * kColumnBytes, ahead.a[i] + block * kColumnBytes, true);
    }
    // At the pass that begins with column `begin`.
    __device__ __forceinline__ void aim(Ahead& ahead, int begin) const {
        ahead.begin = begin;
        ahead.block = 0;
#pragma unroll
        for (int i = 0; i < kColumnsPerThread; ++i) {
            const int column = begin + threadIdx.x / kChunksPerColumn + i * kColumnStep;
            ahead.a[i] = column < columns.count ? columns.column[column].a : nullptr;
            if (ahead.a[i] != nullptr) ahead.a[i] += threadIdx.x % kChunksPerColumn * 16;
        }
        const int last = min(begin + kColumns, columns.count) - 1;
        ahead.wanted = begin <= last ? Range{columns.column[begin].first, columns.column[last].last} : Range{0, 0};
    }
    // The first stages, which nothing is waited for in: their rows and their A, in either order.
    __device__ __forceinline__ int opened() const { return min(kStages - 1, k_blocks); }
    __device__ __forceinline__ void open_rows(Source source, const Range& wanted) const {
        for (int block = 0; block < opened(); ++block) load_rows(block, source, block, wanted);
    }
    __device__ __forceinline__ void open_a(const Ahead& ahead) const {
        for (int block = 0; block < opened(); ++block) load_a(ahead, block, block);
    }
    __device__ __forceinline__ void turn(Ahead& ahead) const {
        if (ahead.block == k_blocks) aim(ahead, ahead.begin + kColumns);
    }
    __device__ __forceinline__ void bring(Ahead& ahead, Source source, int num_columns) const {
        if (ahead.begin < num_columns) {
            load_rows(ahead.stage, source, ahead.block, ahead.wanted);
            load_a(ahead, ahead.stage, ahead.block);
            ahead.stage = following(ahead.stage);
            ++ahead.block;
            turn(ahead);
        }
        async_copies_commit();
    }

    // This thread's chunks of K-block `block`, as they lie in the stage, to `copy`.
    __device__ __forceinline__ void copy_out(uint8_t* copy, int stage, int block) const {
        uint8_t* target = copy + (int64_t(block) * rows + first_row) * kBlockBytes;
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
            const int offset = (threadIdx.x + i * kThreads) * 16;
            if (offset < num_rows * kBlockBytes)
                *reinterpret_cast<uint4*>(target + offset) = *reinterpret_cast<const uint4*>(stage_of(stage) + offset);
        }
    }
    template <int kSums>
    __device__ __forceinline__ void store(const float (&sums)[kSums], bf16* h, int begin) const {
#pragma unroll
        for (int c = 0; c < kSums / 4; ++c) {
            if (begin + c >= columns.count) break;
            const Column column = columns.column[begin + c];
            bf16* target = h + column_offset(column.index, first_row, rows) + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = warp * 16 + i * 8 + lane / 4;
                if (row < column.first || row >= column.last) continue;
                const float* pair = &sums[4 * c + 2 * i];
                *reinterpret_cast<uint32_t*>(target + row * kRankBlock) =
                    column.a == nullptr ? 0 : pack_bf16(pair[0] * column.scaling, pair[1] * column.scaling);
            }
        }
    }
    // One pass, of up to kWidth / 8 columns. Columns that are none, and those without A, are multiplied with whatever
    // the stage holds there, and so are rows that no column has: of all that nothing is stored.
    template <int kWidth>
    __device__ __forceinline__ void pass(Ahead& ahead, Source source, int num_columns, int begin, int& stage,
                                         uint8_t* copy, bf16* h) const {
        float sums[kWidth / 2] = {};
#pragma unroll 1
        for (int block = 0; block < k_blocks; ++block) {
            async_copies_arrived<kStages - 2>();
            async_shared_fence();
            __syncthreads();
            const uint32_t address = shared_address(stage_of(stage));
            const uint64_t x = operand_descriptor(address);
            const uint64_t a = operand_descriptor(address + kRowBytes);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kBlockK / 16; ++k) Wgmma<kWidth>::multiply(sums, x + 2 * k, a + 2 * k);
            wgmma_commit();
            bring(ahead, source, num_columns);
            if (copy != nullptr) copy_out(copy, stage, block);
            wgmma_wait<0>();
            stage = following(stage);
        }
        store(sums, h, begin);
    }
    // Makes the columns, in a pass without any where there are none; the first stages were opened. In the first pass
    // the rows are stored where `copy` is given, BlockMajorK.
    __device__ __forceinline__ void make(Ahead& ahead, Source source, uint8_t* copy, bf16* h) const {
        const int num_columns = max(columns.count, 1);
        ahead.stage = opened();
        ahead.block = opened();
        turn(ahead);
        // What was opened is one group of copies, and empty ones make up the number of groups that a pass counts on.
        async_copies_commit();
        for (int i = opened(); i < kStages - 1; ++i) bring(ahead, source, num_columns);
        for (int i = 1; i < opened(); ++i) async_copies_commit();
        int stage = 0;
#pragma unroll 1
        for (int begin = 0; begin < num_columns; begin += kColumns) {
            const int count = columns.count - begin;
            uint8_t* copied = begin == 0 ? copy : nullptr;
            if (kColumns > 8 && count > 8)
                pass<8 * kColumns>(ahead, source, num_columns, begin, stage, copied, h);
            else if (count > 4)
                pass<64>(ahead, source, num_columns, begin, stage, copied, h);
            else
                pass<32>(ahead, source, num_columns, begin, stage, copied, h);
        }
        __syncthreads();
    }
};

// This block's part of the tiles, none of its rows where it has nothing to do.
__device__ __forceinline__ TokenTile part_of(const TokenTile* tiles, int num_tiles, int& first_row, int& num_rows) {
    const int index = blockIdx.x / kParts;
    TokenTile tile{};
    if (index < num_tiles) tile = tiles[index];
    const int most = kAlike ? rows_each(tile.num_rows, kParts) : kRows;
    const int first = blockIdx.x % kParts * most;
    first_row = tile.first_row + first;
    num_rows = max(min(tile.num_rows - first, most), 0);
    return tile;
}
