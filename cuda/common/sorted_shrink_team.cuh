// The warps that shrink beside the product of sorted tokens: an adapter group's 16 ranks a part, gate and up together.
//
// Ranks are the M operand, eight tokens the N operand, or twice eight where experts have so many that A would come
// again for each eight. K is split as everywhere, and summed in the same order. A part's A is under way while the part
// before is still being written.
#pragma once

#include "common/mlp.cuh"
#include "common/shrink_team.cuh"

static_assert(RANK_BLOCKS == 2, "an M tile is two blocks of ranks");

constexpr int kTokenBlocks = MAX_N > 64 ? 2 : 1;  // of eight tokens
constexpr int kTeamTokens = 8 * kTokenBlocks;     // of a group at the most; twins in graphs/geometry.py
constexpr int kTeamRanks = RANK_BLOCKS * kRankBlock;

// Hidden states where they came: [tokens, stride], less than 4 GiB of them.
struct GatheredTokens {
    const bf16* hidden;
    const int* place_tokens;  // the token of each permuted row
    int stride;
    __device__ __forceinline__ int find(int row) const { return place_tokens[row] * stride; }
    __device__ __forceinline__ uint4 load(uint32_t first, int step, int lane) const {
        return __ldg(reinterpret_cast<const uint4*>(hidden + first + step * 32 + lane % 4 * 8));
    }
};

// A warp's way through its shares of K; all are taken for equally long, and behind an end is nothing.
struct Walk {
    int k_steps;
    int share;
    int offset = 0;
    int begin;
    int end;

    __device__ __forceinline__ Walk(int k_steps, int warp) : k_steps(k_steps), share(warp) { enter(); }
    __device__ __forceinline__ int steps() const { return ceil_div(k_steps, kShares); }
    __device__ __forceinline__ void enter() {
        begin = share_begin(share, k_steps);
        end = min(share_begin(share + 1, k_steps), k_steps);
    }
    __device__ __forceinline__ void advance() {
        if (++offset < steps()) return;
        offset = 0;
        share += kShrinkWarps;
        enter();
    }
    __device__ __forceinline__ int step() const { return begin + offset; }
    __device__ __forceinline__ bool real() const { return begin + offset < end; }
};

// Where a chunk of a group's ranks lies.
template <int kProjections>
struct Chunk {
    const uint8_t* a[kProjections];
    int live[kProjections];  // blocks of ranks
    int a_block;             // bytes from one to the next
    int written;             // blocks of either projection: what the other has more of is written as zero

    __device__ __forceinline__ void read(const Gemm& gemm, const LoraGroup& group, int chunk, int chunks) {
        const int k_steps = 2 * gemm.k_blocks;
#pragma unroll
        for (int p = 0; p < kProjections; ++p) {
            const Item item = read_item<kProjections>(gemm.layer, group, p * chunks + chunk, gemm.num_experts, k_steps,
                                                      gemm.max_rank);
            a[p] = item.a;
            live[p] = item.live_blocks;
            written = item.written_blocks;
        }
        a_block = k_steps * kAStepBytes;
    }
};

// What the team keeps in shared memory: the shares' sums of each projection; the groups of this part and of the next.
struct TeamMemory {
    float sums[2][kShares][kTeamRanks][kTeamTokens];
    LoraGroup groups[2];
};

// A warp's sums of a share of K.
template <int kProjections>
using Sums = float[kProjections][kTokenBlocks][4];

// One step of K, on its way through registers.
template <int kProjections>
struct Step {
    uint4 a[kProjections][RANK_BLOCKS];
    uint4 x[kTokenBlocks];

    __device__ __forceinline__ void load_a(const Chunk<kProjections>& chunk, const Walk& walk) {
        const int offset = walk.step() * kAStepBytes + threadIdx.x % 32 * 16;
#pragma unroll
        for (int p = 0; p < kProjections; ++p)
#pragma unroll
            for (int b = 0; b < RANK_BLOCKS; ++b)
                a[p][b] = walk.real() && b < chunk.live[p]
                              ? __ldg(reinterpret_cast<const uint4*>(chunk.a[p] + b * chunk.a_block + offset))
                              : uint4{0, 0, 0, 0};
    }
    // `places` are those of token lane / 4 of each block of them; -1 for none.
    template <typename Operand>
    __device__ __forceinline__ void load_x(const Operand& operand, const int (&places)[kTokenBlocks],
                                           const Walk& walk) {
#pragma unroll
        for (int t = 0; t < kTokenBlocks; ++t)
            x[t] = walk.real() && places[t] >= 0 ? operand.load(places[t], walk.step(), threadIdx.x % 32)
                                                 : uint4{0, 0, 0, 0};
    }
    __device__ __forceinline__ void multiply(Sums<kProjections>& acc) const {
#pragma unroll
        for (int p = 0; p < kProjections; ++p)
#pragma unroll
            for (int t = 0; t < kTokenBlocks; ++t) mma_m16n8k32(acc[p][t], a[p][0], a[p][1], x[t]);
    }
};

struct SortedShrinkTeam {
    const Mlp& mlp;
    TeamMemory& memory;
    const bf16* hidden;
    const int* num_groups;

    template <int kProjections>
    __device__ __forceinline__ void keep(Sums<kProjections>& acc, int share) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int p = 0; p < kProjections; ++p)
#pragma unroll
            for (int t = 0; t < kTokenBlocks; ++t)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float* const kept = &memory.sums[p][share][lane / 4 + 8 * half][8 * t + lane % 4 * 2];
                    float (&sums)[2] = reinterpret_cast<float (&)[2]>(acc[p][t][2 * half]);
                    *reinterpret_cast<float2*>(kept) = float2{sums[0], sums[1]};
                    sums[0] = sums[1] = 0.0f;
                }
    }

    // Adds the shares' sums of a group, and writes h.
    template <int kProjections>
    __device__ __forceinline__ void write(const Gemm& gemm, const LoraGroup& group, int chunk, int chunks) const {
        for (int i = team_thread(); i < kProjections * kTeamRanks * kTeamTokens; i += kShrinkThreads) {
            const int rank = i % kRankBlock;
            const int token = i / kRankBlock % kTeamTokens;
            const int block = i / (kRankBlock * kTeamTokens) % RANK_BLOCKS;
            const int projection = i / (kTeamRanks * kTeamTokens);
            const Item item = read_item<kProjections>(gemm.layer, group, projection * chunks + chunk, gemm.num_experts,
                                                      2 * gemm.k_blocks, gemm.max_rank);
            float sum = 0.0f;
#pragma unroll
            for (int share = 0; share < kShares; ++share)
                sum += memory.sums[projection][share][block * kRankBlock + rank][token];
            if (token < group.num_rows && block < item.written_blocks)
                const_cast<bf16*>(gemm.h)[h_offset(item.first_block + block, group.first_row + token, projection,
                                                   gemm.rows, kProjections) +
                                          rank] = to_bf16(sum * item.scaling);
        }
    }

    // All groups' chunks of ranks of one product, dealt to the blocks in turn.
    template <int kProjections, typename Operand>
    __device__ __forceinline__ void shrink(const Gemm& gemm, const Operand& operand) const {
        constexpr int kDepth = kProjections == 2 ? 3 : 5;  // steps in flight
        const int k_steps = 2 * gemm.k_blocks;
        const int chunks = ceil_div(gemm.max_rank, kTeamRanks);
        const int items = *num_groups * chunks;
        const int begin = team_block();
        if (begin >= items) return;
        if (team_thread() == 0) memory.groups[0] = gemm.groups[begin / chunks];
        team_sync();
        Chunk<kProjections> chunk;
        chunk.read(gemm, memory.groups[0], begin % chunks, chunks);
        Step<kProjections> held[kDepth];
        load_ahead(held, chunk, k_steps);
        int turn = 0;
#pragma unroll 1
        for (int index = begin; index < items; index += gridDim.x) {
            const int next = index + gridDim.x;
            const LoraGroup& group = memory.groups[turn];
            turn ^= 1;
            LoraGroup& upcoming = memory.groups[turn];
            if (next < items && team_thread() == 0) async_copy16(&upcoming, &gemm.groups[next / chunks], true);
            const bool written = chunk.written > 0;
            if (written) {
                await_tokens(gemm.pending_tokens(group.expert));
                int places[kTokenBlocks];
#pragma unroll
                for (int t = 0; t < kTokenBlocks; ++t) {
                    const int token = 8 * t + threadIdx.x % 32 / 4;
                    places[t] = token < group.num_rows ? operand.find(group.first_row + token) : -1;
                }
                multiply_shares(held, chunk, operand, places, k_steps);
            }
            async_copies_wait();
            team_sync();
            // The next part's A is under way while this one is written.
            if (next < items) {
                chunk.read(gemm, upcoming, next % chunks, chunks);
                load_ahead(held, chunk, k_steps);
            }
            if (written) {
                write<kProjections>(gemm, group, index % chunks, chunks);
                async_writes_fence();
                team_sync();
            }
            finish_part(gemm, group.expert, written);
        }
    }

    template <int kDepth, int kProjections>
    __device__ __forceinline__ void load_ahead(Step<kProjections> (&held)[kDepth], const Chunk<kProjections>& chunk,
                                               int k_steps) const {
        Walk ahead(k_steps, team_thread() / 32);
#pragma unroll
        for (int i = 0; i < kDepth; ++i) {
            held[i].load_a(chunk, ahead);
            ahead.advance();
        }
    }

    // The sums of this warp's shares of K for all tokens; the first steps of A are under way.
    template <int kDepth, int kProjections, typename Operand>
    __device__ __forceinline__ void multiply_shares(Step<kProjections> (&held)[kDepth],
                                                    const Chunk<kProjections>& chunk, const Operand& operand,
                                                    const int (&places)[kTokenBlocks], int k_steps) const {
        Sums<kProjections> acc = {};
        Walk ahead(k_steps, team_thread() / 32);
#pragma unroll
        for (int i = 0; i < kDepth; ++i) {
            held[i].load_x(operand, places, ahead);
            ahead.advance();
        }
        const int steps = ahead.steps();
        const int total = kWarpShares * steps;
        int share = team_thread() / 32;
        int left = steps;
#pragma unroll 1
        for (int step = 0; step < total; step += kDepth)
#pragma unroll
            for (int i = 0; i < kDepth; ++i) {
                if (step + i >= total) break;
                held[i].multiply(acc);
                held[i].load_a(chunk, ahead);
                held[i].load_x(operand, places, ahead);
                ahead.advance();
                if (--left > 0) continue;
                keep(acc, share);
                share += kShrinkWarps;
                left = steps;
            }
    }

    __device__ __forceinline__ void run() const {
        shrink<2>(mlp.gate_up, GatheredTokens{hidden, mlp.gate_up.place_tokens, mlp.gate_up.k_blocks * kBlockK});
        shrink<1>(mlp.down, NearTokens{mlp.down.tokens, mlp.down.rows});
    }
};
