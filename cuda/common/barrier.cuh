// mbarriers, bulk and 16-byte asynchronous copies, L2 policies, named barriers, grid dependencies and shares of
// registers, as PTX.
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return uint32_t(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine; a barrier among those that use them must follow.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier, uint32_t times) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(times) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// The same without arriving.
__device__ __forceinline__ void barrier_expect_more(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "wait_loop:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra wait_done;\n"
        "bra wait_loop;\n"
        "wait_done:\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ uint64_t evict_first_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ uint64_t evict_normal_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// `bytes`, source and destination are multiples of 16; completion is counted on `barrier`.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                                          uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

// Asks L2 for the line that `global` lies in.
__device__ __forceinline__ void prefetch_line(const void* global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global) : "memory");
}

// The same of `bytes`, as bulk_load takes them.
__device__ __forceinline__ void prefetch_bulk(const void* global, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// Starts copying 16 bytes to shared memory, or zeros unless `real`.
__device__ __forceinline__ void async_copy16(uint32_t shared, const void* global, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(real ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void async_copy16(void* shared, const void* global, bool real) {
    async_copy16(shared_address(shared), global, real);
}

// Four of those, all real, whose addresses are all there before the first begins: a copy holds the registers of its
// addresses for long after it was issued, and the next would wait for them.
__device__ __forceinline__ void async_copies16(const uint32_t (&shared)[4], const void* const (&global)[4]) {
    asm volatile(
        "cp.async.cg.shared.global [%0], [%4], 16;\n"
        "cp.async.cg.shared.global [%1], [%5], 16;\n"
        "cp.async.cg.shared.global [%2], [%6], 16;\n"
        "cp.async.cg.shared.global [%3], [%7], 16;\n" ::"r"(shared[0]),
        "r"(shared[1]), "r"(shared[2]), "r"(shared[3]), "l"(global[0]), "l"(global[1]), "l"(global[2]), "l"(global[3])
        : "memory");
}

// Arrives at `barrier` once this thread's 16-byte copies are there.
__device__ __forceinline__ void async_copies_arrive(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Orders what this thread wrote to shared memory, or acquired of it, before what copy engine and tensor cores do there.
__device__ __forceinline__ void async_shared_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Closes a group of this thread's 16-byte copies; waits for all but the latest kInFlight groups.
__device__ __forceinline__ void async_copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kInFlight>
__device__ __forceinline__ void async_copies_arrived() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kInFlight) : "memory");
}

// Waits for this thread's 16-byte copies, which other threads see once a barrier has followed.
__device__ __forceinline__ void async_copies_land() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Waits for this thread's 16-byte copies and lets the tensor cores see them, once a barrier has followed.
__device__ __forceinline__ void async_copies_wait() {
    async_copies_land();
    async_shared_fence();
}

// Orders what this thread wrote to, or knows to be written in, global memory before bulk copies of it: a fence on
// either side.
__device__ __forceinline__ void async_writes_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Makes what the block wrote before its last barrier visible to whoever then sees a count go down.
__device__ __forceinline__ void release_writes() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// So many of the parts that `pending` counts are there.
__device__ __forceinline__ void count_down(int* pending, int parts = 1) {
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(pending), "r"(-parts) : "memory");
}
__device__ __forceinline__ bool is_pending(const int* pending) {
    int count;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(pending) : "memory");
    return count != 0;
}
// The same, soon outdated and ordering nothing; the thread goes on until it needs to know.
__device__ __forceinline__ int peek(const int* pending) {
    int count;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(pending));
    return count;
}
// Waits until all parts are there. What they are may then be read, by bulk copies too.
__device__ __forceinline__ void await_parts(const int* pending) {
    while (is_pending(pending)) {
    }
    async_writes_fence();
}

// Barrier `id` (1..15) among `threads` threads of the block.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The same for threads that do not wait for the others.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Programmatic dependent launch: wait until the grids this one depends on completed and flushed;
// let the grids that depend on this one start. Without the launch attribute both do nothing.
__device__ __forceinline__ void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void grid_dependency_launch() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Registers that each thread of this warpgroup, all of which take part, has from here on.
template <int kRegisters>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
