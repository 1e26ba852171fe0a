// Clusters of blocks: barriers of all, what one reads and writes in another's shared memory, and copies to both of two.
#pragma once

#include "common/barrier.cuh"

constexpr int kCluster = 2;

__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of all blocks arrive, and wait for each other; what they did to shared memory before is seen by all.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// The address of block `rank`'s variable that lies where `pointer` does in this one.
__device__ __forceinline__ uint32_t cluster_address(const void* pointer, int rank) {
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
    return address;
}

// What lies there.
__device__ __forceinline__ uint64_t load_from(const uint64_t* pointer, int rank) {
    uint64_t value;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(cluster_address(pointer, rank)) : "memory");
    return value;
}

__device__ __forceinline__ void barrier_arrive_at(uint64_t* barrier, int rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(barrier, rank)) : "memory");
}

// Copies to the same place of both blocks, and counts on the barrier of each.
__device__ __forceinline__ void bulk_load_to_both(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                                                  uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4, %5;" ::"r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier)), "h"(uint16_t(0b11)), "l"(policy)
        : "memory");
}

// Stores an integer where `target` lies in block `rank`; its four bytes are counted on that block's `barrier`.
__device__ __forceinline__ void send_int(int* target, int value, uint64_t* barrier, int rank) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                     cluster_address(target, rank)),
                 "r"(value), "r"(cluster_address(barrier, rank))
                 : "memory");
}
