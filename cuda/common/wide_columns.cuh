// Token rows on their way through shared memory, and the product with the adapters' A while they are there.
//
// A block has one of kParts parts of a token tile in stages of one K-block, rows in BlockMajorK. What is to be made of
// them are columns of h, eight ranks each, gate's and up's in turn, of all adapter groups that the rows belong to: up
// to kColumns at a time. Each warp multiplies 16 rows over all of K, so that a row's h does not depend on its
// neighbours. Only live ranks are read.
#pragma once

#include "common/barrier.cuh"
#include "common/layer_args.cuh"
#include "common/layout.cuh"
#include "common/lora.cuh"
#include "common/scan.cuh"
#include "common/tiles.cuh"

constexpr bool kAlike = MAX_N <= 160;  // parts have about equally many rows; else as many as they can have, and a rest
constexpr int kParts = kAlike ? 2 : 4;
constexpr int kRows = MAX_N / kParts;  // of a part at the most
constexpr int kWarps = kRows / 16;
constexpr int kThreads = kWarps * 32;
static_assert(kRows % 16 == 0);
constexpr int kColumns = 8;
constexpr int kProjections = 2;
constexpr int kStages = 4;
constexpr int kChunksPerRow = kBlockK / kChunk;
constexpr int kRowBytes = kRows * kBlockBytes;  // of a stage
constexpr int kColumnBytes = 2 * kAStepBytes;   // of A by a K-block
constexpr int kRowsPerThread = kRows * kChunksPerRow / kThreads;
constexpr int kStageBytes = kRowBytes + kColumns * kColumnBytes;
constexpr int kChunksPerColumn = kColumnBytes / 16;  // of a K-block
constexpr int kAPerThread = ceil_div(kColumns * kChunksPerColumn, kThreads);

struct Column {
    const uint8_t* a;  // null: written as zero, for the other projection has more ranks
    float scaling;
    int index;  // within h
    int first;  // rows of its group, within the block's
    int last;
};

struct WideLora {
    const LayerArgs* layer;
    const LoraGroup* groups;
    bf16* h;  // [R/8, 2, rows, 8]
    int num_experts;
    int max_rank;
};

__device__ __forceinline__ void async_copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kInFlight>
__device__ __forceinline__ void async_copies_arrived() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kInFlight) : "memory");
}

// The columns of a part of a tile, which the first warp goes through kColumns at a time.
struct ColumnList {
    const WideLora& lora;
    const TokenTile& tile;
    int first_row;  // of the part, permuted
    int num_rows;
    int k_blocks;
    int batch = 0;  // of 32 groups, a lane each,
    int next = 0;   // and the column among theirs
    const int lane = threadIdx.x % 32;

    __device__ __forceinline__ LoraGroup group_of(int index) const { return lora.groups[tile.first_group() + index]; }
    __device__ __forceinline__ LoraEntry entry_of(const LoraGroup& of) const {
        return lora.layer->entry_of(of.slot, of.expert, lora.num_experts);
    }
    // How many columns a group has in this part.
    __device__ __forceinline__ int columns_of(int index) const {
        if (index >= tile.num_groups()) return 0;
        const LoraGroup of = group_of(index);
        if (of.first_row >= first_row + num_rows || of.first_row + of.num_rows <= first_row) return 0;
        const LoraEntry entry = entry_of(of);
        return ceil_div(max(entry.rank[0], entry.rank[1]), kRankBlock) * kProjections;
    }
    __device__ __forceinline__ Column column_of(const LoraGroup& of, int column) const {
        const LoraEntry entry = entry_of(of);
        const int projection = column % kProjections;
        const int block = column / kProjections;
        const int rank = projection == 0 ? entry.rank[0] : entry.rank[1];
        const float scaling = projection == 0 ? entry.scaling[0] : entry.scaling[1];
        const int source = entry.shared_a >> projection & 1 ? 0 : of.expert;
        const int64_t matrix = (int64_t(of.slot) * lora.num_experts + source) * kProjections + projection;
        const int64_t block_bytes = int64_t(k_blocks) * kColumnBytes;
        const uint8_t* a = lora.layer->lora_a_gate_up + (matrix * (lora.max_rank / kRankBlock) + block) * block_bytes;
        return Column{block < ceil_div(rank, kRankBlock) ? a : nullptr, scaling, column,
                      max(of.first_row - first_row, 0), min(of.first_row + of.num_rows - first_row, num_rows)};
    }
    // Fills `columns` and returns how many there were left for it; the warp's lanes go together.
    __device__ __forceinline__ int fill(Column* columns) {
        const int num_groups = tile.num_groups();
        for (; batch < num_groups; batch += 32, next = 0) {
            const int mine = columns_of(batch + lane);
            const int end = warp_inclusive_scan(mine);
            const int count = min(__shfl_sync(~0u, end, 31) - next, kColumns);
            if (count <= 0) continue;
            const int owner = lane_that_has(next + lane, end, num_groups - batch);
            const int column = next + lane - __shfl_sync(~0u, end - mine, owner);
            if (lane < count) columns[lane] = column_of(group_of(batch + owner), column);
            next += count;
            return count;
        }
        return 0;
    }
};

// A block's part of a tile.
struct Part {
    int first_row;  // permuted, a multiple of 8
    int num_rows;
    int k_blocks;
    int rows;  // of all tiles
    uint8_t* stages;
    Column* columns;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;

    using Source = const uint8_t* const (&)[kRowsPerThread];
    using ASource = const uint8_t* const (&)[kAPerThread];

    // Starts bringing K-block `block`: this thread's chunks of rows (`source` has those of the first) and of A.
    __device__ __forceinline__ void load(Source source, ASource a, int block) const {
        uint8_t* stage = stages + block % kStages * kStageBytes;
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
            const int row = threadIdx.x / kChunksPerRow + i * (kThreads / kChunksPerRow);
            const int chunk = threadIdx.x % kChunksPerRow ^ (row & 7);
            async_copy16(stage + row * kBlockBytes + chunk * 16, source[i] + block * kBlockBytes, row < num_rows);
        }
#pragma unroll
        for (int i = 0; i < kAPerThread; ++i)
            if (a[i] != nullptr)
                async_copy16(stage + kRowBytes + (threadIdx.x + i * kThreads) * 16, a[i] + block * kColumnBytes, true);
    }

    using Sums = float[kColumns][4];

    // `kCount` columns from `first` on; the others' sums stay as they are.
    template <int kCount>
    __device__ __forceinline__ void multiply(Sums& sums, int block, int first) const {
        const uint8_t* stage = stages + block % kStages * kStageBytes;
        const uint8_t* a_stage = stage + kRowBytes + first * kColumnBytes + lane * 16;
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            uint4 x[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = warp * 16 + i * 8 + lane / 4;
                const int chunk = (step * 4 + lane % 4) ^ (row & 7);
                x[i] = *reinterpret_cast<const uint4*>(stage + row * kBlockBytes + chunk * 16);
            }
#pragma unroll
            for (int c = 0; c < kCount; ++c) {
                const uint4 a = *reinterpret_cast<const uint4*>(a_stage + c * kColumnBytes + step * kAStepBytes);
                mma_m16n8k32(sums[c], x[0], x[1], a);
            }
        }
    }
    // Of `num_columns` those that this warp's rows meet are from `first` on; returns how many there are to the last.
    __device__ __forceinline__ int met_columns(int num_columns, int& first) const {
        int last = 0;
        first = kColumns;
        for (int c = 0; c < num_columns; ++c) {
            if (columns[c].first >= warp * 16 + 16 || columns[c].last <= warp * 16) continue;
            first = min(first, c);
            last = c + 1;
        }
        return max(last - first, 0);
    }
    __device__ __forceinline__ void store(const Sums& sums, bf16* h, int first, int end) const {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            if (first + c >= end) break;
            const Column column = columns[first + c];
            bf16* target = h + column_offset(column.index, first_row, rows) + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = warp * 16 + i * 8 + lane / 4;
                if (row < column.first || row >= column.last) continue;
                const uint32_t pair = pack_bf16(sums[c][2 * i] * column.scaling, sums[c][2 * i + 1] * column.scaling);
                *reinterpret_cast<uint32_t*>(target + row * kRankBlock) = column.a == nullptr ? 0 : pair;
            }
        }
    }

    // This thread's chunks of a K-block, as they lie in the stage, to `copy`.
    __device__ __forceinline__ void copy_out(uint8_t* copy, int block) const {
        const uint8_t* stage = stages + block % kStages * kStageBytes;
        uint8_t* target = copy + (int64_t(block) * rows + first_row) * kBlockBytes;
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
            const int offset = (threadIdx.x + i * kThreads) * 16;
            if (offset < num_rows * kBlockBytes)
                *reinterpret_cast<uint4*>(target + offset) = *reinterpret_cast<const uint4*>(stage + offset);
        }
    }

    // All of K once: makes `num_columns` columns, and where `copy` is given stores the rows there, BlockMajorK.
    __device__ __forceinline__ void pass(Source source, uint8_t* copy, bf16* h, int num_columns) const {
        const uint8_t* a[kAPerThread];
#pragma unroll
        for (int i = 0; i < kAPerThread; ++i) {
            const int chunk = threadIdx.x + i * kThreads;
            const int column = chunk / kChunksPerColumn;
            a[i] = column < num_columns ? columns[column].a : nullptr;
            if (a[i] != nullptr) a[i] += chunk % kChunksPerColumn * 16;
        }
        int first;
        const int met = met_columns(num_columns, first);
        const int width = met > 4 ? 8 : met > 2 ? 4 : met > 0 ? 2 : 0;
        first = min(first, kColumns - width);
        Sums sums = {};
        for (int block = 0; block < kStages - 1; ++block) {
            if (block < k_blocks) load(source, a, block);
            async_copies_commit();
        }
#pragma unroll 1
        for (int block = 0; block < k_blocks; ++block) {
            async_copies_arrived<kStages - 2>();
            __syncthreads();
            if (block + kStages - 1 < k_blocks) load(source, a, block + kStages - 1);
            async_copies_commit();
            if (copy != nullptr) copy_out(copy, block);
            if (width == 8)
                multiply<8>(sums, block, first);
            else if (width == 4)
                multiply<4>(sums, block, first);
            else if (width == 2)
                multiply<2>(sums, block, first);
        }
        store(sums, h, first, min(first + width, num_columns));
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
