// A chunk of a single row's split: its lines are one behind the other, in a page of the cache or in a stage of the
// ring. Pieces are exchanged among eight positions and 64 elements, so a lane needs two addresses of keys and two of
// values; the rest the loads themselves add to them.
#pragma once
#include "device/attention/kv_tile.cuh"

namespace distmk {
namespace attention {

struct FromCache {
  DISTMK_FN static uint4 load(const __nv_bfloat16* from) { return load_perhaps(reinterpret_cast<const uint4*>(from)); }
};
struct FromRing {
  DISTMK_FN static uint4 load(const __nv_bfloat16* from) { return *reinterpret_cast<const uint4*>(from); }
};

template <class W>
DISTMK_FN const __nv_bfloat16* piece_of(const W& w, const __nv_bfloat16* first, uint32_t position, uint32_t element) {
  return first + position * W::DIM + place_in_line(w, element, w.exchanged(position));
}

// This lane's pieces of a chunk's keys, as a Tile has them.
template <class W, class From>
struct KeyPieces {
  const __nv_bfloat16* at[2];

  DISTMK_FN KeyPieces(const W& w, const __nv_bfloat16* first) {
    const uint32_t lane = w.lane();
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) at[j] = piece_of(w, first, key_place(lane, 0), key_element(lane, j));
  }
  DISTMK_FN uint4 load(uint32_t i, uint32_t j) const { return From::load(at[j % 2] + i * 8 * W::DIM + j / 2 * 64); }
  DISTMK_FN void load(Tile& tile) const {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i)
#pragma unroll
      for (uint32_t j = 0; j < W::DIM / 32; ++j) tile.k[i][j] = load(i, j);
  }
};

// The same of its values.
template <class W, class From>
struct ValuePieces {
  const __nv_bfloat16* at[2];

  DISTMK_FN ValuePieces(const W& w, const __nv_bfloat16* first) {
    const uint32_t lane = w.lane();
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) at[i] = piece_of(w, first, value_place(lane, i), value_element(lane, 0));
  }
  DISTMK_FN uint4 load(uint32_t i, uint32_t j) const { return From::load(at[i % 2] + i / 2 * 8 * W::DIM + j * 64); }
  DISTMK_FN void load(Tile& tile) const {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
#pragma unroll
      for (uint32_t j = 0; j < W::DIM / 64; ++j) tile.v[i][j] = load(i, j);
  }
};

}  // namespace attention
}  // namespace distmk
