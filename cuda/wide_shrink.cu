// h of down for many tokens: scaling * A x of the activations of every adapter group, as the columns that wide_gemm
// multiplies B with.
//
// A block takes one of kParts about equal parts of a token tile and kColumns columns of h, eight ranks each, and goes
// through the adapter groups that its rows belong to. One warp keeps a ring of K-blocks of x and A full, the others
// multiply 16 rows each over all of K: a row's h does not depend on its neighbours. Only live ranks are read. Tiles and
// adapters are older than the kernel before, and so are looked up before it has ended.
//
// Compile-time: MAX_N (rows of the largest token tile).
#include "common/layer_args.cuh"
#include "common/layout.cuh"
#include "common/lora.cuh"
#include "common/ring.cuh"
#include "common/tiles.cuh"

constexpr int kWarpRows = 16;
constexpr int kParts = 2;
constexpr int kRows = MAX_N / kParts;
constexpr int kWarps = kRows / kWarpRows;
static_assert(kRows % kWarpRows == 0);
constexpr int kColumns = 8;
constexpr int kThreads = (kWarps + 1) * 32;
constexpr int kStages = MAX_N > 160 ? 4 : 6;
constexpr int kTokenBytes = kRows * kBlockBytes;
constexpr int kColumnBytes = 2 * kAStepBytes;  // of A by a K-block
constexpr int kStageBytes = kTokenBytes + kColumns * kColumnBytes;

using Ring = Barriers<kStages>;

// One adapter group's rows within a part of a tile, and how many of the columns from `first_column` on it has.
struct Share {
    LoraGroup group;
    LoraEntry entry;
    int first_row;
    int num_rows;
    int columns;

    __device__ __forceinline__ Share(const LayerArgs* layer, const LoraGroup& of, int num_experts, int first, int last,
                                     int first_column)
        : group(of), entry(layer->entry_of(of.slot, of.expert, num_experts)) {
        first_row = max(group.first_row, first);
        num_rows = max(min(group.first_row + group.num_rows, last) - first_row, 0);
        columns = max(min(ceil_div(entry.rank[2], kRankBlock) - first_column, kColumns), 0);
    }
};

struct Shrink {
    const LayerArgs* layer;
    const uint8_t* act;  // BlockMajorK [I/64, rows, 64]
    bf16* h;             // [R/8, rows, 8]
    int num_experts;
    int k_blocks;
    int rows;
    int max_rank;
    uint8_t* stages;
    Ring& ring;
    Cursor<kStages> cursor;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;

    // A's first element of this lane's column.
    __device__ __forceinline__ const uint8_t* column_of(const Share& share, int first_column) const {
        const int64_t column_bytes = int64_t(k_blocks) * kColumnBytes;
        const int64_t expert = int64_t(share.group.slot) * num_experts + share.group.expert;
        return layer->lora_a_down + (expert * (max_rank / kRankBlock) + first_column + lane) * column_bytes;
    }
    // Has L2 bring A, which no kernel makes.
    __device__ __forceinline__ void ask_for_a(const Share& share, int first_column) const {
        if (share.num_rows > 0 && lane < share.columns)
            prefetch_bulk(column_of(share, first_column), k_blocks * kColumnBytes);
    }
    __device__ __forceinline__ void load(const Share& share, int first_column, uint64_t policy) {
        const uint8_t* column = column_of(share, first_column);
        const bool has_column = lane < share.columns;
        const int bytes = share.num_rows * kBlockBytes;
        for (int block = 0; block < k_blocks; ++block) {
            barrier_wait(&ring.empty[cursor.stage], cursor.parity ^ 1);
            uint64_t* full = &ring.full[cursor.stage];
            uint8_t* stage = stages + cursor.stage * kStageBytes;
            if (lane == 0) {
                barrier_expect(full, bytes + share.columns * kColumnBytes);
                bulk_load(stage, act + (int64_t(block) * rows + share.first_row) * kBlockBytes, bytes, full, policy);
            }
            __syncwarp();
            if (has_column)
                bulk_load(stage + kTokenBytes + lane * kColumnBytes, column + block * kColumnBytes, kColumnBytes, full,
                          policy);
            cursor.advance();
        }
    }

    using Sums = float[kColumns][4];

    __device__ __forceinline__ void multiply_block(Sums& sums, const uint8_t* stage, const Share& share) const {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            uint4 x[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = warp * kWarpRows + i * 8 + lane / 4;
                const int chunk = (step * 4 + lane % 4) ^ ((share.first_row + row) & 7);
                x[i] = *reinterpret_cast<const uint4*>(stage + row * kBlockBytes + chunk * 16);
            }
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                if (c >= share.columns) break;
                const uint4 a = *reinterpret_cast<const uint4*>(stage + kTokenBytes + c * kColumnBytes +
                                                                step * kAStepBytes + lane * 16);
                mma_m16n8k32(sums[c], x[0], x[1], a);
            }
        }
    }
    __device__ __forceinline__ void store(const Sums& sums, const Share& share, int first_column) const {
        const float scaling = share.entry.scaling[2];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            if (c >= share.columns) break;
            bf16* column = h + column_offset(first_column + c, share.first_row, rows) + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = warp * kWarpRows + i * 8 + lane / 4;
                const float* pair = &sums[c][i * 2];
                if (row < share.num_rows)
                    *reinterpret_cast<uint32_t*>(column + row * kRankBlock) =
                        pack_bf16(pair[0] * scaling, pair[1] * scaling);
            }
        }
    }
    __device__ __forceinline__ void multiply(const Share& share, int first_column) {
        Sums sums = {};
        for (int block = 0; block < k_blocks; ++block) {
            barrier_wait(&ring.full[cursor.stage], cursor.parity);
            if (warp * kWarpRows < share.num_rows) multiply_block(sums, stages + cursor.stage * kStageBytes, share);
            __syncwarp();
            if (lane == 0) barrier_arrive(&ring.empty[cursor.stage]);
            cursor.advance();
        }
        store(sums, share, first_column);
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    wide_shrink(const LayerArgs* layer, const uint8_t* act, const TokenTile* tiles, const int* num_tiles,
                const LoraGroup* groups, bf16* h, int num_experts, int k_blocks, int rows, int max_rank) {
    extern __shared__ __align__(1024) uint8_t shared[];
    Ring& ring = *reinterpret_cast<Ring*>(shared + kStages * kStageBytes);
    if (threadIdx.x == 0) {
        ring.init(1, kWarps);
        barrier_init_fence();
    }
    __syncthreads();

    Shrink shrink{layer, act, h, num_experts, k_blocks, rows, max_rank, shared, ring};
    const int chunks = ceil_div(max_rank / kRankBlock, kColumns);
    const int num_items = *num_tiles * kParts * chunks;
    const uint64_t policy = evict_first_policy();
    bool waits = true;
    for (int item = blockIdx.x; item < num_items; item += gridDim.x) {
        const TokenTile tile = tiles[item / (kParts * chunks)];
        const int most = rows_each(tile.num_rows, kParts);
        const int first = tile.first_row + item / chunks % kParts * most;
        const int last = min(first + most, tile.first_row + tile.num_rows);
        const int first_column = item % chunks * kColumns;
        for (int i = 0; i < tile.num_groups(); ++i) {
            const Share share(layer, groups[tile.first_group() + i], num_experts, first, last, first_column);
            if (waits) {
                if (shrink.warp == kWarps) shrink.ask_for_a(share, first_column);
                grid_dependency_wait();
                grid_dependency_launch();
                waits = false;
            }
            if (share.num_rows == 0 || share.columns == 0) continue;
            if (shrink.warp == kWarps)
                shrink.load(share, first_column, policy);
            else
                shrink.multiply(share, first_column);
        }
    }
    if (waits) {
        grid_dependency_wait();
        grid_dependency_launch();
    }
}
