// How the host reads the rows of a matrix, by their format. The header of each format has a struct <Name>Rows of the
// two members below; all.h lists them.
#pragma once
#include <cstdint>

#include "abi.h"

namespace distmk {

struct RowFormat {
  // Writes columns [begin, end) of a row of k elements as bf16, those that `values` in Python rounds to.
  using Decode = void(const uint8_t* row, uint32_t k, uint32_t begin, uint32_t end, uint16_t* out);

  uint64_t row_bytes;
  Decode* decode;  // null: rows are bf16 already
};

}  // namespace distmk
