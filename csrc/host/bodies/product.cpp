#include "host/bodies/product.h"

#include "runtime/pointwise.h"
#include "runtime/slabs.h"

namespace distmk {

namespace {

struct PanelTag;

}  // namespace

void Sums::finish(const Weights& weights, float scale, bool has_bias) const {
  using namespace simd;
  const bool gated = weights.gate != Gate::NONE;
  if (scale != 1.0f)
    for (uint32_t i = 0; i < count; ++i) {
      values[i] *= scale;
      if (gated) ups[i] *= scale;
    }
  for (uint32_t i = 0; has_bias && weights.bias && i < count; ++i) {
    if (!gated) {
      values[i] += weights.bias[first + i];
      continue;
    }
    const GateUp rows(weights, first + i);
    values[i] += weights.bias[rows.gate];
    ups[i] += weights.bias[rows.up];
  }
  for (uint32_t i = 0; gated && i < count; i += LANES) {
    const Vec gate = load(values + i), up = load(ups + i);
    store(values + i, weights.gate == Gate::GELU ? geglu<VectorMath>(gate, up) : swiglu<VectorMath>(gate, up));
  }
}

uint32_t* ManyRows::packed_memory(uint64_t num_words) {
  return reinterpret_cast<uint32_t*>(simd::scratch<PanelTag>(num_words));
}

// The rows of the weight that make the panel's columns: where gated, those of gate and then those of up.
void ManyRows::pack(uint32_t* words, uint32_t panel, Range k) const {
  const uint16_t* rows[panels::COLS] = {};
  const uint32_t first = panel * panel_cols_;
  const auto row = [&](uint32_t index) { return weights_.data + uint64_t{index} * weights_.k + k.begin; };
  for (uint32_t i = 0; i < panel_cols_ && first + i < weights_.num_cols(); ++i) {
    if (weights_.gate == Gate::NONE) {
      rows[i] = row(first + i);
    } else {
      const GateUp found(weights_, first + i);
      rows[i] = row(found.gate);
      rows[panel_cols_ + i] = row(found.up);
    }
  }
  panels::pack(words, rows, k.end - k.begin);
}

}  // namespace distmk
