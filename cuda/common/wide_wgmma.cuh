// Warpgroup matrix multiply of wide token tiles: the widths up to 256, and a product whose weights lie in registers.
#pragma once

#include "common/wgmma.cuh"

// d[64 x N] += a[64 x 16] * b[N x 16]^T as Wgmma<N>, on the first N / 2 of a larger tile's sums. `a` is a descriptor,
// or the fragments of an m16n8k16 product: each warp's 16 rows.
template <int N>
struct WideWgmma;

// Operand whose rows of 16 bytes, eight elements along K, lie one after another; the next eight elements are
// `k_stride` bytes further. No swizzle: bits 16-29 are that stride / 16, bits 32-45 that of eight rows (128 bytes /
// 16).
__device__ __forceinline__ uint64_t column_descriptor(uint32_t address, uint32_t k_stride) {
    return uint64_t((address & 0x3ffff) >> 4) | (uint64_t(k_stride >> 4) << 16) | (uint64_t(8) << 32);
}

// Eight sums at a time: their places in the instruction and their operands.
// clang-format off
#define MOELET_PLACES1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MOELET_PLACES2 MOELET_PLACES1 ", " "%8, %9, %10, %11, %12, %13, %14, %15"
#define MOELET_PLACES3 MOELET_PLACES2 ", " "%16, %17, %18, %19, %20, %21, %22, %23"
#define MOELET_PLACES4 MOELET_PLACES3 ", " "%24, %25, %26, %27, %28, %29, %30, %31"
#define MOELET_PLACES5 MOELET_PLACES4 ", " "%32, %33, %34, %35, %36, %37, %38, %39"
#define MOELET_PLACES6 MOELET_PLACES5 ", " "%40, %41, %42, %43, %44, %45, %46, %47"
#define MOELET_PLACES7 MOELET_PLACES6 ", " "%48, %49, %50, %51, %52, %53, %54, %55"
#define MOELET_PLACES8 MOELET_PLACES7 ", " "%56, %57, %58, %59, %60, %61, %62, %63"
#define MOELET_PLACES9 MOELET_PLACES8 ", " "%64, %65, %66, %67, %68, %69, %70, %71"
#define MOELET_PLACES10 MOELET_PLACES9 ", " "%72, %73, %74, %75, %76, %77, %78, %79"
#define MOELET_PLACES11 MOELET_PLACES10 ", " "%80, %81, %82, %83, %84, %85, %86, %87"
#define MOELET_PLACES12 MOELET_PLACES11 ", " "%88, %89, %90, %91, %92, %93, %94, %95"
#define MOELET_PLACES13 MOELET_PLACES12 ", " "%96, %97, %98, %99, %100, %101, %102, %103"
#define MOELET_PLACES14 MOELET_PLACES13 ", " "%104, %105, %106, %107, %108, %109, %110, %111"
#define MOELET_PLACES15 MOELET_PLACES14 ", " "%112, %113, %114, %115, %116, %117, %118, %119"
#define MOELET_PLACES16 MOELET_PLACES15 ", " "%120, %121, %122, %123, %124, %125, %126, %127"
#define MOELET_SUMS(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), \
    "+f"(d[(i) + 4]), "+f"(d[(i) + 5]), "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define MOELET_SUMS1 MOELET_SUMS(0)
#define MOELET_SUMS2 MOELET_SUMS1, MOELET_SUMS(8)
#define MOELET_SUMS3 MOELET_SUMS2, MOELET_SUMS(16)
#define MOELET_SUMS4 MOELET_SUMS3, MOELET_SUMS(24)
#define MOELET_SUMS5 MOELET_SUMS4, MOELET_SUMS(32)
#define MOELET_SUMS6 MOELET_SUMS5, MOELET_SUMS(40)
#define MOELET_SUMS7 MOELET_SUMS6, MOELET_SUMS(48)
#define MOELET_SUMS8 MOELET_SUMS7, MOELET_SUMS(56)
#define MOELET_SUMS9 MOELET_SUMS8, MOELET_SUMS(64)
#define MOELET_SUMS10 MOELET_SUMS9, MOELET_SUMS(72)
#define MOELET_SUMS11 MOELET_SUMS10, MOELET_SUMS(80)
#define MOELET_SUMS12 MOELET_SUMS11, MOELET_SUMS(88)
#define MOELET_SUMS13 MOELET_SUMS12, MOELET_SUMS(96)
#define MOELET_SUMS14 MOELET_SUMS13, MOELET_SUMS(104)
#define MOELET_SUMS15 MOELET_SUMS14, MOELET_SUMS(112)
#define MOELET_SUMS16 MOELET_SUMS15, MOELET_SUMS(120)

// A0 to A5 are the places behind N / 2 sums.
#define MOELET_WIDE(N, PLACES, A0, A1, A2, A3, A4, A5, ...)                                                 \
    template <>                                                                                             \
    struct WideWgmma<N> {                                                                                   \
        template <int kSums>                                                                                \
        static __device__ __forceinline__ void multiply(float (&d)[kSums], uint64_t a, uint64_t b) {        \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" PLACES "}, "          \
                         A0 ", " A1 ", 1, 1, 1, 0, 0;"                                                      \
                         : __VA_ARGS__                                                                      \
                         : "l"(a), "l"(b));                                                                 \
        }                                                                                                   \
        template <int kSums>                                                                                \
        static __device__ __forceinline__ void multiply(float (&d)[kSums], uint64_t a, uint64_t b,          \
                                                        bool adds) {                                        \
            asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " A2 ", 0;\n"                              \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" PLACES "}, "          \
                         A0 ", " A1 ", adds, 1, 1, 0, 0;\n}"                                                \
                         : __VA_ARGS__                                                                      \
                         : "l"(a), "l"(b), "r"(int(adds)));                                                 \
        }                                                                                                   \
        template <int kSums>                                                                                \
        static __device__ __forceinline__ void multiply(float (&d)[kSums], const uint4& a, uint64_t b,      \
                                                        bool adds) {                                        \
            asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " A5 ", 0;\n"                              \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" PLACES "}, "          \
                         "{" A0 ", " A1 ", " A2 ", " A3 "}, " A4 ", adds, 1, 1, 0;\n}"                      \
                         : __VA_ARGS__                                                                      \
                         : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(int(adds)));                 \
        }                                                                                                   \
    };

MOELET_WIDE(32, MOELET_PLACES2, "%16", "%17", "%18", "%19", "%20", "%21", MOELET_SUMS2)
MOELET_WIDE(64, MOELET_PLACES4, "%32", "%33", "%34", "%35", "%36", "%37", MOELET_SUMS4)
MOELET_WIDE(96, MOELET_PLACES6, "%48", "%49", "%50", "%51", "%52", "%53", MOELET_SUMS6)
MOELET_WIDE(112, MOELET_PLACES7, "%56", "%57", "%58", "%59", "%60", "%61", MOELET_SUMS7)
MOELET_WIDE(128, MOELET_PLACES8, "%64", "%65", "%66", "%67", "%68", "%69", MOELET_SUMS8)
MOELET_WIDE(144, MOELET_PLACES9, "%72", "%73", "%74", "%75", "%76", "%77", MOELET_SUMS9)
MOELET_WIDE(160, MOELET_PLACES10, "%80", "%81", "%82", "%83", "%84", "%85", MOELET_SUMS10)
MOELET_WIDE(176, MOELET_PLACES11, "%88", "%89", "%90", "%91", "%92", "%93", MOELET_SUMS11)
MOELET_WIDE(192, MOELET_PLACES12, "%96", "%97", "%98", "%99", "%100", "%101", MOELET_SUMS12)
MOELET_WIDE(208, MOELET_PLACES13, "%104", "%105", "%106", "%107", "%108", "%109", MOELET_SUMS13)
MOELET_WIDE(224, MOELET_PLACES14, "%112", "%113", "%114", "%115", "%116", "%117", MOELET_SUMS14)
MOELET_WIDE(240, MOELET_PLACES15, "%120", "%121", "%122", "%123", "%124", "%125", MOELET_SUMS15)
MOELET_WIDE(256, MOELET_PLACES16, "%128", "%129", "%130", "%131", "%132", "%133", MOELET_SUMS16)

#undef MOELET_WIDE
#undef MOELET_PLACES1
#undef MOELET_SUMS1
#undef MOELET_PLACES2
#undef MOELET_SUMS2
#undef MOELET_PLACES3
#undef MOELET_SUMS3
#undef MOELET_PLACES4
#undef MOELET_SUMS4
#undef MOELET_PLACES5
#undef MOELET_SUMS5
#undef MOELET_PLACES6
#undef MOELET_SUMS6
#undef MOELET_PLACES7
#undef MOELET_SUMS7
#undef MOELET_PLACES8
#undef MOELET_SUMS8
#undef MOELET_PLACES9
#undef MOELET_SUMS9
#undef MOELET_PLACES10
#undef MOELET_SUMS10
#undef MOELET_PLACES11
#undef MOELET_SUMS11
#undef MOELET_PLACES12
#undef MOELET_SUMS12
#undef MOELET_PLACES13
#undef MOELET_SUMS13
#undef MOELET_PLACES14
#undef MOELET_SUMS14
#undef MOELET_PLACES15
#undef MOELET_SUMS15
#undef MOELET_PLACES16
#undef MOELET_SUMS16
#undef MOELET_SUMS
// clang-format on
