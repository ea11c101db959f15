// A KV tile in one warp's registers: K[16, d] and V[16, d] of KV_TILE positions, as operands of m16n8k16 products. K
// serves as B fragments of S = Q K^T, V^T as A fragments of O^T = V^T P^T. Loads go straight to registers: row by row
// from the paged cache, or from contiguous rows in a page or a pipeline stage. Nothing is transposed in memory.
#pragma once
#include "device/attention/params.cuh"

namespace distmk {
namespace attention {

// Each uint4 is eight elements of one position. The functions below say which position and which elements.
template <uint32_t MAX_DIM>
struct KvTileOf {
  uint4 k[2][MAX_DIM / 32], v[4][MAX_DIM / 64];

  // For a warp without a tile. Otherwise the compiler would keep the registers' contents alive through all other tasks.
  DISTMK_FN void clear() {
#pragma unroll
    for (auto& keys : k)
#pragma unroll
      for (uint4& chunk : keys) chunk = zero_chunk();
#pragma unroll
    for (auto& values : v)
#pragma unroll
      for (uint4& chunk : values) chunk = zero_chunk();
  }
};

using KvTile = KvTileOf<HOT_HEAD_DIM>;

// k_position() and v_position(): the position in the tile of a lane's k[i] and v[i]. k_element() and v_element(): the
// first element of its k[.][j] and v[.][j]. Which element takes which column of the product is free as long as Q and K
// agree, so a lane loads 16 bytes of a key at once. V is loaded in the same manner.
DISTMK_FN uint32_t k_position(uint32_t lane, uint32_t i) { return 8 * i + lane / 4; }                    // i < 2
DISTMK_FN uint32_t v_position(uint32_t lane, uint32_t i) { return 2 * (lane % 4) + i % 2 + i / 2 * 8; }  // i < 4
DISTMK_FN uint32_t k_element(uint32_t lane, uint32_t j) { return 32 * j + 8 * (lane % 4); }
DISTMK_FN uint32_t v_element(uint32_t lane, uint32_t j) { return 64 * j + 8 * (lane / 4); }

// k_swizzle(): the swizzle of a lane's k[i], the same for both i. v_swizzle(): the swizzle of its v[i], given the
// swizzle of v[0].
template <class P>
DISTMK_FN uint32_t k_swizzle(const P& p, uint32_t lane) {
  return p.swizzle(lane / 4);
}
template <class P>
DISTMK_FN uint32_t v_swizzle(const P& p, uint32_t i, uint32_t of_first) {
  return i % 2 ? of_first ^ p.swizzle(1) : of_first;
}
// Where an element lies in its swizzled cache row; 0 for an element that the head does not have.
template <class P>
DISTMK_FN uint32_t swizzled(const P& p, uint32_t element, uint32_t swizzle) {
  return element < p.head_dim() ? element ^ swizzle : 0;
}

DISTMK_FN uint4 load_cached(const __nv_bfloat16* from) { return load_perhaps(reinterpret_cast<const uint4*>(from)); }

// A tile in the paged cache, gathered row by row. No load is conditional, because the compiler would then wait for each
// load before the next. Positions that are not cached load row 0, and patch_new_k and patch_new_v replace them.
template <class P>
struct PagedTile {
  const P& p;
  uint32_t rows;  // see look_up_kv_rows

  DISTMK_FN const __nv_bfloat16* k(uint32_t position) const { return row(p.k_cache(), position); }
  DISTMK_FN const __nv_bfloat16* v(uint32_t position) const { return row(p.v_cache(), position); }

 private:
  DISTMK_FN const __nv_bfloat16* row(const __nv_bfloat16* cache, uint32_t position) const {
    return cache + uint64_t{__shfl_sync(~0u, rows, position)} * p.head_dim();
  }
};

template <class P>
DISTMK_FN void load_k(const P& p, const PagedTile<P>& from, KvTileOf<P::MAX_DIM>& tile) {
  const uint32_t lane = p.lane();
  const uint32_t swizzle = k_swizzle(p, lane);
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const __nv_bfloat16* row = from.k(k_position(lane, i));
#pragma unroll
    for (uint32_t j = 0; j < P::MAX_DIM / 32; ++j)
      tile.k[i][j] = load_cached(row + swizzled(p, k_element(lane, j), swizzle));
  }
}

template <class P>
DISTMK_FN void load_v(const P& p, const PagedTile<P>& from, KvTileOf<P::MAX_DIM>& tile) {
  const uint32_t lane = p.lane();
  const uint32_t of_first = p.swizzle(v_position(lane, 0));
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const __nv_bfloat16* row = from.v(v_position(lane, i));
    const uint32_t swizzle = v_swizzle(p, i, of_first);
#pragma unroll
    for (uint32_t j = 0; j < P::MAX_DIM / 64; ++j)
      tile.v[i][j] = load_cached(row + swizzled(p, v_element(lane, j), swizzle));
  }
}

// A tile with contiguous rows of P::DIM elements, in the cache (FromCache) or in a pipeline stage (FromStage). The
// swizzle permutes chunks among eight positions and 64 elements. So a lane needs only two addresses for K and two for
// V; all other offsets are immediates of the loads.
struct FromCache {
  DISTMK_FN static uint4 load(const __nv_bfloat16* from) { return load_cached(from); }
};
struct FromStage {
  DISTMK_FN static uint4 load(const __nv_bfloat16* from) { return *reinterpret_cast<const uint4*>(from); }
};

template <class P>
DISTMK_FN const __nv_bfloat16* chunk_at(const P& p, const __nv_bfloat16* rows, uint32_t position, uint32_t element) {
  return rows + position * P::DIM + swizzled(p, element, p.swizzle(position));
}

template <class P, class From>
struct ContiguousK {
  const __nv_bfloat16* base[2];

  DISTMK_FN ContiguousK(const P& p, const __nv_bfloat16* rows) {
    const uint32_t lane = p.lane();
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) base[j] = chunk_at(p, rows, k_position(lane, 0), k_element(lane, j));
  }
  DISTMK_FN uint4 load(uint32_t i, uint32_t j) const { return From::load(base[j % 2] + i * 8 * P::DIM + j / 2 * 64); }
  DISTMK_FN void load(KvTile& tile) const {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i)
#pragma unroll
      for (uint32_t j = 0; j < P::DIM / 32; ++j) tile.k[i][j] = load(i, j);
  }
};

template <class P, class From>
struct ContiguousV {
  const __nv_bfloat16* base[2];

  DISTMK_FN ContiguousV(const P& p, const __nv_bfloat16* rows) {
    const uint32_t lane = p.lane();
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) base[i] = chunk_at(p, rows, v_position(lane, i), v_element(lane, 0));
  }
  DISTMK_FN uint4 load(uint32_t i, uint32_t j) const { return From::load(base[i % 2] + i / 2 * 8 * P::DIM + j * 64); }
  DISTMK_FN void load(KvTile& tile) const {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
#pragma unroll
      for (uint32_t j = 0; j < P::DIM / 64; ++j) tile.v[i][j] = load(i, j);
  }
};

// Whether all positions of a tile are cached, so that nothing needs patching.
template <class P>
DISTMK_FN bool is_cached(const P& p, uint32_t tile) {
  return tile * KV_TILE >= p.begin && p.is_cached((tile + 1) * KV_TILE - 1);
}

// Replaces K of new positions from shared memory. K outside the split may be anything, because the softmax step masks
// its scores.
template <class P>
DISTMK_FN void patch_new_k(const P& p, uint32_t tile_index, KvTileOf<P::MAX_DIM>& tile) {
  const uint32_t lane = p.lane();
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t position = tile_index * KV_TILE + k_position(lane, i);
    if (!p.is_new(position)) continue;
    const __nv_bfloat16* from = p.new_k(position - p.first_new());
#pragma unroll
    for (uint32_t j = 0; j < P::MAX_DIM / 32; ++j)
      tile.k[i][j] =
          k_element(lane, j) < p.head_dim() ? *reinterpret_cast<const uint4*>(from + k_element(lane, j)) : zero_chunk();
  }
}

// Replaces V of new positions from shared memory. V outside the split becomes zero: its weight is zero, but 0 * NaN
// would be NaN.
template <class P>
DISTMK_FN void patch_new_v(const P& p, uint32_t tile_index, KvTileOf<P::MAX_DIM>& tile) {
  const uint32_t lane = p.lane();
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t position = tile_index * KV_TILE + v_position(lane, i);
    if (p.is_cached(position)) continue;
    const bool is_new = p.is_new(position);
    const __nv_bfloat16* from = p.new_v(is_new ? position - p.first_new() : 0);
#pragma unroll
    for (uint32_t j = 0; j < P::MAX_DIM / 64; ++j)
      tile.v[i][j] = is_new && v_element(lane, j) < p.head_dim()
                         ? *reinterpret_cast<const uint4*>(from + v_element(lane, j))
                         : zero_chunk();
  }
}

}  // namespace attention
}  // namespace distmk
