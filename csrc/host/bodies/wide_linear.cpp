// Linear layers of a wide iteration on the host: bf16 weights and activations in rows, float32 sums
// (distmk/tasks/wide_linear.py). Workers share a grid of columns and rows, a part each.
#include <algorithm>

#include "host/bodies/matmul.h"
#include "host/bodies/panels.h"
#include "host/bodies/wide_shares.h"
#include "runtime/gated.h"

namespace distmk {

namespace {

struct PanelTag;
struct SampledTag;
struct RowTag;

// Of the packed weights, so that they stay in the L2 cache while the rows pass.
constexpr uint64_t MAX_BLOCK_WORDS = 384 * 1024 / sizeof(uint32_t);

uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// How the workers divide the panels of a product, and if those are too few for them, the groups of rows as well.
struct Grid {
  uint32_t num_cols, num_rows;

  Grid(uint32_t num_panels, uint32_t num_groups, uint32_t num_workers) : num_cols(num_workers), num_rows(1) {
    const auto cost = [&](uint32_t shares) {
      return uint64_t{ceil_div(num_panels, num_workers / shares)} * ceil_div(num_groups, shares);
    };
    for (uint32_t shares = 2; shares <= num_workers; ++shares)
      if (num_workers % shares == 0 && cost(shares) < cost(num_rows)) num_rows = shares;
    num_cols = num_workers / num_rows;
  }
};

// Rows of gate and up that make a column of a gated product: the slabs are those of SlabPartition.ranges().
struct GateUp {
  uint32_t gate, up;
};
GateUp gate_up_rows(const WideLinearArgs& args, uint32_t column) {
  const uint32_t reduced = args.num_reduced * args.reduced_rows, half = args.reduced_rows / 2;
  if (2 * column < reduced) {
    const uint32_t gate = column / half * args.reduced_rows + column % half;
    return {gate, gate + half};
  }
  const uint32_t pair = column - reduced / 2, num_others = args.num_slabs - args.num_reduced;
  const uint64_t num_pairs = (args.num_rows - reduced) / 2;
  const auto slab = static_cast<uint32_t>(((uint64_t{pair} + 1) * num_others - 1) / num_pairs);
  const auto begin = static_cast<uint32_t>(num_pairs * slab / num_others);
  const auto end = static_cast<uint32_t>(num_pairs * (slab + 1) / num_others);
  const uint32_t gate = reduced + 2 * begin + pair - begin;
  return {gate, gate + end - begin};
}

class WideProduct {
 public:
  WideProduct(const Context& context, const WideLinearArgs& args, uint32_t num_rows);
  uint32_t num_panels() const { return ceil_div(num_cols_, panel_cols_); }
  uint32_t num_groups() const { return ceil_div(num_rows_, panels::TILE_ROWS); }
  // Of a range of panels of columns and one of groups of rows.
  void run(Range columns, Range groups, uint32_t split) const;

 private:
  const Context& context_;
  const WideLinearArgs& args_;
  const Epilogue epilogue_;
  const uint32_t num_rows_, num_cols_;  // of the output
  const uint32_t panel_cols_;           // its columns that a panel makes
  const uint32_t rows_per_rank_;
  const uint16_t *x_, *weight_;
  const float* bias_;
  float* parts_[MAX_RANKS];  // by rank, of PARTS

  // Columns of x in a split: whole blocks of WIDE_COLS.
  Range columns_of(uint32_t split) const {
    const Range blocks = share(ceil_div(args_.k, WIDE_COLS), split, args_.num_splits);
    return {blocks.begin * WIDE_COLS, std::min(blocks.end * WIDE_COLS, args_.k)};
  }
  void pack(uint32_t* words, uint32_t panel, Range k) const;
  void multiply_group(const uint32_t* words, uint32_t panel, Range rows, uint32_t split, Range k) const;
  void add_bias(float* sums, uint32_t num_rows, uint32_t first) const;
  void store_row(float* sums, uint32_t row, uint32_t first, uint32_t split) const;
};

WideProduct::WideProduct(const Context& context, const WideLinearArgs& args, uint32_t num_rows)
    : context_(context),
      args_(args),
      epilogue_(static_cast<Epilogue>(args.epilogue)),
      num_rows_(num_rows),
      num_cols_(is_gated(epilogue_) ? args.num_rows / 2 : args.num_rows),
      panel_cols_(is_gated(epilogue_) ? wide::LANES : panels::COLS),
      rows_per_rank_(rows_per_rank(num_rows, context.num_ranks())),
      x_(context.at<uint16_t>(args.x)),
      weight_(context.at<uint16_t>(args.weight)),
      bias_(context.at<float>(args.bias)) {
  if (epilogue_ == Epilogue::PARTS)
    for (uint32_t rank = 0; rank < context.num_ranks(); ++rank) parts_[rank] = on_rank<float>(context, rank, args.out);
}

// The rows of the weight that make the panel's columns: where gated, those of gate and then those of up.
void WideProduct::pack(uint32_t* words, uint32_t panel, Range k) const {
  const uint16_t* rows[panels::COLS] = {};
  const uint32_t first = panel * panel_cols_;
  const auto row = [&](uint32_t index) { return weight_ + uint64_t{index} * args_.k_pitch + k.begin; };
  for (uint32_t i = 0; i < panel_cols_ && first + i < num_cols_; ++i) {
    if (is_gated(epilogue_)) {
      const GateUp found = gate_up_rows(args_, first + i);
      rows[i] = row(found.gate);
      rows[wide::LANES + i] = row(found.up);
    } else {
      rows[i] = row(first + i);
    }
  }
  panels::pack(words, rows, k.end - k.begin);
}

void WideProduct::run(Range columns, Range groups, uint32_t split) const {
  const Range k = columns_of(split);
  const uint64_t num_words = std::max(panels::num_words(k.end - k.begin), uint64_t{1});
  const auto room = static_cast<uint32_t>(std::max(MAX_BLOCK_WORDS / num_words, uint64_t{1}));
  const uint32_t block = std::min(room, columns.end - columns.begin);
  auto* words = reinterpret_cast<uint32_t*>(simd::scratch<PanelTag>(block * num_words));
  for (uint32_t first = columns.begin; first < columns.end; first += block) {
    const uint32_t last = std::min(first + block, columns.end);
    for (uint32_t panel = first; panel < last; ++panel) pack(words + (panel - first) * num_words, panel, k);
    for (uint32_t group = groups.begin; group < groups.end; ++group)
      for (uint32_t panel = first; panel < last; ++panel)
        multiply_group(words + (panel - first) * num_words, panel, share(num_rows_, group, num_groups()), split, k);
  }
}

void WideProduct::multiply_group(const uint32_t* words, uint32_t panel, Range rows, uint32_t split, Range k) const {
  const uint32_t first = panel * panel_cols_, count = rows.end - rows.begin;
  alignas(64) float sums[panels::TILE_ROWS * panels::COLS];
  panels::multiply(words, k.end - k.begin, x_ + uint64_t{rows.begin} * args_.k + k.begin, args_.k, count, sums,
                   panels::COLS);
  if (bias_ && split == 0) add_bias(sums, count, first);
  for (uint32_t i = 0; i < count; ++i) store_row(sums + i * panels::COLS, rows.begin + i, first, split);
}

void WideProduct::add_bias(float* sums, uint32_t num_rows, uint32_t first) const {
  for (uint32_t i = 0; i < panel_cols_ && first + i < num_cols_; ++i) {
    const bool paired = is_gated(epilogue_);
    const GateUp found = paired ? gate_up_rows(args_, first + i) : GateUp{first + i, 0};
    for (uint32_t row = 0; row < num_rows; ++row) {
      sums[row * panels::COLS + i] += bias_[found.gate];
      if (paired) sums[row * panels::COLS + wide::LANES + i] += bias_[found.up];
    }
  }
}

// The columns from `first` on of a row, as many as a panel makes.
void WideProduct::store_row(float* sums, uint32_t row, uint32_t first, uint32_t split) const {
  const uint32_t count = std::min(panel_cols_, num_cols_ - first);
  if (epilogue_ == Epilogue::PARTS) {
    float* out = parts_[row / rows_per_rank_] + uint64_t{row % rows_per_rank_} * args_.out_stride;
    memcpy(out + uint64_t{args_.slot + split} * args_.num_rows + first, sums, count * sizeof(float));
    return;
  }
  alignas(64) uint16_t rounded[panels::COLS];
  const wide::Vec left = wide::load(sums), right = wide::load(sums + wide::LANES);
  if (is_gated(epilogue_)) {
    const wide::Vec z = epilogue_ == Epilogue::GEGLU ? gelu_exponent(left) : left;
    wide::to_bf16(rounded, left / (wide::exp_of(wide::min_of(-z, wide::Vec{} + 88.0f)) + 1.0f) * right);
  } else {
    wide::to_bf16(rounded, left);
    wide::to_bf16(rounded + wide::LANES, right);
  }
  uint16_t* out = context_.at<uint16_t>(args_.out) + uint64_t{row} * args_.out_stride + first;
  if (count == wide::LANES)  // sizes that the compiler knows are copied without a call
    memcpy(out, rounded, wide::LANES * sizeof(uint16_t));
  else if (count == panels::COLS)
    memcpy(out, rounded, panels::COLS * sizeof(uint16_t));
  else
    memcpy(out, rounded, count * sizeof(uint16_t));
}

// Few rows, and as many columns as there are tokens: as the narrow program multiplies them, with the same bits.
void multiply_sampled(const Context& context, const WideLinearArgs& args, uint32_t num_rows, Range columns) {
  if (!num_rows || columns.begin == columns.end) return;
  auto packed = PackedRows::in_scratch<SampledTag>(num_rows, args.k, Elements::BF16);
  float* x = simd::scratch<RowTag>(args.k);
  float* y[MAX_SEQUENCES];
  for (uint32_t row = 0; row < num_rows; ++row) {
    simd::from_bf16(x, context.at<uint16_t>(args.x) + uint64_t{row} * args.k, args.k);
    packed.set(row, x, 1.0f);
    y[row] = context.at<float>(args.out) + uint64_t{row} * args.out_stride;
  }
  packed.finish();
  matmul(context.at<uint16_t>(args.weight) + uint64_t{columns.begin} * args.k, columns.end - columns.begin, packed, y,
         columns.begin);
  const float* bias = context.at<float>(args.bias);
  for (uint32_t row = 0; row < num_rows; ++row) {
    for (uint32_t i = columns.begin; bias && i < columns.end; ++i) y[row][i] += bias[i];
    simd::softcap(y[row] + columns.begin, columns.end - columns.begin, args.softcap);
  }
}

}  // namespace

void body_wide_linear(Context& context, const WideLinearArgs& args) {
  if (args.tiled) return;  // a GPU's matrix
  const Batch& batch = *context.batch(args.batch);
  const uint32_t shares = num_shares(context);
  if (args.sampled)
    return run_shares(context, shares, [&](uint32_t index) {
      multiply_sampled(context, args, batch.num_rows, share(args.num_rows, index, shares));
    });
  if (!batch.num_wide_rows) return;
  const WideProduct product(context, args, batch.num_wide_rows);
  const Grid grid(product.num_panels(), product.num_groups(), shares);
  run_shares(context, shares * args.num_splits, [&](uint32_t index) {
    const uint32_t part = index % shares;
    product.run(share(product.num_panels(), part / grid.num_rows, grid.num_cols),
                share(product.num_groups(), part % grid.num_rows, grid.num_rows), index / shares);
  });
}

}  // namespace distmk
