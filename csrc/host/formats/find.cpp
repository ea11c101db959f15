// The table of weight formats on the host.
#include "host/formats/all.h"
#include "host/formats/kernels.h"

namespace distmk {

namespace {

template <class Rows>
RowFormat row_format_of(uint32_t k) {
  if constexpr (requires { Rows::GROUP; })
    return {Rows::row_bytes(k), decode_row<Rows>, multiply_rows<Rows>};
  else
    return {uint64_t{k} * sizeof(uint16_t), nullptr, nullptr};
}

}  // namespace

RowFormat row_format(uint32_t id, uint32_t k) {
#define DISTMK_ROW_FORMAT(Name) \
  if (id == Name##Format::ID) return row_format_of<Name##Rows>(k);
  DISTMK_WEIGHT_FORMATS(DISTMK_ROW_FORMAT)
#undef DISTMK_ROW_FORMAT
  return {};
}

}  // namespace distmk

// Columns [begin, end) of a row of k elements in float32, for tests. The format is not bf16.
extern "C" void distmk_decode_row(uint32_t format, const uint8_t* row, uint32_t k, uint32_t begin, uint32_t end,
                                  float* out) {
  distmk::row_format(format, k).decode(row, k, begin, end, out);
}
