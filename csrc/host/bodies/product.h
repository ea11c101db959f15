// Matrix product of the host's linear layers, for 1 to 512 rows: value[row][column] = sum over k of x[row] .
// weight[column], with bf16 inputs and float32 sums in an order that depends on k alone. A few rows read the weights
// once, straight from memory (matmul.h); many rows pay for packing them (panels.h). Callers pass a sink that takes the
// sums.
#pragma once
#include "host/bodies/matmul.h"
#include "host/bodies/panels.h"
#include "host/bodies/shares.h"
#include "host/formats/stored_rows.h"
#include "runtime/pointwise.h"
#include "runtime/slabs.h"

namespace distmk {

// The weights of a task, [num_rows, k]. A column of the output has one row of them or, if gated, two (slabs.h).
struct Weights {
  StoredRows stored;
  const float* bias;     // null: none
  const int32_t* order;  // column j multiplies element order[j] of x; null: element j
  Epilogue epilogue;
  uint32_t k, num_rows, num_slabs = 1, num_reduced = 0, reduced_rows = 0;

  bool gated() const { return is_gated(epilogue); }
  uint32_t num_cols() const { return gated() ? num_rows / 2 : num_rows; }

  // Memory of the calling thread for decoding `count` rows of `num_cols` columns; null if nothing is to decode.
  template <class Tag>
  uint16_t* room_for(uint64_t count, uint32_t num_cols) const {
    return stored.is_bf16() ? nullptr : reinterpret_cast<uint16_t*>(simd::scratch<Tag>((count * num_cols + 1) / 2));
  }
  // The columns `cols` of a row as bf16: in the weights themselves, or decoded to `room` and rounded.
  DISTMK_INLINE const uint16_t* row(uint32_t index, Range cols, uint16_t* room) const {
    if (stored.is_bf16()) return stored.bf16_row(index) + cols.begin;
    constexpr uint32_t AT_ONCE = 512;
    float values[AT_ONCE];
    if (order) {
      std::fill(room, room + (cols.end - cols.begin), uint16_t{});
      for (uint32_t begin = 0; begin < k; begin += AT_ONCE) {
        const uint32_t end = std::min(begin + AT_ONCE, k);
        stored.read(index, begin, end, values);
        for (uint32_t i = begin; i < end; ++i)
          if (const auto col = static_cast<uint32_t>(order[i]); cols.begin <= col && col < cols.end)
            room[col - cols.begin] = simd::to_bf16(values[i - begin]);
      }
      return room;
    }
    for (uint32_t begin = cols.begin; begin < cols.end; begin += AT_ONCE) {
      const uint32_t end = std::min(begin + AT_ONCE, cols.end);
      stored.read(index, begin, end, values);
      simd::to_bf16(room + (begin - cols.begin), values, end - begin);
    }
    return room;
  }
};

// Sums of one row: `count` columns from `first` on; in gated products, gate's in `values` and up's in `ups`. Each row's
// memory extends to a multiple of simd::LANES.
struct Sums {
  uint32_t row, first, count;
  float *values, *ups;

  // values = sums * scale + bias; in gated products, then activation(gate) * up.
  DISTMK_INLINE void finish(const Weights& weights, float scale, bool has_bias) const {
    using namespace simd;
    const bool has_ups = weights.gated();
    if (scale != 1.0f)
      for (uint32_t i = 0; i < count; ++i) {
        values[i] *= scale;
        if (has_ups) ups[i] *= scale;
      }
    for (uint32_t i = 0; has_bias && weights.bias && i < count; ++i) {
      if (!has_ups) {
        values[i] += weights.bias[first + i];
        continue;
      }
      const GateUp rows(weights, first + i);
      values[i] += weights.bias[rows.gate];
      ups[i] += weights.bias[rows.up];
    }
    for (uint32_t i = 0; has_ups && i < count; i += LANES)
      store(values + i, distmk::gated<VectorMath>(weights.epilogue, load(values + i), load(ups + i)));
  }
  // Rounds a vector at a time: with many rows, a row has only the few columns of a panel here.
  DISTMK_INLINE void round_to(uint16_t* out) const {
    uint32_t i = 0;
    for (; i + simd::LANES <= count; i += simd::LANES) simd::store(out + i, simd::to_bf16(simd::load(values + i)));
    for (; i < count; ++i) out[i] = simd::to_bf16(values[i]);
  }
};

// The rows of x that a product of few rows multiplies: packed for bf16 weights, else in float32.
class FewRows {
 public:
  template <class Tag>
  static FewRows in_scratch(const Weights& weights, uint32_t num_rows) {
    const bool decodes = !weights.stored.is_bf16();
    return {decodes, PackedRows::in_scratch<Tag>(decodes ? 0 : num_rows, weights.k, Elements::BF16),
            FloatRows::in_scratch<Tag>(decodes ? num_rows : 0, weights.stored.lead, weights.k, weights.stored.pitch,
                                       weights.order)};
  }
  uint32_t num_rows() const { return decodes_ ? floats_.num_rows : packed_.num_rows(); }
  void set(uint32_t row, const float* x) { decodes_ ? floats_.set(row, x) : packed_.set(row, x); }
  // To be called after the last set().
  void finish() const {
    if (!decodes_) packed_.finish();
  }
  // y[row][column + j] = x[row] . weight row first + j, for j < n.
  void multiply(const Weights& weights, uint32_t first, uint32_t n, float* const* y, uint32_t column) const {
    if (decodes_)
      weights.stored.format.multiply(weights.stored.row(first), weights.stored.pitch, n, floats_, y, column);
    else
      matmul(weights.stored.bf16_row(first), n, packed_, y, column);
  }

 private:
  bool decodes_;
  PackedRows packed_;
  FloatRows floats_;

  FewRows(bool decodes, PackedRows packed, FloatRows floats) : decodes_(decodes), packed_(packed), floats_(floats) {}
};

// Product of few rows. Goes through the columns chunk by chunk, and calls sink(sums) for each row of a chunk. Gated
// weights must be one slab.
template <class Sink>
void multiply_few(const Weights& weights, Range columns, const FewRows& x, const Sink& sink) {
  struct ProductTag;
  constexpr uint32_t AT_ONCE = 1536;  // columns: sums stay in L2
  constexpr uint64_t STRIDE = 2 * AT_ONCE + simd::LANES;
  float* y[MAX_SEQUENCES];
  float* product = simd::scratch<ProductTag>(x.num_rows() * STRIDE + simd::LANES);
  for (uint32_t row = 0; row < x.num_rows(); ++row) y[row] = product + row * STRIDE;
  for (uint32_t first = columns.begin; first < columns.end && x.num_rows(); first += AT_ONCE) {
    const uint32_t count = std::min(AT_ONCE, columns.end - first);
    x.multiply(weights, first, count, y, 0);
    if (weights.gated()) x.multiply(weights, weights.num_cols() + first, count, y, count);
    for (uint32_t row = 0; row < x.num_rows(); ++row) sink(Sums{row, first, count, y[row], y[row] + count});
  }
}

// Product of many rows: x is bf16 [num_rows, k]. Workers share panels of columns and groups of rows.
class ManyRows {
 public:
  ManyRows(const Weights& weights, const uint16_t* x, uint32_t num_rows)
      : weights_(weights), x_(x), num_rows_(num_rows), panel_cols_(weights.gated() ? panels::COLS / 2 : panels::COLS) {}
  uint32_t num_panels() const { return ceil_div(weights_.num_cols(), panel_cols_); }
  uint32_t num_groups() const { return ceil_div(num_rows_, panels::TILE_ROWS); }
  // Multiplies a range of panels by a range of groups, over the columns `k` of x. Calls sink(sums) for each panel and
  // row.
  template <class Sink>
  void multiply(Range panels, Range groups, Range k, const Sink& sink) const {
    const uint64_t num_words = std::max(panels::num_words(k.end - k.begin), uint64_t{1});
    const auto room = static_cast<uint32_t>(std::max(MAX_BLOCK_WORDS / num_words, uint64_t{1}));
    const uint32_t block = std::min(room, panels.end - panels.begin);
    struct PanelTag;
    auto* words = reinterpret_cast<uint32_t*>(simd::scratch<PanelTag>(block * num_words));
    for (uint32_t first = panels.begin; first < panels.end; first += block) {
      const uint32_t last = std::min(first + block, panels.end);
      for (uint32_t panel = first; panel < last; ++panel) pack(words + (panel - first) * num_words, panel, k);
      for (uint32_t group = groups.begin; group < groups.end; ++group)
        for (uint32_t panel = first; panel < last; ++panel)
          multiply_group(words + (panel - first) * num_words, panel, share(num_rows_, group, num_groups()), k, sink);
    }
  }

 private:
  // Packed weights at a time: they stay in the L2 cache while the rows pass.
  static constexpr uint64_t MAX_BLOCK_WORDS = 384 * 1024 / sizeof(uint32_t);
  const Weights& weights_;
  const uint16_t* x_;
  const uint32_t num_rows_, panel_cols_;  // panel_cols_: columns of the output that a panel gives

  // Packs the rows of the weight that give the panel's columns: in gated products, gate's rows and then up's.
  void pack(uint32_t* words, uint32_t panel, Range k) const {
    const uint16_t* rows[panels::COLS] = {};
    const uint32_t first = panel * panel_cols_;
    struct DecodedTag;
    const uint32_t num_cols = k.end - k.begin;
    uint16_t* room = weights_.room_for<DecodedTag>(panels::COLS, num_cols);
    const auto row = [&](uint32_t index, uint32_t at) {
      return weights_.row(index, k, room ? room + uint64_t{at} * num_cols : nullptr);
    };
    for (uint32_t i = 0; i < panel_cols_ && first + i < weights_.num_cols(); ++i) {
      if (!weights_.gated()) {
        rows[i] = row(first + i, i);
      } else {
        const GateUp found(weights_, first + i);
        rows[i] = row(found.gate, i);
        rows[panel_cols_ + i] = row(found.up, panel_cols_ + i);
      }
    }
    panels::pack(words, rows, num_cols);
  }
  template <class Sink>
  void multiply_group(const uint32_t* words, uint32_t panel, Range rows, Range k, const Sink& sink) const {
    const uint32_t first = panel * panel_cols_, count = std::min(panel_cols_, weights_.num_cols() - first);
    alignas(64) float sums[panels::TILE_ROWS * panels::COLS];
    panels::multiply(words, k.end - k.begin, x_ + uint64_t{rows.begin} * weights_.k + k.begin, weights_.k,
                     rows.end - rows.begin, sums, panels::COLS);
    for (uint32_t i = 0; i < rows.end - rows.begin; ++i) {
      float* values = sums + i * panels::COLS;
      sink(Sums{rows.begin + i, first, count, values, values + panels::COLS / 2});
    }
  }
};

}  // namespace distmk
