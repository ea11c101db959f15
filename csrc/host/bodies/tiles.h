// Intel AMX: tile registers of 16 rows of 64 bytes, and their product of bf16 with float32 sums (Intel 64 and IA-32
// Architectures Software Developer's Manual, volume 1, chapter 18). Written in assembly, because the compiler's
// intrinsics take the number of a register as a literal only.
#pragma once
#include "host/simd.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#define DISTMK_TILES 1
#else
#define DISTMK_TILES 0
#endif

namespace distmk::tiles {

constexpr uint32_t ROWS = 16;
constexpr uint32_t COLS = 32;  // bf16 elements in a row
constexpr uint32_t ELEMENTS = ROWS * COLS;

// Whether this processor has tiles, the kernel lets the process use them, and allow() did not forbid it.
bool available();

#if DISTMK_TILES

// Configures all eight registers of the calling thread as whole tiles. Every product does so, because other code in the
// thread (such as torch's) may configure its own. Registers that are released, in their initial state, make thread
// switches cheaper.
class Registers {
 public:
  Registers() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t num_rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Registers() { asm volatile("tilerelease"); }
  Registers(const Registers&) = delete;
  Registers& operator=(const Registers&) = delete;
};

template <uint32_t TILE>
inline __attribute__((always_inline)) void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}
template <uint32_t TILE>
inline __attribute__((always_inline)) void load(const void* from, uint64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride_bytes), "i"(TILE) : "memory");
}
// Stores a tile as 16 x 16 floats, row by row.
template <uint32_t TILE>
inline __attribute__((always_inline)) void store(float* to) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(uint64_t{64}), "i"(TILE) : "memory");
}
// SUM[i][j] += sum over p, e of A[i][2 p + e] B[p][2 j + e]. B holds pairs of elements.
template <uint32_t SUM, uint32_t A, uint32_t B>
inline __attribute__((always_inline)) void multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

#endif

}  // namespace distmk::tiles
