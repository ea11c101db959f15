// mma and ldmatrix of a warp. The tables of the PTX ISA say which lane holds which element.
#include <cstring>

#include "emulator/ptx.h"

namespace distmk {
namespace {

float bf16_at(uint32_t word, uint32_t half) {
  const uint32_t bits = half ? word & 0xffff0000u : word << 16;
  float v;
  memcpy(&v, &bits, 4);
  return v;
}

struct Operands {
  uint32_t a[4], b[2];
  float c[4];
};
static_assert(sizeof(Operands) <= emulator::WORDS * 8, "");

void multiply_all() {
  Operands lanes[emulator::WARP];
  for (uint32_t l = 0; l < emulator::WARP; ++l) memcpy(&lanes[l], emulator::operands_of(l), sizeof(Operands));
  // a[row][k]: lane 4 (row % 8) + k % 8 / 2, register row / 8 + 2 (k / 8)
  // b[k][n]: lane 4 n + k % 8 / 2, register k / 8
  float a[16][16], b[16][8];
  for (uint32_t l = 0; l < emulator::WARP; ++l)
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t k = l % 4 * 2 + half;
      for (uint32_t i = 0; i < 4; ++i) a[l / 4 + i % 2 * 8][k + i / 2 * 8] = bf16_at(lanes[l].a[i], half);
      for (uint32_t i = 0; i < 2; ++i) b[k + i * 8][l / 4] = bf16_at(lanes[l].b[i], half);
    }
  float sums[16][8] = {};
  for (uint32_t row = 0; row < 16; ++row)
    for (uint32_t k = 0; k < 16; ++k)
      for (uint32_t n = 0; n < 8; ++n) sums[row][n] += a[row][k] * b[k][n];
  for (uint32_t l = 0; l < emulator::WARP; ++l) {
    for (uint32_t i = 0; i < 4; ++i) lanes[l].c[i] += sums[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2];
    memcpy(emulator::operands_of(l), &lanes[l], sizeof(Operands));
  }
}

void load_all() {
  uint64_t addresses[emulator::WARP];
  for (uint32_t l = 0; l < emulator::WARP; ++l) addresses[l] = *emulator::operands_of(l);
  for (uint32_t l = 0; l < emulator::WARP; ++l) {
    uint32_t out[4];
    for (uint32_t matrix = 0; matrix < 4; ++matrix)
      memcpy(&out[matrix], at_shared<char>(static_cast<uint32_t>(addresses[matrix * 8 + l / 4])) + l % 4 * 4, 4);
    memcpy(emulator::operands_of(l), out, sizeof out);
  }
}

void load_all_transposed() {
  uint64_t addresses[emulator::WARP];
  for (uint32_t l = 0; l < emulator::WARP; ++l) addresses[l] = *emulator::operands_of(l);
  for (uint32_t l = 0; l < emulator::WARP; ++l) {
    uint16_t out[4][2];
    for (uint32_t matrix = 0; matrix < 4; ++matrix)
      for (uint32_t half = 0; half < 2; ++half) {
        const uint64_t row = addresses[matrix * 8 + l % 4 * 2 + half];
        memcpy(&out[matrix][half], at_shared<char>(static_cast<uint32_t>(row)) + l / 4 * 2, 2);
      }
    memcpy(emulator::operands_of(l), out, sizeof out);
  }
}

void load_matrices(uint32_t address, uint32_t (&a)[4], const char* what, void (*load)()) {
  emulator::note_read(at_shared<char>(address), 16);
  const emulator::Unwatched here;
  *emulator::operands() = address;
  emulator::meet_warp(what, load);
  memcpy(a, emulator::operands(), sizeof a);
}

}  // namespace

void multiply(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4]) {
  const emulator::Unwatched here;
  const Operands mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
  memcpy(emulator::operands(), &mine, sizeof mine);
  emulator::meet_warp("mma", multiply_all);
  Operands result;
  memcpy(&result, emulator::operands(), sizeof result);
  memcpy(c, result.c, sizeof c);
}

void ldmatrix_x4(uint32_t address, uint32_t (&a)[4]) { load_matrices(address, a, "ldmatrix", load_all); }
void ldmatrix_x4_transposed(uint32_t address, uint32_t (&a)[4]) {
  load_matrices(address, a, "ldmatrix.trans", load_all_transposed);
}

}  // namespace distmk
