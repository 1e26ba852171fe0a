// Fixed-width integers, bf16 and its conversions: all that the kernels need, without CUDA's headers.
#pragma once

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;

struct bf16 {
    uint16_t bits;
};

__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Two floats rounded to nearest even and packed, `low` in the lower 16 bits.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ bf16 to_bf16(float x) { return bf16{uint16_t(pack_bf16(x, 0.0f) & 0xffffu)}; }
__device__ __forceinline__ float round_to_bf16(float x) { return low_half(pack_bf16(x, 0.0f)); }

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

// A number of tokens that an instruction multiplies, as a type.
template <int N>
struct Width {};
