// Y = X W^T on the host for a few rows X in float32. W is bf16 and read once. For linear layers and attention scores.
#pragma once
#include "host/bodies/tiled_matmul.h"
#include "host/simd.h"

namespace distmk {

// The type whose precision X has.
enum class Elements { BF16, FLOAT32 };

// X packed for the micro-kernels. Where the processor has AMX, X is in tiles (tiled_matmul.h). Elsewhere it is in
// groups of up to GROUP rows. A group goes block by block (simd::BLOCK columns), and a block row by row. A row of a
// block is one or two parts of simd::LANES words. If the processor multiplies bf16, the first part is X in bf16. The
// second part, which only float32 has, is what the rounding lost, so that 16 bits of X count. Otherwise the parts are
// float32: the even elements and the odd ones (simd.h). The last block is padded with zeros.
class PackedRows {
 public:
  static constexpr uint32_t GROUP = 6;

  // Holds `num_rows` rows of k elements in memory of the calling thread, which the next PackedRows<Tag> takes over.
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
  // Groups are of nearly equal size, because a group of one row would be bound by latency.
  uint32_t group_begin(uint32_t group) const { return num_rows_ * group / num_groups_; }
  const float* group(uint32_t group) const { return memory_ + group_begin(group) * row_floats(); }

  bool tiled() const { return tiled_; }
  const TiledRows& tiles() const { return tiles_; }

  // Stores x as row `row`.
  void set(uint32_t row, const float* x);
  // To be called after the last set().
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

// y[row][column + j] = x[row] . w[j] for j < n, where w is [n, k], row-major without padding. The order of each sum
// depends on k alone, so a row's results do not depend on the other rows.
void matmul(const uint16_t* w, uint32_t n, const PackedRows& x, float* const* y, uint32_t column);

}  // namespace distmk
