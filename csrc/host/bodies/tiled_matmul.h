// Y = X W^T with AMX tiles, for matmul.h. Tiles of W are read from W's own rows; tiles of X are packed.
#pragma once
#include "host/bodies/tiles.h"

namespace distmk {

// X as tiles: groups of 16 rows; in a group, blocks of 32 columns; in a block, `num_parts` tiles. A row of a tile has
// one pair of columns of all 16 rows. Three parts represent a float32 by the sum of three bf16, which have all of its
// 24 bits. The last group and the last block are padded with zeros.
struct TiledRows {
  uint16_t* memory;
  uint32_t num_rows, k, num_parts;

  uint32_t num_blocks() const { return (k + tiles::COLS - 1) / tiles::COLS; }
  uint32_t num_groups() const { return (num_rows + tiles::ROWS - 1) / tiles::ROWS; }
  uint64_t group_elements() const { return uint64_t{num_blocks()} * num_parts * tiles::ELEMENTS; }
  uint16_t* group(uint32_t index) const { return memory + index * group_elements(); }

  // Stores x as row `row`. Until finish(), a tile holds rows instead of pairs.
  void set(uint32_t row, const float* x) const;
  // To be called after the last set().
  void finish() const;
};

// matmul() on these rows. Each sum is taken in the order of k, in blocks of 32.
void tiled_matmul(const uint16_t* w, uint32_t n, const TiledRows& x, float* const* y, uint32_t column);

}  // namespace distmk
