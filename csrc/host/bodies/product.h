// Matrix product of the host's linear layers, for 1 to 512 rows: value[row][column] = sum over k of x[row] .
// weight[column], with bf16 inputs and float32 sums in an order that depends on k alone. A few rows read the weights
// once, straight from memory (matmul.h); many rows pay for packing them (panels.h). Callers pass a sink that takes the
// sums.
#pragma once
#include "host/bodies/matmul.h"
#include "host/bodies/panels.h"
#include "host/bodies/shares.h"
#include "host/formats/all.h"
#include "runtime/pointwise.h"
#include "runtime/slabs.h"

namespace distmk {

// How to read rows of k elements in the format `id`, which `check` has found to exist.
inline RowFormat row_format(uint32_t id, uint32_t k) {
#define DISTMK_ROW_FORMAT(Name) \
  if (id == Name##Format::ID) return {Name##Rows::row_bytes(k), Name##Rows::decode};
  DISTMK_WEIGHT_FORMATS(DISTMK_ROW_FORMAT)
#undef DISTMK_ROW_FORMAT
  return {};
}

// The weights of a task, [num_rows, k]. A column of the output has one row of them or, if gated, two (slabs.h).
struct Weights {
  const uint8_t* data;
  RowFormat format;
  const float* bias;  // null: none
  Epilogue epilogue;
  uint32_t k, num_rows, num_slabs = 1, num_reduced = 0, reduced_rows = 0;

  bool gated() const { return is_gated(epilogue); }
  uint32_t num_cols() const { return gated() ? num_rows / 2 : num_rows; }

  // Memory of the calling thread for decoding `count` rows of `num_cols` columns; null if nothing is to decode.
  template <class Tag>
  uint16_t* room_for(uint64_t count, uint32_t num_cols) const {
    return format.decode ? reinterpret_cast<uint16_t*>(simd::scratch<Tag>((count * num_cols + 1) / 2)) : nullptr;
  }
  // The columns `cols` of `count` consecutive rows from `first` on, as bf16. Rows are k elements apart in the weights
  // themselves, or decoded to `room` without gaps.
  DISTMK_INLINE const uint16_t* rows(uint32_t first, uint32_t count, Range cols, uint16_t* room) const {
    const uint8_t* begin = data + first * format.row_bytes;
    if (!format.decode) return reinterpret_cast<const uint16_t*>(begin) + cols.begin;
    for (uint32_t i = 0; i < count; ++i)
      format.decode(begin + i * format.row_bytes, k, cols.begin, cols.end,
                    room + uint64_t{i} * (cols.end - cols.begin));
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

// Product of few rows. Goes through the columns chunk by chunk, and calls sink(sums) for each row of a chunk. Gated
// weights must be one slab.
template <class Sink>
void multiply_few(const Weights& weights, Range columns, const PackedRows& x, const Sink& sink) {
  struct ProductTag;
  struct DecodedTag;
  constexpr uint32_t AT_ONCE = 1536, DECODED_AT_ONCE = 32;  // columns: sums and decoded rows stay in L2
  const uint32_t at_once = weights.format.decode ? DECODED_AT_ONCE : AT_ONCE;
  const uint64_t stride = 2 * at_once + simd::LANES;
  uint16_t* room = weights.room_for<DecodedTag>(at_once, weights.k);
  float* y[MAX_SEQUENCES];
  float* product = simd::scratch<ProductTag>(x.num_rows() * stride + simd::LANES);
  for (uint32_t row = 0; row < x.num_rows(); ++row) y[row] = product + row * stride;
  for (uint32_t first = columns.begin; first < columns.end && x.num_rows(); first += at_once) {
    const uint32_t count = std::min(at_once, columns.end - first);
    const auto rows = [&](uint32_t begin) { return weights.rows(begin, count, {0, weights.k}, room); };
    matmul(rows(first), count, x, y, 0);
    if (weights.gated()) matmul(rows(weights.num_cols() + first), count, x, y, count);
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
      return weights_.rows(index, 1, k, room ? room + uint64_t{at} * num_cols : nullptr);
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
