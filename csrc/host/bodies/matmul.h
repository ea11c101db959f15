// Y = X W^T on the host: bf16 W, which is read once, and a few rows X in float32. Linear layers and attention scores.
#pragma once
#include "host/simd.h"

namespace distmk {

// X packed as the micro-kernels read it: groups of up to GROUP rows, in a group block by block (simd::BLOCK columns),
// in a block row by row, even elements first (simd.h). The last block is padded with zeros.
class PackedRows {
 public:
  static constexpr uint32_t GROUP = 6;

  // `memory`: num_floats(num_rows, k) floats, which must outlive this.
  PackedRows(float* memory, uint32_t num_rows, uint32_t k)
      : memory_(memory), num_rows_(num_rows), k_(k), num_groups_((num_rows + GROUP - 1) / GROUP) {}

  static uint64_t num_floats(uint32_t num_rows, uint32_t k) { return uint64_t{num_rows} * padded(k); }

  uint32_t num_rows() const { return num_rows_; }
  uint32_t k() const { return k_; }
  uint32_t num_groups() const { return num_groups_; }
  // Groups are of nearly equal size: a group of one row would be bound by latency.
  uint32_t group_begin(uint32_t group) const { return num_rows_ * group / num_groups_; }
  const float* group(uint32_t group) const { return memory_ + uint64_t{group_begin(group)} * padded(k_); }

  // Stores x * scale as row `row`.
  void set(uint32_t row, const float* x, float scale);

 private:
  float* memory_;
  uint32_t num_rows_, k_, num_groups_;

  static uint64_t padded(uint32_t k) { return (uint64_t{k} + simd::BLOCK - 1) / simd::BLOCK * simd::BLOCK; }
};

// y[row][column + j] = x[row] . w[j] for j < n, where w is [n, k], row-major without padding. Each result is summed in
// an order that depends on k alone, so that a row's results do not depend on the other rows.
void matmul(const uint16_t* w, uint32_t n, const PackedRows& x, float* const* y, uint32_t column);

}  // namespace distmk
