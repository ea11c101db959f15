// Matrix products of a warpgroup on tensor cores: D[m, n] += A[m, k] B[n, k] for 64 rows m, N tokens n and 16 columns
// k, with A and B in bf16 and D in float32. Compute capability 9.0 uses the asynchronous wgmma instruction. Elsewhere,
// and in the emulator, each warp multiplies its 16 rows with mma.
//
// A is in registers, as for multiply() of ptx.cuh. Warp w of the warpgroup has rows 16 w to 16 w + 15. Its acc[4 n] to
// acc[4 n + 3] are the registers c for tokens 8 n to 8 n + 7.
//
// B is a slot in shared memory of N rows of 64 columns. A slot begins at a multiple of 1024 bytes, and the 16-byte
// chunk c of row r is stored as chunk c ^ r % 8. `step` is one of the slot's four steps of 16 columns. multiply_rows()
// takes B[k, n] in such slots; multiply_shared() also takes A[m, k] from one.
#pragma once
#include "platform/device.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define DISTMK_WGMMA
#endif

namespace distmk {
namespace tensor {

// Pins the registers of asynchronous products, before begin() and after await(). The compiler believes that a product
// is done where it is started, so it could move code that uses its registers in between.
template <uint32_t COUNT>
DISTMK_FN void settle(float (&registers)[COUNT]) {
#ifdef DISTMK_WGMMA
#pragma unroll
  for (float& each : registers) asm volatile("" : "+f"(each)::"memory");
#endif
}
template <uint32_t ROWS>
DISTMK_FN void settle(uint32_t (&registers)[ROWS][4]) {
#ifdef DISTMK_WGMMA
#pragma unroll
  for (auto& row : registers)
#pragma unroll
    for (uint32_t& each : row) asm volatile("" : "+r"(each)::"memory");
#endif
}

// The mma versions: each warp multiplies its own 16 rows.
template <uint32_t N>
DISTMK_FN void multiply_by_mma(float (&acc)[N / 2], const uint32_t (&a)[4], uint32_t slot, uint32_t step) {
  // Lane l addresses a row of 8x8 matrix l / 8. The four matrices are two chunks of tokens 0 to 7 and two of tokens 8
  // to 15, in a pair of token groups.
  const uint32_t lane = opaque(threadIdx.x) % 32, token = lane / 16 * 8 + lane % 8;
  const uint32_t address = slot + token * 128 + ((2 * step + lane / 8 % 2) ^ (token % 8)) * 16;
#pragma unroll
  for (uint32_t n = 0; n < N / 8; n += 2) {
    uint32_t b[4];
    ldmatrix_x4(address + n * 8 * 128, b);
    distmk::multiply(a, b[0], b[1], *reinterpret_cast<float (*)[4]>(&acc[4 * n]));
    distmk::multiply(a, b[2], b[3], *reinterpret_cast<float (*)[4]>(&acc[4 * n + 4]));
  }
}
template <uint32_t N>
DISTMK_FN void multiply_rows_by_mma(float (&acc)[N / 2], const uint32_t (&a)[4], uint32_t slot, uint32_t step) {
  // The four 8x8 matrices cover a pair of column groups: rows 0 to 7 and 8 to 15 of the first group, then of the
  // second.
  const uint32_t lane = opaque(threadIdx.x) % 32, row = slot + (step * 16 + lane % 16) * 128;
#pragma unroll
  for (uint32_t n = 0; n < N / 8; n += 2) {
    uint32_t b[4];
    ldmatrix_x4_transposed(row + n / 8 * 64 * 128 + ((n % 8 + lane / 16) ^ (lane % 8)) * 16, b);
    distmk::multiply(a, b[0], b[1], *reinterpret_cast<float (*)[4]>(&acc[4 * n]));
    distmk::multiply(a, b[2], b[3], *reinterpret_cast<float (*)[4]>(&acc[4 * n + 4]));
  }
}
template <uint32_t N>
DISTMK_FN void multiply_shared_by_mma(float (&acc)[N / 2], uint32_t a_slot, uint32_t slot, uint32_t step) {
  // The four 8x8 matrices cover the warp's rows: 0 to 7 and 8 to 15 of the first eight columns, then of the second
  // eight.
  const uint32_t lane = opaque(threadIdx.x) % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  uint32_t a[4];
  ldmatrix_x4(a_slot + row * 128 + ((2 * step + lane / 16) ^ (row % 8)) * 16, a);
  multiply_by_mma<N>(acc, a, slot, step);
}

#ifdef DISTMK_WGMMA
// Makes a register of A from a loaded one, once the previous products have ended. If the load's own register were the
// operand, and the load ran beside products, the compiler would serialize all products.
DISTMK_FN uint32_t operand(uint32_t loaded) {
  uint32_t v;
  asm volatile("max.u32 %0, %1, 0;" : "=r"(v) : "r"(loaded));
  return v;
}
// A fence, needed before multiply() if other instructions have written its registers.
template <uint32_t N>
DISTMK_FN void begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Makes a group of the products since the last commit.
template <uint32_t N>
DISTMK_FN void commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until all groups but the last PENDING have ended.
template <uint32_t N, uint32_t PENDING = 0>
DISTMK_FN void await() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Descriptor of a swizzled matrix in shared memory that begins `offset` bytes into a slot. Its rows have 128 bytes, and
// groups of eight rows are 1024 bytes apart. `slot_units` matters for a transposed matrix: the distance between slots,
// in units of 16 bytes. The offset is added last, because the rest is the same for all steps of a slot.
DISTMK_FN uint64_t descriptor(uint32_t slot, uint32_t offset, uint32_t slot_units = 1) {
  constexpr uint32_t HIGH = uint32_t{1} << 30 | 1024 / 16;
  return uint64_t{HIGH} << 32 | ((slot_units << 16 | (slot & 0x3ffff) >> 4) + offset / 16);
}

#define DISTMK_16(d, i)                                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7]), "+f"(d[i + 8]), "+f"(d[i + 9]), "+f"(d[i + 10]), "+f"(d[i + 11]), "+f"(d[i + 12]),      \
      "+f"(d[i + 13]), "+f"(d[i + 14]), "+f"(d[i + 15])
#define DISTMK_32(d, i) DISTMK_16(d, i), DISTMK_16(d, i + 16)
#define DISTMK_64(d, i) DISTMK_32(d, i), DISTMK_32(d, i + 32)
#define DISTMK_128(d, i) DISTMK_64(d, i), DISTMK_64(d, i + 64)
#define DISTMK_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define DISTMK_NAMES_32 \
  DISTMK_NAMES_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define DISTMK_NAMES_64                                                              \
  DISTMK_NAMES_32                                                                    \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define DISTMK_NAMES_128                                                                         \
  DISTMK_NAMES_64                                                                                \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"             \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define DISTMK_MULTIPLY(N, NAMES, SUMS, A0, A1, A2, A3, B)                                                          \
  DISTMK_FN void multiply_as(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {                               \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES "}, {%" #A0 ", %" #A1 ", %" #A2 \
                 ", %" #A3 "}, %" #B ", 1, 1, 1, 0;"                                                                \
                 : SUMS                                                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                             \
  }
DISTMK_MULTIPLY(32, DISTMK_NAMES_16, DISTMK_16(d, 0), 16, 17, 18, 19, 20)
DISTMK_MULTIPLY(64, DISTMK_NAMES_32, DISTMK_32(d, 0), 32, 33, 34, 35, 36)
DISTMK_MULTIPLY(128, DISTMK_NAMES_64, DISTMK_64(d, 0), 64, 65, 66, 67, 68)
DISTMK_MULTIPLY(256, DISTMK_NAMES_128, DISTMK_128(d, 0), 128, 129, 130, 131, 132)
#undef DISTMK_MULTIPLY

template <uint32_t N>
DISTMK_FN void multiply(float (&acc)[N / 2], const uint32_t (&a)[4], uint32_t slot, uint32_t step) {
  multiply_as(acc, a, descriptor(slot, step * 32));
}

// A comes from a slot of 64 rows instead of registers.
#define DISTMK_MULTIPLY_SHARED(N, NAMES, SUMS, A, B)                                                   \
  DISTMK_FN void multiply_shared_as(float (&d)[N / 2], uint64_t a, uint64_t b) {                       \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES "}, %" #A ", %" #B \
                 ", 1, 1, 1, 0, 0;"                                                                    \
                 : SUMS                                                                                \
                 : "l"(a), "l"(b));                                                                    \
  }
DISTMK_MULTIPLY_SHARED(32, DISTMK_NAMES_16, DISTMK_16(d, 0), 16, 17)
DISTMK_MULTIPLY_SHARED(64, DISTMK_NAMES_32, DISTMK_32(d, 0), 32, 33)
#undef DISTMK_MULTIPLY_SHARED

template <uint32_t N>
DISTMK_FN void multiply_shared(float (&acc)[N / 2], uint32_t a_slot, uint32_t slot, uint32_t step) {
  multiply_shared_as(acc, descriptor(a_slot, step * 32), descriptor(slot, step * 32));
}

#define DISTMK_MULTIPLY_ROWS(N, NAMES, SUMS, A0, A1, A2, A3, B)                                                     \
  DISTMK_FN void multiply_rows_as(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {                          \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES "}, {%" #A0 ", %" #A1 ", %" #A2 \
                 ", %" #A3 "}, %" #B ", 1, 1, 1, 1;"                                                                \
                 : SUMS                                                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                             \
  }
DISTMK_MULTIPLY_ROWS(64, DISTMK_NAMES_32, DISTMK_32(d, 0), 32, 33, 34, 35, 36)
DISTMK_MULTIPLY_ROWS(128, DISTMK_NAMES_64, DISTMK_64(d, 0), 64, 65, 66, 67, 68)
#undef DISTMK_MULTIPLY_ROWS

// B is transposed: a slot has 64 rows k of 64 columns n, and the next 64 columns are in the next slot. `step` selects
// 16 rows k.
template <uint32_t N>
DISTMK_FN void multiply_rows(float (&acc)[N / 2], const uint32_t (&a)[4], uint32_t slot, uint32_t step) {
  constexpr uint32_t SLOT_BYTES = 64 * 128, STEP_BYTES = 16 * 128;
  multiply_rows_as(acc, a, descriptor(slot, step * STEP_BYTES, SLOT_BYTES / 16));
}
#else
DISTMK_FN uint32_t operand(uint32_t loaded) { return loaded; }
template <uint32_t N>
DISTMK_FN void begin() {}
#ifdef DISTMK_EMULATED
template <class Multiply>
void start(const Multiply& multiply) {
  emulator::start_product(multiply);
}
template <uint32_t N>
void commit() {
  emulator::commit_products();
}
template <uint32_t N, uint32_t PENDING = 0>
void await() {
  emulator::await_products(PENDING);
}
#else
template <class Multiply>
DISTMK_FN void start(const Multiply& multiply) {
  multiply();
}
template <uint32_t N>
DISTMK_FN void commit() {}
template <uint32_t N, uint32_t PENDING = 0>
DISTMK_FN void await() {}
#endif

template <uint32_t N>
DISTMK_FN void multiply(float (&acc)[N / 2], const uint32_t (&a)[4], uint32_t slot, uint32_t step) {
  start([&acc, a, slot, step] { multiply_by_mma<N>(acc, a, slot, step); });
}
template <uint32_t N>
DISTMK_FN void multiply_shared(float (&acc)[N / 2], uint32_t a_slot, uint32_t slot, uint32_t step) {
  start([&acc, a_slot, slot, step] { multiply_shared_by_mma<N>(acc, a_slot, slot, step); });
}
template <uint32_t N>
DISTMK_FN void multiply_rows(float (&acc)[N / 2], const uint32_t (&a)[4], uint32_t slot, uint32_t step) {
  start([&acc, a, slot, step] { multiply_rows_by_mma<N>(acc, a, slot, step); });
}
#endif

}  // namespace tensor
}  // namespace distmk
