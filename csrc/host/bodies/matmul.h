// Y = X W^T on the host: bf16 W, which is read once, and a few rows X in float32. Linear layers and attention scores.
#pragma once
#include "host/bodies/tiled_matmul.h"
#include "host/simd.h"

namespace distmk {

// What the elements of X are, at full precision.
enum class Elements { BF16, FLOAT32 };

// X packed as the micro-kernels read it: as tiles (tiled_matmul.h) where the processor has them. Otherwise in groups of
// up to GROUP rows, in a group block by block (simd::BLOCK columns), in a block row by row, in one or two parts of
// simd::LANES words. With products of bf16, the first part is X in bf16. The second part, which only
// float32 has, is what the rounding lost, so that 16 bits of X count. Without them, the parts are float32: the even
// elements and the odd ones (simd.h). The last block is padded with zeros.
class PackedRows {
 public:
  static constexpr uint32_t GROUP = 6;

  // Of `num_rows` rows of k elements, in memory of the calling thread that the next PackedRows<Tag> takes over.
  template <class Tag>
  static PackedRows in_scratch(uint32_t num_rows, uint32_t k, Elements elements) {
    PackedRows rows(num_rows, k, elements);
    rows.memory_ = simd::scratch<Tag>(rows.num_floats());
    rows.tiles_.memory = reinterpret_cast<uint16_t*>(rows.memory_);
    return rows;
  }

  uint32_t num_rows() const { return num_rows_; }
  uint32_t k() const { return k_; }
  uint32_t num_parts() const { return num_parts_; }
  uint32_t num_groups() const { return num_groups_; }
  // Groups are of nearly equal size: a group of one row would be bound by latency.
  uint32_t group_begin(uint32_t group) const { return num_rows_ * group / num_groups_; }
  const float* group(uint32_t group) const { return memory_ + group_begin(group) * row_floats(); }

  bool tiled() const { return tiled_; }
  const TiledRows& tiles() const { return tiles_; }

  // Stores x as row `row`.
  void set(uint32_t row, const float* x);
  // After the last set().
  void finish() const {
    if (tiled_) tiles_.finish();
  }

 private:
  bool tiled_ = tiles::available();
  TiledRows tiles_;
  float* memory_ = nullptr;
  uint32_t num_rows_, k_, num_groups_, num_parts_;

  PackedRows(uint32_t num_rows, uint32_t k, Elements elements)
      : tiles_{nullptr, num_rows, k, elements == Elements::BF16 ? 1u : 3u},
        num_rows_(num_rows),
        k_(k),
        num_groups_((num_rows + GROUP - 1) / GROUP),
        num_parts_(DISTMK_BF16_PRODUCTS && elements == Elements::BF16 ? 1 : 2) {}

  uint64_t num_floats() const {
    return tiled_ ? tiles_.num_groups() * tiles_.group_elements() / 2 : num_rows_ * row_floats();
  }
  uint64_t row_floats() const { return (uint64_t{k_} + simd::BLOCK - 1) / simd::BLOCK * num_parts_ * simd::LANES; }
};

// y[row][column + j] = x[row] . w[j] for j < n, where w is [n, k], row-major without padding. Each result is summed in
// an order that depends on k alone, so that a row's results do not depend on the other rows.
void matmul(const uint16_t* w, uint32_t n, const PackedRows& x, float* const* y, uint32_t column);

}  // namespace distmk
