// How the host reads the rows of a matrix in a weight format. Each format's header has a struct <Name>Rows with the two
// members below; all.h lists the formats.
#pragma once
#include <cstdint>

#include "abi.h"

namespace distmk {

struct RowFormat {
  // Writes columns [begin, end) of a row of k elements as bf16: the numbers to which Python's `values` are rounded.
  using Decode = void(const uint8_t* row, uint32_t k, uint32_t begin, uint32_t end, uint16_t* out);

  uint64_t row_bytes;
  Decode* decode;  // null: rows are bf16 already
};

}  // namespace distmk
