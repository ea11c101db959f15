// The rows of a matrix in memory, in whatever weight format.
#pragma once
#include "host/formats/row_format.h"

namespace distmk {

// Rows of `pitch` elements, one after another. Tasks count columns from the element `lead` on.
struct StoredRows {
  const uint8_t* data;
  uint32_t pitch, lead;
  RowFormat format;

  StoredRows(const uint8_t* data, uint32_t format_id, uint32_t pitch, uint32_t lead = 0)
      : data(data), pitch(pitch), lead(lead), format(row_format(format_id, pitch)) {}

  bool is_bf16() const { return !format.decode; }
  const uint8_t* row(uint64_t index) const { return data + index * format.row_bytes; }
  const uint16_t* bf16_row(uint64_t index) const { return reinterpret_cast<const uint16_t*>(row(index)) + lead; }
  // Columns [begin, end) of a row in float32.
  void read(uint64_t index, uint32_t begin, uint32_t end, float* out) const {
    if (is_bf16())
      simd::from_bf16(out, bf16_row(index) + begin, end - begin);
    else
      format.decode(row(index), pitch, lead + begin, lead + end, out);
  }
};

}  // namespace distmk
