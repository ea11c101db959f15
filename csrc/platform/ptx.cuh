// PTX instructions that CUDA C++ does not expose (PTX ISA 8.x): memory order, mbarriers, copies to shared memory,
// tensor cores. emulator/ptx.h has the same functions for a CPU.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "platform/scope.h"

namespace distmk {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool BULK_COPIES = false;
#else
constexpr bool BULK_COPIES = true;
#endif

// Barrier for NUM_THREADS threads of the block, which must be whole warps. It uses hardware barrier 1; __syncthreads
// uses 0.
template <uint32_t NUM_THREADS>
DISTMK_FN void barrier_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(NUM_THREADS) : "memory");
}

// Events that other GPUs signal are accessed at system scope, all other events at device scope. Block scope is for
// words that only this worker's threads use. It is the only scope that works in shared memory.
DISTMK_FN uint64_t load_acquire(const uint64_t* p, Scope scope = Scope::DEVICE) {
  uint64_t v;
  if (scope == Scope::SYSTEM)
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  else if (scope == Scope::DEVICE)
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  else if (FOR_RACECHECK)
    asm volatile("atom.acquire.cta.or.b64 %0, [%1], 0;" : "=l"(v) : "l"(p) : "memory");
  else
    asm volatile("ld.acquire.cta.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DISTMK_FN uint64_t load_relaxed(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
// Whether a counter has reached `want`. If it has, everything written before the releases that raised it is visible.
DISTMK_FN bool has_reached(const uint64_t* p, uint64_t want, Scope scope = Scope::DEVICE) {
  return load_acquire(p, scope) >= want;
}
DISTMK_FN void store_release(uint64_t* p, uint64_t v, Scope scope = Scope::DEVICE) {
  if (scope == Scope::SYSTEM)
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
  else if (scope == Scope::DEVICE)
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
  else if (FOR_RACECHECK)
    asm volatile("{ .reg .u64 was; atom.release.cta.exch.b64 was, [%0], %1; }" ::"l"(p), "l"(v) : "memory");
  else
    asm volatile("st.release.cta.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DISTMK_FN void store_relaxed(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DISTMK_FN void add_release(uint64_t* p, uint64_t v, Scope scope = Scope::DEVICE) {
  if (scope == Scope::SYSTEM)
    asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
  else
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// Loads and stores of Lamport buffers (device/comm/lamport.cuh). They are relaxed, because the value itself shows that
// it has arrived. The float versions have system scope, because a peer GPU may write the buffer.
DISTMK_FN float poll_load(const float* p) {
  float v;
  asm volatile("ld.relaxed.sys.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
DISTMK_FN void publish_store(float* p, float v) {
  asm volatile("st.relaxed.sys.global.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory");
}
// The other types have device scope: only this GPU writes them.
DISTMK_FN float2 poll_load(const float2* p) {
  float2 v;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
  return v;
}
DISTMK_FN uint4 poll_load(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
// Loads if `wanted`, else returns zeros. Predicated, because with a branch a loop would wait for each load before it
// issues the next.
DISTMK_FN uint4 load_if(bool wanted, const uint4* p) {
  uint4 v;
  v.x = v.y = v.z = v.w = 0;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(p), "r"(static_cast<uint32_t>(wanted))
               : "memory");
  return v;
}
DISTMK_FN void publish_store(uint4* p, const uint4& v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
DISTMK_FN void publish_store(uint2* p, const uint2& v) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
DISTMK_FN void publish_store(__nv_bfloat16* p, unsigned short bits) {
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(p), "h"(bits) : "memory");
}

DISTMK_FN uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
// Low 32 bits of the SM's clock.
DISTMK_FN uint32_t now_clock() {
  uint32_t t;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(t)::"memory");
  return t;
}
DISTMK_FN uint32_t sm_number() {
  uint32_t n;
  asm volatile("mov.u32 %0, %smid;" : "=r"(n));
  return n;
}
// Counts, and returns the new number. Who gets a number sees what those with smaller numbers did before.
DISTMK_FN uint32_t count_up_in_order(uint32_t* p) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(p) : "memory");
  return before + 1;
}
// Atomic maximum. Returns the old value.
DISTMK_FN uint64_t raise_to(uint64_t* p, uint64_t v) {
  return atomicMax(reinterpret_cast<unsigned long long*>(p), static_cast<unsigned long long>(v));
}
DISTMK_FN uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

DISTMK_FN void barrier_init(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}
// Tests the phase once, without suspending the thread.
DISTMK_FN bool barrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done;
}
DISTMK_FN bool barrier_test(uint64_t* barrier, uint32_t parity) {
  return barrier_test(shared_address(barrier), parity);
}
// Tests the phase once. From compute capability 9.0 on, the thread may be suspended for a while before this returns
// false.
DISTMK_FN bool barrier_try_wait(uint32_t barrier, uint32_t parity) {
  if constexpr (!BULK_COPIES) return barrier_test(barrier, parity);
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done;
}
DISTMK_FN bool barrier_try_wait(uint64_t* barrier, uint32_t parity) {
  return barrier_try_wait(shared_address(barrier), parity);
}
// The loop is in assembly, because the compiler would insert a yield to other warps into every round of a C++ loop.
DISTMK_FN void barrier_wait(uint32_t barrier, uint32_t parity) {
  if constexpr (BULK_COPIES)
    asm volatile(
        "{ .reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @p bra done; bra again; done: }" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
  else
    while (!barrier_try_wait(barrier, parity)) {
    }
}
DISTMK_FN void barrier_wait(uint64_t* barrier, uint32_t parity) { barrier_wait(shared_address(barrier), parity); }
// Waits while the number at `throttle` is neither 0 nor at least `slab` (see Pipeline::throttle).
DISTMK_FN void wait_while_throttled(uint32_t throttle, uint32_t slab) {
  if (FOR_RACECHECK)
    asm volatile(
        "{ .reg .pred p; .reg .u32 v; again: atom.shared.or.b32 v, [%0], 0; add.u32 v, v, -1; setp.lt.u32 p, v, %1; @p "
        "bra again; }" ::"r"(throttle),
        "r"(slab - 1)
        : "memory");
  else
    asm volatile(
        "{ .reg .pred p; .reg .u32 v; again: ld.volatile.shared.u32 v, [%0]; add.u32 v, v, -1; setp.lt.u32 p, v, %1; "
        "@p bra again; }" ::"r"(throttle),
        "r"(slab - 1)
        : "memory");
}
DISTMK_FN void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
DISTMK_FN void barrier_arrive(uint64_t* barrier, uint32_t times) {
  if constexpr (BULK_COPIES)
    asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(times) : "memory");
  else
    for (; times; --times) barrier_arrive(barrier);
}

// Ends a barrier's life, so that its memory can hold other data.
DISTMK_FN void barrier_invalidate(uint64_t* barrier) {
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Shared memory whose content has no meaning any more. The emulator overwrites it.
template <class T>
DISTMK_FN void forget(T&) {}
DISTMK_FN void barrier_init_done() {
  if constexpr (BULK_COPIES) asm volatile("fence.mbarrier_init.release.cluster;");
}

// L2 policy for weights, keys and values, which are read once an iteration. L2 evicts them first and so keeps
// activations, task descriptors and instructions. The constant is what createpolicy.fractional.L2::evict_first returns
// for a fraction of 1.
constexpr uint64_t EVICT_FIRST = 0x12F0000000000000;

// The two halves of a bulk copy: expect_bytes() tells the mbarrier `full` how many bytes will land, and copy_expected()
// copies some of them. One thread calls each. Both do nothing before compute capability 9.0.
DISTMK_FN void expect_bytes(uint32_t full, uint32_t num_bytes) {
  if constexpr (BULK_COPIES)
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full), "r"(num_bytes) : "memory");
}
DISTMK_FN void copy_expected(uint32_t dst, const void* src, uint32_t num_bytes, uint32_t full) {
  if constexpr (BULK_COPIES)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(dst),
        "l"(src), "r"(num_bytes), "r"(full), "l"(EVICT_FIRST)
        : "memory");
}
// copy_expected() for data that other SMs read too: without the evict-first policy.
DISTMK_FN void copy_kept(uint32_t dst, const void* src, uint32_t num_bytes, uint32_t full) {
  if constexpr (BULK_COPIES)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(num_bytes), "r"(full)
                 : "memory");
}
// Prefetches into L2.
DISTMK_FN void prefetch_bulk(const void* src, uint32_t num_bytes) {
  if constexpr (BULK_COPIES)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(num_bytes) : "memory");
}
DISTMK_FN void copy_bulk(uint32_t dst, const char* src, uint32_t num_bytes, uint32_t full) {
  expect_bytes(full, num_bytes);
  copy_expected(dst, src, num_bytes, full);
}
// Orders writes through the generic proxy that this thread has observed before its later bulk copies.
DISTMK_FN void fence_copies() {
  if constexpr (BULK_COPIES) asm volatile("fence.proxy.async;" ::: "memory");
}
// fence_copies() for accesses to shared memory alone. It does not wait for stores to global memory.
DISTMK_FN void fence_copies_to_shared() {
  if constexpr (BULK_COPIES) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// All lanes of a warp call it. Each lane arrives at `full` once its own part has landed.
DISTMK_FN void copy_by_lanes(uint32_t dst, const char* src, uint32_t num_bytes, uint32_t full, uint32_t lane,
                             uint32_t num_lanes) {
  for (uint32_t at = lane * 16; at < num_bytes; at += num_lanes * 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst + at), "l"(src + at) : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full) : "memory");
}

// Copies 16 bytes to shared memory past L1, or writes zeros if not `wanted`; `src` must be a valid address either way.
// commit_copies() closes a group of a thread's copies. await_copies() waits until all of the thread's groups but the
// last N have landed.
DISTMK_FN void copy_chunk(uint32_t dst, const void* src, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(wanted ? 16 : 0) : "memory");
}
DISTMK_FN void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <uint32_t N>
DISTMK_FN void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Speculatively loads keys or values. Another thread may be writing them if they turn out not to be needed.
DISTMK_FN uint4 load_perhaps(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.cg.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p), "l"(EVICT_FIRST));
  return v;
}

// Loads a number that another thread may be writing, so the result is only a guess.
template <class T>
DISTMK_FN T load_guess(const T* p) {
  return *static_cast<const volatile T*>(p);
}

// Hides from the compiler how `v` was computed, so that it neither keeps nor recomputes values derived from it.
DISTMK_FN uint32_t opaque(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}

// Tells the compiler that `p` points to shared memory, because generic loads take longer.
template <class T>
DISTMK_FN const T* in_shared(const T* p) {
  return static_cast<const T*>(__cvta_shared_to_generic(opaque(shared_address(p))));
}

DISTMK_FN uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

template <class T>
DISTMK_FN T load_shared_as(uint32_t address) {
  return *static_cast<const T*>(__cvta_shared_to_generic(address));
}

DISTMK_FN void ldmatrix_x4(uint32_t address, uint32_t (&a)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address));
}
// Transposes each of the four matrices.
DISTMK_FN void ldmatrix_x4_transposed(uint32_t address, uint32_t (&a)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address));
}

// The products of two pairs of bf16. Subnormal operands keep their values.
DISTMK_FN uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
  return d;
}
// The sums of two pairs of bf16.
DISTMK_FN uint32_t add_pairs(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(0x3f803f80u), "r"(b));
  return d;
}
// a * b + c for pairs of bf16, rounded once. Subnormal operands keep their values.
DISTMK_FN uint32_t fma_pairs(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// The float16 in the low half of `bits`.
DISTMK_FN float half_to_float(uint32_t bits) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(static_cast<uint16_t>(bits)));
  return f;
}

// c += a b with m16n8k16. Lane 4 g + t holds:
//   a (16 x 16): row g, columns 2 t, 2 t + 1 (a[0]) and 2 t + 8, 2 t + 9 (a[2]); row g + 8, same columns (a[1], a[3]).
//   b (16 x 8):  column g, rows 2 t, 2 t + 1 (b0) and 2 t + 8, 2 t + 9 (b1).
//   c (16 x 8):  columns 2 t, 2 t + 1 of row g (c[0], c[1]) and of row g + 8 (c[2], c[3]).
DISTMK_FN void multiply(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace distmk
