// Keeps one thread busy for a number of clock cycles: the delay that tests put into a branch of a graph.
#include "common/barrier.cuh"

extern "C" __global__ void spin(int64_t cycles) {
    grid_dependency_wait();
    const int64_t start = clock64();
    while (clock64() - start < cycles) {
    }
}
