// Rows of bf16 weights (distmk/formats/bf16.py).
#pragma once
#include "host/formats/row_format.h"

namespace distmk {

struct Bf16Rows {
  static uint64_t row_bytes(uint32_t k) { return uint64_t{k} * sizeof(uint16_t); }
  static constexpr RowFormat::Decode* decode = nullptr;  // nothing to decode
};

}  // namespace distmk
