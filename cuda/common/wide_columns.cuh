// Which columns of h are to be made of a part of a token tile, eight ranks each, and where their A lies.
#pragma once

#include "common/layer_args.cuh"
#include "common/layout.cuh"
#include "common/lora.cuh"
#include "common/scan.cuh"
#include "common/tiles.cuh"

constexpr int kListed = 32;                    // columns that are looked up together
constexpr int kColumnBytes = 2 * kAStepBytes;  // of A by a K-block
static_assert(kListed <= 32, "a lane each");

struct Column {
    const uint8_t* a;  // null: written as zero, for the other projection has more ranks
    float scaling;
    int index;  // within h
    int first;  // rows of its group, within the part
    int last;
};

struct Columns {
    Column column[kListed];
    int count;
    int more;  // whether there may be others behind them
};

// The columns of all adapter groups that a part's rows belong to, which a warp goes through kListed at a time: of down,
// or of both projections in turn, gate and up. Only live ranks have any.
template <int kProjections>
struct ColumnList {
    const LayerArgs* layer;
    const LoraGroup* groups;
    int num_experts;
    int max_rank;
    TokenTile tile;
    int first_row;  // of the part, permuted
    int num_rows;
    int k_blocks;
    int batch = 0;  // of 32 groups, a lane each,
    int next = 0;   // and the column among theirs
    const int lane = threadIdx.x % 32;

    static __device__ __forceinline__ int number_of(int projection) { return kProjections == 1 ? 2 : projection; }

    __device__ __forceinline__ LoraGroup group_of(int index) const { return groups[tile.first_group() + index]; }
    __device__ __forceinline__ LoraEntry entry_of(const LoraGroup& of) const {
        return layer->entry_of(of.slot, of.expert, num_experts);
    }
    // How many columns a group has in this part.
    __device__ __forceinline__ int columns_of(int index) const {
        if (index >= tile.num_groups()) return 0;
        const LoraGroup of = group_of(index);
        if (of.first_row >= first_row + num_rows || of.first_row + of.num_rows <= first_row) return 0;
        const LoraEntry entry = entry_of(of);
        const int most = max(entry.rank[number_of(0)], entry.rank[number_of(kProjections - 1)]);
        return ceil_div(most, kRankBlock) * kProjections;
    }
    __device__ __forceinline__ Column column_of(const LoraGroup& of, int column) const {
        const LoraEntry entry = entry_of(of);
        const int projection = column % kProjections;
        const int block = column / kProjections;
        const int rank = projection == 0 ? entry.rank[number_of(0)] : entry.rank[1];
        const float scaling = projection == 0 ? entry.scaling[number_of(0)] : entry.scaling[1];
        const int source = kProjections > 1 && entry.shared_a >> projection & 1 ? 0 : of.expert;
        const int64_t matrix = (int64_t(of.slot) * num_experts + source) * kProjections + projection;
        const uint8_t* all = kProjections == 1 ? layer->lora_a_down : layer->lora_a_gate_up;
        const uint8_t* a = all + (matrix * (max_rank / kRankBlock) + block) * (int64_t(k_blocks) * kColumnBytes);
        return Column{block < ceil_div(rank, kRankBlock) ? a : nullptr, scaling, column,
                      max(of.first_row - first_row, 0), min(of.first_row + of.num_rows - first_row, num_rows)};
    }
    // Lists the next columns, if there are any; the warp's lanes go together.
    __device__ __forceinline__ void fill(Columns& columns) {
        const int num_groups = tile.num_groups();
        int count = 0;
        bool more = false;
        for (; batch < num_groups; batch += 32, next = 0) {
            const int mine = columns_of(batch + lane);
            const int end = warp_inclusive_scan(mine);
            const int total = __shfl_sync(~0u, end, 31);
            count = min(total - next, kListed);
            if (count <= 0) continue;
            const int owner = lane_that_has(next + lane, end, num_groups - batch);
            const int column = next + lane - __shfl_sync(~0u, end - mine, owner);
            if (lane < count) columns.column[lane] = column_of(group_of(batch + owner), column);
            next += count;
            more = next < total || batch + 32 < num_groups;
            break;
        }
        if (lane == 0) {
            columns.count = max(count, 0);
            columns.more = more;
        }
    }
};
