// What a task must know of a format that it learns when it runs, besides its tiles.
#pragma once
#ifdef DISTMK_PACKED
#include "device/core/pipeline.cuh"
#include "device/formats/all.cuh"

namespace distmk {
namespace linear {

struct FormatTraits {
  StageShape stage;
  uint32_t even_scale, odd_scale;  // pairs by which activations are multiplied
  bool has_row_scales, takes_halves;
};

struct TraitsTable {
  static constexpr uint32_t SIZE = 32;
  FormatTraits of[SIZE];
};
template <class F>
constexpr FormatTraits traits_of_tiles() {
  using C = typename F::Constants;
  static_assert(K_TILE == 1 << 8 && C::ID < TraitsTable::SIZE, "");
  return {{C::TILES_PER_STAGE * K_TILE, 8, C::TILE_ROW_BYTES, C::TILE_SCALE_BYTES},
          pair_of_powers(F::EVEN_POWER),
          pair_of_powers(F::ODD_POWER),
          C::HAS_ROW_SCALES,
          F::TAKES_HALVES};
}
constexpr TraitsTable traits_table() {
  TraitsTable table{};
#define DISTMK_CASE(Name) table.of[Name##Format::ID] = traits_of_tiles<Name##Tiles>();
  DISTMK_PACKED_FORMATS(DISTMK_CASE)
#undef DISTMK_CASE
  return table;
}

// In constant memory: a function that returned them would load them from global memory, at the price of a round trip
// to L2 for each K block.
DISTMK_CONSTANT TraitsTable TRAITS = traits_table();
DISTMK_FN const FormatTraits& traits_of(uint32_t format) { return TRAITS.of[format]; }

}  // namespace linear
}  // namespace distmk
#endif  // DISTMK_PACKED
