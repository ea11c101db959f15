// platform/ptx.cuh for the emulator. If a function's result depends on other threads, it yields so that they can run.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <time.h>

#include "abi.h"
#include "emulator/fibers.h"
#include "emulator/mbarrier.h"
#include "emulator/products.h"
#include "platform/scope.h"

namespace distmk {

constexpr bool BULK_COPIES = true;

inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const char*>(p) - emulator::current().block->shared);
}
template <class T>
T* at_shared(uint32_t address) {
  return reinterpret_cast<T*>(emulator::current().block->shared + address);
}

template <uint32_t NUM_THREADS>
void barrier_sync() {
  emulator::meet(emulator::current().block->some, NUM_THREADS, "barrier_sync");
}

inline uint64_t load_acquire(const uint64_t* p, Scope = Scope::DEVICE) {
  emulator::yield();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline uint64_t load_relaxed(const uint64_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline bool has_reached(const uint64_t* p, uint64_t want, Scope scope = Scope::DEVICE) {
  return load_acquire(p, scope) >= want;
}
inline void store_release(uint64_t* p, uint64_t v, Scope = Scope::DEVICE) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void store_relaxed(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline void add_release(uint64_t* p, uint64_t v, Scope = Scope::DEVICE) { __atomic_fetch_add(p, v, __ATOMIC_RELEASE); }

// Vector accesses of a GPU must be aligned to their size. The compiler checks the accesses that do not go through
// functions here (-fsanitize=alignment, distmk/backends/host/build.py).
template <class T>
void must_be_aligned(const T* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T) == 0) return;
  fprintf(stderr, "emulator: an access of %zu bytes at %p is not aligned\n", sizeof(T), static_cast<const void*>(p));
  abort();
}

inline float poll_load(const float* p) {
  const uint32_t bits = __atomic_load_n(reinterpret_cast<const uint32_t*>(p), __ATOMIC_RELAXED);
  if (!bits) emulator::yield();
  return __builtin_bit_cast(float, bits);
}
inline void publish_store(float* p, float v) {
  __atomic_store_n(reinterpret_cast<uint32_t*>(p), __builtin_bit_cast(uint32_t, v), __ATOMIC_RELAXED);
}
inline float2 poll_load(const float2* p) {
  must_be_aligned(p);
  const auto* floats = reinterpret_cast<const float*>(p);
  return {poll_load(floats), poll_load(floats + 1)};
}
inline uint4 poll_load(const uint4* p) {
  must_be_aligned(p);
  const auto* words = reinterpret_cast<const uint32_t*>(p);
  const auto at = [&](uint32_t i) { return __atomic_load_n(words + i, __ATOMIC_RELAXED); };
  const uint4 v = {at(0), at(1), at(2), at(3)};
  emulator::yield();
  return v;
}
inline uint4 load_if(bool wanted, const uint4* p) { return wanted ? poll_load(p) : uint4{0, 0, 0, 0}; }
inline void publish_store(uint4* p, const uint4& v) {
  must_be_aligned(p);
  auto* words = reinterpret_cast<uint32_t*>(p);
  const uint32_t values[] = {v.x, v.y, v.z, v.w};
  for (uint32_t i = 0; i < 4; ++i) __atomic_store_n(words + i, values[i], __ATOMIC_RELAXED);
}
inline void publish_store(uint2* p, const uint2& v) {
  must_be_aligned(p);
  auto* words = reinterpret_cast<uint32_t*>(p);
  __atomic_store_n(words, v.x, __ATOMIC_RELAXED);
  __atomic_store_n(words + 1, v.y, __ATOMIC_RELAXED);
}
inline void publish_store(__nv_bfloat16* p, unsigned short bits) {
  __atomic_store_n(reinterpret_cast<unsigned short*>(p), bits, __ATOMIC_RELAXED);
}

// Numbers are not in the order of the blocks, and some pairs of blocks share one: take_worker_index() must cope with
// both.
inline uint32_t sm_number() { return (7 * emulator::current().block->index + 3) / 2; }
inline uint32_t count_up_in_order(uint32_t* p) {
  emulator::yield();
  return __atomic_add_fetch(p, 1, __ATOMIC_ACQ_REL);
}
inline uint64_t raise_to(uint64_t* p, uint64_t v) {
  const uint64_t was = __atomic_load_n(p, __ATOMIC_RELAXED);
  if (was < v) __atomic_store_n(p, v, __ATOMIC_RELAXED);
  return was;
}

inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

// Counts so slowly that it does not wrap around at the speed of a CPU.
inline uint32_t now_clock() { return static_cast<uint32_t>(now_ns() / MARK_STEP_NS); }

inline void barrier_init(uint64_t* barrier, uint32_t count) { emulator::mbarrier_init(barrier, count); }
inline void barrier_invalidate(uint64_t*) {}
template <class T>
void forget(T& memory) {
  memset(&memory, 0xff, sizeof(memory));
}
inline void barrier_init_done() {}
inline bool barrier_try_wait(uint64_t* barrier, uint32_t parity) {
  if (emulator::mbarrier_test(barrier, parity)) return true;
  emulator::yield();
  return false;
}
inline bool barrier_test(uint64_t* barrier, uint32_t parity) { return barrier_try_wait(barrier, parity); }
inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  while (!emulator::mbarrier_test(barrier, parity)) emulator::await_change(barrier);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) { barrier_wait(at_shared<uint64_t>(barrier), parity); }
inline void barrier_arrive(uint64_t* barrier, uint32_t times = 1) { emulator::mbarrier_arrive(barrier, times, 0); }
inline void wait_while_throttled(uint32_t throttle, uint32_t slab) {
  while (__atomic_load_n(at_shared<uint32_t>(throttle), __ATOMIC_RELAXED) - 1 < slab - 1) emulator::yield();
}

inline void expect_bytes(uint32_t full, uint32_t num_bytes) {
  emulator::mbarrier_arrive(at_shared<uint64_t>(full), 1, static_cast<int>(num_bytes));
}
inline void copy_expected(uint32_t dst, const void* src, uint32_t num_bytes, uint32_t full) {
  memset(at_shared<char>(dst), 0xff, num_bytes);  // NaN, in case anything is read before it has landed
  emulator::mbarrier_fill(at_shared<uint64_t>(full));
  const emulator::Unwatched here;
  emulator::current().block->copies.push_back(
      {at_shared<char>(dst), static_cast<const char*>(src), num_bytes, at_shared<uint64_t>(full)});
}
inline void copy_kept(uint32_t dst, const void* src, uint32_t num_bytes, uint32_t full) {
  copy_expected(dst, src, num_bytes, full);
}
inline void prefetch_bulk(const void*, uint32_t) {}
inline void copy_bulk(uint32_t dst, const char* src, uint32_t num_bytes, uint32_t full) {
  expect_bytes(full, num_bytes);
  copy_expected(dst, src, num_bytes, full);
}
inline void fence_copies() {}
inline void fence_copies_to_shared() {}
inline void copy_by_lanes(uint32_t, const char*, uint32_t, uint32_t, uint32_t, uint32_t) {}

// A thread's copies land as late as possible: when it waits for their group. A GPU may read the source from this call
// on, so the read is recorded here.
inline void copy_chunk(uint32_t dst, const void* src, bool wanted) {
  must_be_aligned(static_cast<const uint4*>(src));
  must_be_aligned(at_shared<uint4>(dst));
  if (wanted) emulator::note_read(src, 16);
  memset(at_shared<char>(dst), 0xff, 16);
  emulator::Fiber& fiber = emulator::current();
  emulator::Chunk chunk = {
      at_shared<char>(dst), wanted ? static_cast<const char*>(src) : nullptr, fiber.timing() % 2 == 1, {}};
  if (wanted) memcpy(chunk.content, src, sizeof(chunk.content));
  fiber.chunks.start(chunk);
}
inline void commit_copies() { emulator::current().chunks.commit(); }
template <uint32_t N>
void await_copies() {
  emulator::current().chunks.await(N, [](const emulator::Chunk& chunk) {
    memcpy(chunk.dst, chunk.src && chunk.reads_late ? chunk.src : chunk.content, sizeof(chunk.content));
  });
}

inline uint4 load_perhaps(const uint4* p) {
  const emulator::Unwatched here;
  return *p;
}

template <class T>
T load_guess(const T* p) {
  const emulator::Unwatched here;
  return *static_cast<const volatile T*>(p);
}

inline uint32_t opaque(uint32_t v) { return v; }
template <class T>
const T* in_shared(const T* p) {
  return p;
}

inline uint4 load_shared(uint32_t address) {
  must_be_aligned(at_shared<uint4>(address));
  return *at_shared<uint4>(address);
}
template <class T>
T load_shared_as(uint32_t address) {
  must_be_aligned(at_shared<T>(address));
  return *at_shared<T>(address);
}

inline float bf16_of_pair(uint32_t pair, uint32_t half) {
  return __uint_as_float(half ? pair & 0xffff0000u : pair << 16);
}
inline uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  const auto product = [&](uint32_t half) -> uint32_t {
    return __float2bfloat16_rn(bf16_of_pair(a, half) * bf16_of_pair(b, half)).bits;
  };
  return product(0) | product(1) << 16;
}
inline uint32_t add_pairs(uint32_t a, uint32_t b) {
  const auto sum = [&](uint32_t half) -> uint32_t {
    return __float2bfloat16_rn(bf16_of_pair(a, half) + bf16_of_pair(b, half)).bits;
  };
  return sum(0) | sum(1) << 16;
}
inline uint32_t fma_pairs(uint32_t a, uint32_t b, uint32_t c) {
  const auto sum = [&](uint32_t half) -> uint32_t {
    const double product = static_cast<double>(bf16_of_pair(a, half)) * bf16_of_pair(b, half);
    return __float2bfloat16_rn(static_cast<float>(product + bf16_of_pair(c, half))).bits;
  };
  return sum(0) | sum(1) << 16;
}
inline float half_to_float(uint32_t bits) {
  const uint32_t exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float v = exponent ? __uint_as_float((exponent + 112) << 23 | mantissa << 13) : mantissa * 0x1p-24f;
  return bits & 0x8000 ? -v : v;
}

void ldmatrix_x4(uint32_t address, uint32_t (&a)[4]);
void ldmatrix_x4_transposed(uint32_t address, uint32_t (&a)[4]);
void multiply(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4]);

}  // namespace distmk
