// A multiplying warp's way through the ring of the token MLP: stages awaited and released, and what is multiplied of
// them.
#pragma once

#include "common/token_block.cuh"
#include "common/token_fragments.cuh"

struct WarpProducts {
    const Mlp& mlp;
    const Memory& memory;
    TokenCursor cursor;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;

    __device__ __forceinline__ void await_full() { barrier_wait(&memory.ring.full[cursor.stage], cursor.parity); }
    // The stage is done with, by this warp or for all of them.
    __device__ __forceinline__ void release(int warps) {
        __syncwarp();
        if (lane == 0) barrier_arrive(&memory.ring.empty[cursor.stage], warps);
        cursor.advance(mlp.num_stages);
    }
    // Waits for a stage that is this warp's alone, while those of others come and go: only once it has been begun does
    // its parity tell whether it is full.
    __device__ __forceinline__ void await_mine() {
        while (*const_cast<const volatile int*>(&memory.ring.begun) <= cursor.before) {
        }
        __syncwarp();
        await_full();
    }
    // Where this lane has the `index`th slice of the first stage.
    __device__ __forceinline__ uint32_t lane_slice(int index) const {
        return shared_address(memory.stages) + kept(index * kSliceBytes + Fragments::lane_offset(lane));
    }
    // acc += the stage's K-blocks of a slice by the columns' tokens: the slice lies every `bytes` from where this lane
    // has it in the first stage, `column` is this lane's.
    __device__ __forceinline__ void multiply(float (&acc)[4], uint32_t in_first, int bytes, int k_blocks,
                                             const uint8_t* column) {
        uint32_t slice = in_first + cursor.stage * mlp.stage_bytes;
        Fragments even(slice, column);
#pragma unroll 1
        for (int block = 1; block < k_blocks; block += 2) {
            const Fragments odd(slice + bytes, column + kBlockBytes);
            __syncwarp();  // these loads go out before the products of the block before
            even.multiply(acc);
            if (block + 1 < k_blocks) {
                slice += 2 * bytes;
                column += 2 * kBlockBytes;
                even = Fragments(slice, column);
                __syncwarp();
            }
            odd.multiply(acc);
        }
        if (k_blocks % 2) even.multiply(acc);
    }

    // The same of all K-blocks of a slice of gate_up, without a break between stages: the next one is awaited before
    // the last products of this one, after which it is released.
    __device__ __forceinline__ void multiply_item(float (&acc)[4], uint32_t in_first, int bytes,
                                                  const uint8_t* column) {
        const int k_blocks = mlp.gate_up.k_blocks;
        uint32_t slice = in_first + cursor.stage * mlp.stage_bytes;
        int left = mlp.item_blocks - 1;  // of this stage
        const auto step = [&](Fragments& ahead, const Fragments& now) {
            const bool enters = left == 0;
            left = enters ? mlp.item_blocks - 1 : left - 1;
            slice += bytes;
            column += kBlockBytes;
            if (enters) {
                TokenCursor next = cursor;
                next.advance(mlp.num_stages);
                barrier_wait(&memory.ring.full[next.stage], next.parity);
                slice = in_first + next.stage * mlp.stage_bytes;
            }
            ahead = Fragments(slice, column);
            __syncwarp();
            now.multiply(acc);
            if (enters) release(1);
        };
        await_full();
        Fragments even(slice, column);
        Fragments odd;
        int block = 1;
#pragma unroll 1
        for (; block + 1 < k_blocks; block += 2) {
            step(odd, even);
            step(even, odd);
        }
        if (block < k_blocks) {
            step(odd, even);
            odd.multiply(acc);
        } else {
            even.multiply(acc);
        }
        release(1);
    }
};
