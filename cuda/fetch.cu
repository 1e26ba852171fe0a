// A forward's input from page-locked host memory: few bytes are there sooner than by the copy engine, for whose end the
// kernels behind it would have to wait across two queues of the device. The rest may lie elsewhere than what is first.
#include "common/types.cuh"

constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads)
    fetch(const uint4* first, const uint4* rest, uint4* target, int first_count, int count) {
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads)
        target[i] = i < first_count ? first[i] : rest[i - first_count];
}
