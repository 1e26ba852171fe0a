// Warpgroup matrix multiply: 64 weight rows by N tokens by 16, both operands in swizzled shared memory.
#pragma once

#include "common/types.cuh"

// Shared-memory descriptor of a K-major operand with 128-byte swizzle: address / 16 in bits 0-13, the
// stride between groups of eight rows (1024 bytes / 16) in bits 32-45, swizzle mode 1 in bits 62-63. Bits 16-29 mean
// nothing in this mode.
// The operand starts at a multiple of 1024 bytes; 16 more elements along K are 32 bytes further.
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t address) {
    return uint64_t((address & 0x3ffff) >> 4) | (uint64_t(1) << 16) | (uint64_t(64) << 32) | (uint64_t(1) << 62);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kInFlight>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
}

// d[64 x N] += a[64 x 16] * b[N x 16]^T, bf16 operands, fp32 accumulators. A thread of
// warp w, lane l owns rows 16w + l/4 (d[4j], d[4j+1]) and that + 8 (d[4j+2], d[4j+3]) at columns
// 8j + 2(l%4) and the next.
template <int N>
struct Wgmma;

// clang-format off
#define MOELET_D4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define MOELET_D16(i) MOELET_D4(i), MOELET_D4((i) + 4), MOELET_D4((i) + 8), MOELET_D4((i) + 12)
#define MOELET_D32(i) MOELET_D16(i), MOELET_D16((i) + 16)

template <>
struct Wgmma<8> {
    static __device__ __forceinline__ void multiply(float (&d)[4], uint64_t a, uint64_t b) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3"
            "}, %4, %5, 1, 1, 1, 0, 0;"
            : MOELET_D4(0)
            : "l"(a), "l"(b));
    }
};

template <>
struct Wgmma<16> {
    static __device__ __forceinline__ void multiply(float (&d)[8], uint64_t a, uint64_t b) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7"
            "}, %8, %9, 1, 1, 1, 0, 0;"
            : MOELET_D4(0), MOELET_D4(4)
            : "l"(a), "l"(b));
    }
};

template <>
struct Wgmma<24> {
    static __device__ __forceinline__ void multiply(float (&d)[12], uint64_t a, uint64_t b) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11"
            "}, %12, %13, 1, 1, 1, 0, 0;"
            : MOELET_D4(0), MOELET_D4(4), MOELET_D4(8)
            : "l"(a), "l"(b));
    }
};

template <>
struct Wgmma<32> {
    static __device__ __forceinline__ void multiply(float (&d)[16], uint64_t a, uint64_t b) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
            "}, %16, %17, 1, 1, 1, 0, 0;"
            : MOELET_D16(0)
            : "l"(a), "l"(b));
    }
};

template <>
struct Wgmma<48> {
    static __device__ __forceinline__ void multiply(float (&d)[24], uint64_t a, uint64_t b) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23"
            "}, %24, %25, 1, 1, 1, 0, 0;"
            : MOELET_D16(0), MOELET_D4(16), MOELET_D4(20)
            : "l"(a), "l"(b));
    }
};

template <>
struct Wgmma<64> {
    static __device__ __forceinline__ void multiply(float (&d)[32], uint64_t a, uint64_t b) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
            "}, %32, %33, 1, 1, 1, 0, 0;"
            : MOELET_D32(0)
            : "l"(a), "l"(b));
    }
};

template <>
struct Wgmma<96> {
    static __device__ __forceinline__ void multiply(float (&d)[48], uint64_t a, uint64_t b) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
            "}, %48, %49, 1, 1, 1, 0, 0;"
            : MOELET_D32(0), MOELET_D16(32)
            : "l"(a), "l"(b));
    }
};

template <>
struct Wgmma<128> {
    static __device__ __forceinline__ void multiply(float (&d)[64], uint64_t a, uint64_t b) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
            "}, %64, %65, 1, 1, 1, 0, 0;"
            : MOELET_D32(0), MOELET_D32(32)
            : "l"(a), "l"(b));
    }
};

#undef MOELET_D32
#undef MOELET_D16
#undef MOELET_D4
// clang-format on
