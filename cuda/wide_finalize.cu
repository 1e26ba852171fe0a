// out[t] = sum over choices of weight * down of many tokens: as finalize.cu, to the bit, at the speed of memory.
//
// A warp keeps a ring of rows full, each by one bulk copy, and four warps sum them in the order of the choices. A row
// is a token's, or as many columns of it as those warps have. Blocks go from token to token, and ask for the next one's
// places while the rows of this one are on their way.
#include "common/layer_args.cuh"
#include "common/ring.cuh"
#include "common/weighted_sum.cuh"

constexpr int kSummers = 128;
constexpr int kThreads = kSummers + 32;
constexpr int kStages = 32;
constexpr int kPartColumns = kSummers * kColumns;
constexpr int kRowBytes = kPartColumns * sizeof(bf16);

// What a stage holds: a choice's row and what it weighs, or none, for a token without any; and whether it is the
// token's last one.
struct Stage {
    float weight;
    int16_t has_row;
    int16_t last;
};

struct Ring : Barriers<kStages> {
    Stage stage[kStages];
};

struct Job {
    const int* places;  // [tokens, choices]
    ChoiceWeights weights;
    const bf16* down;  // [P, hidden_stride]
    int hidden_stride;
    int parts;  // of a token's columns
    int num_items;
};

// A lane's choice among 32 of a token's.
struct Choice {
    int place = -1;
    float weight = 0.0f;

    __device__ __forceinline__ Choice() {}
    __device__ __forceinline__ Choice(const Job& job, int item, int choice) {
        if (item >= job.num_items || choice >= job.weights.choices) return;
        const int token = item / job.parts;
        place = __ldg(job.places + token * job.weights.choices + choice);
        weight = job.weights.of(token, choice);
    }
};

// Its lanes go together.
struct RowProducer {
    const Job& job;
    Ring& ring;
    uint8_t* rows;
    Cursor<kStages> cursor;
    const uint64_t policy = evict_first_policy();
    const int lane = threadIdx.x % 32;

    // The rows of a batch of choices, a stage each; the `final` one of an item takes one at least.
    __device__ __forceinline__ void load(const Choice& mine, int part, bool final) {
        const uint32_t real = __ballot_sync(~0u, mine.place >= 0);
        const int count = max(__popc(real), int(final));
        if (count == 0) return;
        // Stages are given back in turn: with the last one all are free.
        Cursor<kStages> end = cursor;
        end.advance(count - 1);
        barrier_wait(&ring.empty[end.stage], end.parity ^ 1);
        const bool has_row = mine.place >= 0;
        const int number = has_row ? __popc(real & ((1u << lane) - 1)) : lane;
        if (has_row || (real == 0 && lane == 0)) {
            Cursor<kStages> at = cursor;
            at.advance(number);
            const int first = part * kPartColumns;
            const int bytes = min(kPartColumns, job.hidden_stride - first) * int(sizeof(bf16));
            uint64_t* full = &ring.full[at.stage];
            ring.stage[at.stage] = Stage{mine.weight, has_row, int16_t(final && number == count - 1)};
            if (has_row) {
                barrier_expect(full, bytes);
                bulk_load(rows + at.stage * kRowBytes, job.down + int64_t(mine.place) * job.hidden_stride + first,
                          bytes, full, policy);
            } else {
                barrier_arrive(full);
            }
        }
        cursor.advance(count);
    }
    __device__ __forceinline__ void run() {
        Choice next(job, blockIdx.x, lane);
        // Places and weights are older than the kernel before, which made the down outputs.
        grid_dependency_wait();
        grid_dependency_launch();
        for (int item = blockIdx.x; item < job.num_items; item += gridDim.x) {
            const Choice first = next;
            next = Choice(job, item + gridDim.x, lane);
            load(first, item % job.parts, job.weights.choices <= 32);
            for (int batch = 32; batch < job.weights.choices; batch += 32)
                load(Choice(job, item, batch + lane), item % job.parts, batch + 32 >= job.weights.choices);
        }
    }
};

struct RowConsumer {
    const Job& job;
    Ring& ring;
    const uint8_t* rows;
    bf16* target;
    Cursor<kStages> cursor;

    __device__ __forceinline__ void run() {
        for (int item = blockIdx.x; item < job.num_items; item += gridDim.x) {
            const int column = item % job.parts * kPartColumns + threadIdx.x * kColumns;
            const bool real = column < job.hidden_stride;
            Sum sum;
            for (bool last = false; !last;) {
                barrier_wait(&ring.full[cursor.stage], cursor.parity);
                const Stage stage = ring.stage[cursor.stage];
                last = stage.last;
                if (real && stage.has_row)
                    sum.add(stage.weight, reinterpret_cast<const uint4*>(rows + cursor.stage * kRowBytes)[threadIdx.x]);
                __syncwarp();
                if (threadIdx.x % 32 == 0) barrier_arrive(&ring.empty[cursor.stage]);
                cursor.advance();
            }
            if (real)
                *reinterpret_cast<uint4*>(target + int64_t(item / job.parts) * job.hidden_stride + column) =
                    sum.packed();
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    wide_finalize(const LayerArgs* layer, const int* places, const float* topk_weights, const float* shared_weights,
                  const bf16* down, bf16* out, int top_k, int num_shared, int hidden_stride) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Ring ring;
    if (threadIdx.x == 0) {
        ring.init(1, kSummers / 32);
        barrier_init_fence();
    }
    __syncthreads();
    const int parts = ceil_div(hidden_stride, kPartColumns);
    const Job job{places, {topk_weights, shared_weights, top_k, top_k + num_shared},
                  down,   hidden_stride,
                  parts,  layer->num_tokens * parts};
    if (threadIdx.x < kSummers)
        RowConsumer{job, ring, shared, layer->output_or(out)}.run();
    else
        RowProducer{job, ring, shared}.run();
}
