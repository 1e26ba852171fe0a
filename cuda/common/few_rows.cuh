// The tiles of up to 32 slot rows, one a lane of one warp: they stay in its registers until the first weights are under
// way, and only then does it note them where `DirectTiles` has them for the others.
#pragma once

#include "common/direct.cuh"

constexpr int kFewRows = 32;  // the twin of FEW_ROWS

struct FewRows {
    int id;      // global expert, as sent
    int slot;    // adapter's, -1 for none
    int tokens;  // of all rows
    int token;
    int choice;
    int key;      // kNoKey for none
    int expert;   // -1 for none
    int tiles;    // the expert's in its first lane, else none
    int before;   // tiles of the experts before,
    int earlier;  // and their rows
    uint32_t alike;

    // How often `divisor` goes into a small number, exactly, by a float's reciprocal.
    static __device__ __forceinline__ int small_quotient(int number, int divisor) {
        return int(__fdividef(float(number) + 0.5f, float(divisor)));
    }

    // Asks for the routing, that of padding tokens too; `sort` is the first that waits for it.
    __device__ __forceinline__ FewRows(const Routing& routing, const int* num_tokens, int max_rows) {
        const int lane = threadIdx.x % 32;
        const bool shared = routing.choices > routing.top_k;
        const bool held = lane < max_rows;
        id = 0;
        slot = -1;
        if (held && !shared) id = __ldg(routing.topk_ids + lane);  // which waits for no quotient
        tokens = *num_tokens;
        token = small_quotient(lane, routing.choices);
        choice = lane - token * routing.choices;
        if (held && shared && choice < routing.top_k) id = __ldg(routing.topk_ids + token * routing.top_k + choice);
        if (held && routing.buckets > 1) slot = __ldg(routing.token_slots + token);
    }

    __device__ __forceinline__ void sort(const Routing& routing, int max_rows) {
        const bool routed = choice < routing.top_k;
        const int local = routed ? id - routing.local_offset : routing.num_local + choice - routing.top_k;
        const bool held = int(threadIdx.x % 32) < min(tokens * routing.choices, max_rows);
        const bool here = held && local >= 0 && (!routed || local < routing.num_local);
        expert = here ? local : -1;
        key = here ? local * routing.buckets + slot + 1 : kNoKey;
        rank_experts(max_rows);
    }

    // What lies before each expert, its tiles being of kRowAlign rows.
    __device__ __forceinline__ void rank_experts(int max_rows) {
        constexpr int kBatch = 8;
        const int lane = threadIdx.x % 32;
        alike = __match_any_sync(~0u, expert);
        const bool leads = expert >= 0 && lane == __ffs(alike) - 1;
        tiles = leads ? ceil_div(__popc(alike), kRowAlign) : 0;
        const int mine = leads ? expert << 16 | tiles << 8 | __popc(alike) : 0x7fff0000;
        uint32_t sum = 0;  // of tiles and rows, in its low halfword
#pragma unroll 1
        for (int first = 0; first < max_rows; first += kBatch)
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int other = __shfl_sync(~0u, mine, first + i);
                if (other < expert << 16) sum += uint32_t(other);
            }
        before = int(sum >> 8 & 0xff);
        earlier = int(sum & 0xff);
    }

    __device__ __forceinline__ int num_tiles() const { return __reduce_add_sync(~0u, tiles); }
    // The expert of a tile that there is; the whole warp asks for the same.
    __device__ __forceinline__ int expert_of(int tile) const {
        const uint32_t has = __ballot_sync(~0u, tile >= before && tile < before + tiles);
        return __shfl_sync(~0u, expert, __ffs(has) - 1);
    }

    // Rows of the same expert before this one, which those of earlier adapters are, and earlier rows of its own. The
    // whole warp asks.
    __device__ __forceinline__ int rank(int buckets, int max_rows) const {
        const int lane = threadIdx.x % 32;
        if (buckets == 1) return __popc(alike & ((1u << lane) - 1));
        int rank = 0;
#pragma unroll 4
        for (int other = 0; other < max_rows; ++other) {
            const int held = __shfl_sync(~0u, key, other);
            const bool precedes = held < key || (held == key && other < lane);
            rank += precedes && (alike >> other & 1);
        }
        return rank;
    }

    // Notes tiles and places as `make` and `place_rows` do; a block-wide barrier must follow.
    __device__ __forceinline__ void note(const DirectTiles& direct, int num_tiles, int buckets, int max_rows) const {
        const int lane = threadIdx.x % 32;
        direct.keys[lane] = uint16_t(key);
        const int placed = __popc(__ballot_sync(~0u, expert >= 0));
        if (lane == 0) *direct.num_tiles = num_tiles;
        if (lane >= placed) direct.order[lane] = kNoRow;
        const int start = before * kRowAlign;
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile)
            direct.tiles[before + tile] = DirectTile{int16_t(expert), int16_t(start + tile * kRowAlign),
                                                     int16_t(min(kRowAlign, __popc(alike) - tile * kRowAlign)), 0};
        const int rows = rank(buckets, max_rows);
        direct.places[lane] = kNoRow;
        if (expert < 0) return;
        direct.places[lane] = uint16_t(start + rows);
        direct.row_tokens[start + rows] = uint8_t(token);
        direct.order[earlier + rows] = uint16_t(lane);
    }
};
