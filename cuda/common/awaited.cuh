// Values that tell by themselves whether they are there: bf16 that were filled with `kMissing`, which no conversion
// yields, for it makes every NaN 0x7fff. Who needs them asks again until they are others: no count, and no fence, which
// would take microseconds while memory is busy.
#pragma once

#include "common/types.cuh"

constexpr uint32_t kMissing = 0xffffffffu;  // twice

// Whether either half is missing: a halfword of the complement that is zero borrows from its top bit.
__device__ __forceinline__ bool is_missing(uint32_t pair) {
    const uint32_t rest = ~pair;
    return ((rest - 0x00010001u) & pair & 0x80008000u) != 0;
}
__device__ __forceinline__ bool is_missing(const uint4& value) {
    return is_missing(value.x) || is_missing(value.y) || is_missing(value.z) || is_missing(value.w);
}

__device__ __forceinline__ uint32_t load_awaited(const uint32_t* pointer) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}
__device__ __forceinline__ uint4 load_awaited(const uint4* pointer) {
    uint4 value;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(pointer)
                 : "memory");
    return value;
}
// Fills `values` with what `load` gives of each index, again and again until nothing of them is missing.
template <int kCount, typename Value, typename Load>
__device__ __forceinline__ void load_until_there(Value (&values)[kCount], Load load) {
    bool missing;
    do {
        missing = false;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] = load(i);
            missing |= is_missing(values[i]);
        }
    } while (missing);
}
__device__ __forceinline__ void store_awaited(bf16* pointer, bf16 value) {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(pointer), "h"(value.bits) : "memory");
}
