// Y = X W^T by tiles of AMX, for matmul.h: the tile of W is read from W's own rows, that of X is packed.
#pragma once
#include "host/bodies/tiles.h"

namespace distmk {

// X as tiles: groups of 16 rows; in a group block by block (32 columns); in a block `num_parts` tiles. A row of a tile
// is one pair of columns of all 16 rows. Three parts hold float32 as a sum of three bf16, which have all of its 24
// bits. The last group and the last block are padded with zeros.
struct TiledRows {
  uint16_t* memory;
  uint32_t num_rows, k, num_parts;

  uint32_t num_blocks() const { return (k + tiles::COLS - 1) / tiles::COLS; }
  uint32_t num_groups() const { return (num_rows + tiles::ROWS - 1) / tiles::ROWS; }
  uint64_t group_elements() const { return uint64_t{num_blocks()} * num_parts * tiles::ELEMENTS; }
  uint16_t* group(uint32_t index) const { return memory + index * group_elements(); }

  // Stores x as row `row`. A tile holds rows, not pairs, until all are there.
  void set(uint32_t row, const float* x) const;
  // After the last set().
  void finish() const;
};

// As matmul(). Each sum is taken in the order of k, in blocks of 32.
void tiled_matmul(const uint16_t* w, uint32_t n, const TiledRows& x, float* const* y, uint32_t column);

}  // namespace distmk
