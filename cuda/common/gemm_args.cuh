// What every grouped GEMM is asked to do: its epilogue and its arguments.
#pragma once

#include "common/layer_args.cuh"
#include "common/tiles.cuh"

#define EPILOGUE_GATE_UP 0     // gate and up as fp32 pairs, [P, I]
#define EPILOGUE_ACTIVATION 1  // silu(gate) * up as the down projection's operand, BlockMajorK [I/64, P, 64]
#define EPILOGUE_DOWN 2        // bf16 rows, [P, H]
#define EPILOGUE_DOWN_FP32 3   // fp32 rows, [P, H]
#define EPILOGUE_BOTH 4        // one kernel has both products: EPILOGUE_ACTIVATION of gate_up, EPILOGUE_DOWN of down
#define IS_DOWN (EPILOGUE == EPILOGUE_DOWN || EPILOGUE == EPILOGUE_DOWN_FP32)

constexpr int kNoItem = -1;  // ends the work

// What an item is of: a token tile, and one row tile or as many from there.
struct Place {
    int tile;
    int row_tile;
    int row_tiles;
};

struct Gemm {
    const LayerArgs* layer;
    const uint8_t* weights;  // [experts, k_blocks, row_tiles * BLOCK_M, 64]
    // [k_blocks, rows, 64]; with `place_tokens` hidden states [tokens, k_blocks * 64]; null where those are in shared
    // memory.
    const uint8_t* tokens;
    const TokenTile* tiles;
    const LoraGroup* groups;
    const bf16* h;  // [R/8, rows, projections, 8]; of wide GEMMs [R/8, projections, rows, 8]
    // [experts] parts that are still to come, of the tokens and of h; null where kernels before have made them.
    const int* tokens_pending;
    const int* h_pending;
    int* ticket;  // items taken beyond the first of each block, or cluster; zero at launch
    int num_items;
    int num_experts;
    int k_blocks;
    int row_tiles;
    int rows;
    int max_rank;
    void* out;
    int out_stride;
    const int* place_tokens = nullptr;  // [rows] the token of each permuted row, where the ring gathers
    int item_tiles = 1;                 // row tiles that an item has at the most; more than one only there

    __device__ __forceinline__ const int* all_pending() const { return tokens_pending; }
    // What must be zero before an expert's tokens may be read; null where they are older than the kernel.
    __device__ __forceinline__ const int* pending_tokens(int expert) const {
        return tokens_pending ? tokens_pending + expert : nullptr;
    }
};
