// Warpgroup matrix multiply: 64 weight rows by N tokens by 16, tokens in shared memory, weights there or in registers.
#pragma once

#include "common/types.cuh"

// Shared-memory descriptor of a K-major operand with 128-byte swizzle: address / 16 in bits 0-13, the
// stride between groups of eight rows (1024 bytes / 16) in bits 32-45, swizzle mode 1 in bits 62-63. Bits 16-29 mean
// nothing in this mode.
// The operand starts at a multiple of 1024 bytes; 16 more elements along K are 32 bytes further.
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t address) {
    return uint64_t((address & 0x3ffff) >> 4) | (uint64_t(1) << 16) | (uint64_t(64) << 32) | (uint64_t(1) << 62);
}

// Operand whose rows of 16 bytes, eight elements along K, lie one after another; the next eight elements are
// `k_stride` bytes further. No swizzle: bits 16-29 are that stride / 16, bits 32-45 that of eight rows (128 bytes /
// 16).
__device__ __forceinline__ uint64_t column_descriptor(uint32_t address, uint32_t k_stride) {
    return uint64_t((address & 0x3ffff) >> 4) | (uint64_t(k_stride >> 4) << 16) | (uint64_t(8) << 32);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kInFlight>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
}

// d[64 x N] += a[64 x 16] * b[N x 16]^T, or d = that product where `adds` is false: bf16 operands, fp32 accumulators,
// the first N / 2 of `d`. `a` is a descriptor, or the fragments of an m16n8k16 product: each warp's 16 rows. A thread
// of warp w, lane l owns rows 16w + l/4 (d[4j], d[4j+1]) and that + 8 (d[4j+2], d[4j+3]) at columns 8j + 2(l%4) and the
// next.
template <int N>
struct Wgmma;

// Four or eight sums at a time: their places in the instruction and their operands.
// clang-format off
#define MOELET_PLACES8 "%0, %1, %2, %3"
#define MOELET_PLACES16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MOELET_PLACES24 MOELET_PLACES16 ", %8, %9, %10, %11"
#define MOELET_PLACES32 MOELET_PLACES16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MOELET_PLACES48 MOELET_PLACES32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MOELET_PLACES64 MOELET_PLACES48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MOELET_PLACES80 MOELET_PLACES64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MOELET_PLACES96 MOELET_PLACES80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MOELET_PLACES112 MOELET_PLACES96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define MOELET_PLACES128 MOELET_PLACES112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define MOELET_PLACES144 MOELET_PLACES128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define MOELET_PLACES160 MOELET_PLACES144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define MOELET_PLACES176 MOELET_PLACES160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define MOELET_PLACES192 MOELET_PLACES176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define MOELET_PLACES208 MOELET_PLACES192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define MOELET_PLACES224 MOELET_PLACES208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define MOELET_PLACES240 MOELET_PLACES224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define MOELET_PLACES256 MOELET_PLACES240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define MOELET_SUMS4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define MOELET_SUMS8 MOELET_SUMS4(0)
#define MOELET_SUMS16 MOELET_SUMS8, MOELET_SUMS4(4)
#define MOELET_SUMS24 MOELET_SUMS16, MOELET_SUMS4(8)
#define MOELET_SUMS32 MOELET_SUMS16, MOELET_SUMS4(8), MOELET_SUMS4(12)
#define MOELET_SUMS48 MOELET_SUMS32, MOELET_SUMS4(16), MOELET_SUMS4(20)
#define MOELET_SUMS64 MOELET_SUMS48, MOELET_SUMS4(24), MOELET_SUMS4(28)
#define MOELET_SUMS80 MOELET_SUMS64, MOELET_SUMS4(32), MOELET_SUMS4(36)
#define MOELET_SUMS96 MOELET_SUMS80, MOELET_SUMS4(40), MOELET_SUMS4(44)
#define MOELET_SUMS112 MOELET_SUMS96, MOELET_SUMS4(48), MOELET_SUMS4(52)
#define MOELET_SUMS128 MOELET_SUMS112, MOELET_SUMS4(56), MOELET_SUMS4(60)
#define MOELET_SUMS144 MOELET_SUMS128, MOELET_SUMS4(64), MOELET_SUMS4(68)
#define MOELET_SUMS160 MOELET_SUMS144, MOELET_SUMS4(72), MOELET_SUMS4(76)
#define MOELET_SUMS176 MOELET_SUMS160, MOELET_SUMS4(80), MOELET_SUMS4(84)
#define MOELET_SUMS192 MOELET_SUMS176, MOELET_SUMS4(88), MOELET_SUMS4(92)
#define MOELET_SUMS208 MOELET_SUMS192, MOELET_SUMS4(96), MOELET_SUMS4(100)
#define MOELET_SUMS224 MOELET_SUMS208, MOELET_SUMS4(104), MOELET_SUMS4(108)
#define MOELET_SUMS240 MOELET_SUMS224, MOELET_SUMS4(112), MOELET_SUMS4(116)
#define MOELET_SUMS256 MOELET_SUMS240, MOELET_SUMS4(120), MOELET_SUMS4(124)

// A product with the arguments of `...`: what comes before the instruction, its operands behind the sums, their inputs.
#define MOELET_MULTIPLY(N, BEFORE, OPERANDS, INPUTS, ...)                                                             \
        template <int kSums>                                                                                          \
        static __device__ __forceinline__ void multiply(float (&d)[kSums], __VA_ARGS__) {                             \
            asm volatile("{\n" BEFORE "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" MOELET_PLACES##N "}, "\
                         OPERANDS ";\n}"                                                                              \
                         : MOELET_SUMS##N                                                                             \
                         : INPUTS);                                                                                   \
        }
#define MOELET_ADDS(PLACE) ".reg .pred adds;\nsetp.ne.b32 adds, " PLACE ", 0;\n"
#define MOELET_BOTH_SHARED "l"(a), "l"(b)
#define MOELET_BOTH_SHARED_ADDS MOELET_BOTH_SHARED, "r"(int(adds))
#define MOELET_A_IN_REGISTERS "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(int(adds))
// A0 to A5 are the places behind N / 2 sums. That a product adds without being asked saves a predicate in inner loops.
#define MOELET_WGMMA(N, A0, A1, A2, A3, A4, A5)                                                                       \
    template <>                                                                                                       \
    struct Wgmma<N> {                                                                                                 \
        MOELET_MULTIPLY(N, "", A0 ", " A1 ", 1, 1, 1, 0, 0", MOELET_BOTH_SHARED, uint64_t a, uint64_t b)              \
        MOELET_MULTIPLY(N, MOELET_ADDS(A2), A0 ", " A1 ", adds, 1, 1, 0, 0", MOELET_BOTH_SHARED_ADDS,                 \
                        uint64_t a, uint64_t b, bool adds)                                                            \
        MOELET_MULTIPLY(N, MOELET_ADDS(A5), "{" A0 ", " A1 ", " A2 ", " A3 "}, " A4 ", adds, 1, 1, 0",                \
                        MOELET_A_IN_REGISTERS, const uint4& a, uint64_t b, bool adds)                                 \
    };

MOELET_WGMMA(8, "%4", "%5", "%6", "%7", "%8", "%9")
MOELET_WGMMA(16, "%8", "%9", "%10", "%11", "%12", "%13")
MOELET_WGMMA(24, "%12", "%13", "%14", "%15", "%16", "%17")
MOELET_WGMMA(32, "%16", "%17", "%18", "%19", "%20", "%21")
MOELET_WGMMA(48, "%24", "%25", "%26", "%27", "%28", "%29")
MOELET_WGMMA(64, "%32", "%33", "%34", "%35", "%36", "%37")
MOELET_WGMMA(80, "%40", "%41", "%42", "%43", "%44", "%45")
MOELET_WGMMA(96, "%48", "%49", "%50", "%51", "%52", "%53")
MOELET_WGMMA(112, "%56", "%57", "%58", "%59", "%60", "%61")
MOELET_WGMMA(128, "%64", "%65", "%66", "%67", "%68", "%69")
MOELET_WGMMA(144, "%72", "%73", "%74", "%75", "%76", "%77")
MOELET_WGMMA(160, "%80", "%81", "%82", "%83", "%84", "%85")
MOELET_WGMMA(176, "%88", "%89", "%90", "%91", "%92", "%93")
MOELET_WGMMA(192, "%96", "%97", "%98", "%99", "%100", "%101")
MOELET_WGMMA(208, "%104", "%105", "%106", "%107", "%108", "%109")
MOELET_WGMMA(224, "%112", "%113", "%114", "%115", "%116", "%117")
MOELET_WGMMA(240, "%120", "%121", "%122", "%123", "%124", "%125")
MOELET_WGMMA(256, "%128", "%129", "%130", "%131", "%132", "%133")
// clang-format on
