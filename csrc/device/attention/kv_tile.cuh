// Positions of the cache as tensor cores take them, straight from memory into registers, and what a warp finds there.
#pragma once
#include "device/attention/params.cuh"

namespace distmk {
namespace attention {

// A chunk as this lane holds it: of two columns of positions, and of four positions that weights meet together.
struct Tile {
  uint4 k[2][MAX_HEAD_DIM / 32], v[4][MAX_HEAD_DIM / 64];

  DISTMK_FN void clear() {
#pragma unroll
    for (auto& keys : k)
#pragma unroll
      for (uint4& chunk : keys) chunk = eight_zeros();
#pragma unroll
    for (auto& values : v)
#pragma unroll
      for (uint4& chunk : values) chunk = eight_zeros();
  }
};

// Of a lane, which position and which elements are whose.
DISTMK_FN uint32_t key_place(uint32_t lane, uint32_t i) { return 8 * i + lane / 4; }                      // i < 2
DISTMK_FN uint32_t value_place(uint32_t lane, uint32_t i) { return 2 * (lane % 4) + i % 2 + i / 2 * 8; }  // i < 4
DISTMK_FN uint32_t key_element(uint32_t lane, uint32_t j) { return 32 * j + 8 * (lane % 4); }
DISTMK_FN uint32_t value_element(uint32_t lane, uint32_t j) { return 64 * j + 8 * (lane / 4); }

// Lines of the cache, a lane a position of a turn's chunk; of positions that it does not hold, any.
DISTMK_FN uint32_t look_up(const Work& w, uint32_t turn) {
  const uint32_t position = w.chunk_of(turn) * CHUNK + threadIdx.x % CHUNK;
  return turn < w.num_chunks() && w.is_cached(position) ? w.line_of(position) : 0;
}

// What the pieces of this lane's keys are exchanged by; of its values, the i-th where the first is by `first`.
DISTMK_FN uint32_t keys_exchanged(const Work& w, uint32_t lane) { return w.exchanged(lane / 4); }
DISTMK_FN uint32_t value_exchanged(const Work& w, uint32_t i, uint32_t first) {
  return i % 2 ? first ^ w.exchanged(1) : first;
}
// Where an element of a position lies in its line; of what the head does not have, any.
template <class W>
DISTMK_FN uint32_t place_in_line(const W& w, uint32_t element, uint32_t exchanged) {
  return element < w.head_dim() ? element ^ exchanged : 0;
}

// Where a chunk lies in the cache, a line a position. A piece is loaded without a condition, or loads would be waited
// for one after another: what is not there is put right by patch_keys and patch_values.
struct CachedLines {
  const Work& w;
  uint32_t lines;  // as look_up has them

  DISTMK_FN const __nv_bfloat16* key(uint32_t position) const { return line(w.keys(), position); }
  DISTMK_FN const __nv_bfloat16* value(uint32_t position) const { return line(w.values(), position); }
  DISTMK_FN static uint4 load(const __nv_bfloat16* from) { return load_perhaps(reinterpret_cast<const uint4*>(from)); }

 private:
  DISTMK_FN const __nv_bfloat16* line(const __nv_bfloat16* cache, uint32_t position) const {
    return cache + uint64_t{__shfl_sync(~0u, lines, position)} * w.head_dim();
  }
};

DISTMK_FN void load_keys(const Work& w, const CachedLines& lines, Tile& tile) {
  const uint32_t lane = w.lane();
  const uint32_t exchanged = keys_exchanged(w, lane);
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const __nv_bfloat16* line = lines.key(key_place(lane, i));
#pragma unroll
    for (uint32_t j = 0; j < MAX_HEAD_DIM / 32; ++j)
      tile.k[i][j] = lines.load(line + place_in_line(w, key_element(lane, j), exchanged));
  }
}

DISTMK_FN void load_values(const Work& w, const CachedLines& lines, Tile& tile) {
  const uint32_t lane = w.lane();
  const uint32_t first = w.exchanged(value_place(lane, 0));
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const __nv_bfloat16* line = lines.value(value_place(lane, i));
    const uint32_t exchanged = value_exchanged(w, i, first);
#pragma unroll
    for (uint32_t j = 0; j < MAX_HEAD_DIM / 64; ++j)
      tile.v[i][j] = lines.load(line + place_in_line(w, value_element(lane, j), exchanged));
  }
}

// Whether all positions of a chunk come from the cache.
DISTMK_FN bool is_cached(const Work& w, uint32_t chunk) {
  return chunk * CHUNK >= w.begin && w.is_cached((chunk + 1) * CHUNK - 1);
}

// New positions are not read back from the cache but from where they were staged. Keys of positions that are nobody's
// here may be anything: their scores are not looked at.
template <class W>
DISTMK_FN void patch_keys(const W& w, uint32_t chunk, Tile& tile) {
  const uint32_t lane = w.lane();
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t position = chunk * CHUNK + key_place(lane, i);
    if (!w.is_new(position)) continue;
    const __nv_bfloat16* from = w.new_key(position - w.first_new());
#pragma unroll
    for (uint32_t j = 0; j < MAX_HEAD_DIM / 32; ++j)
      tile.k[i][j] = key_element(lane, j) < w.head_dim() ? *reinterpret_cast<const uint4*>(from + key_element(lane, j))
                                                         : eight_zeros();
  }
}

// Values that are nobody's meet a weight of zero, and so must be numbers.
template <class W>
DISTMK_FN void patch_values(const W& w, uint32_t chunk, Tile& tile) {
  const uint32_t lane = w.lane();
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t position = chunk * CHUNK + value_place(lane, i);
    if (w.is_cached(position)) continue;
    const bool is_new = w.is_new(position);
    const __nv_bfloat16* from = w.new_value(is_new ? position - w.first_new() : 0);
#pragma unroll
    for (uint32_t j = 0; j < MAX_HEAD_DIM / 64; ++j)
      tile.v[i][j] = is_new && value_element(lane, j) < w.head_dim()
                         ? *reinterpret_cast<const uint4*>(from + value_element(lane, j))
                         : eight_zeros();
  }
}

// Scores of the block's queries, over columns of positions of which the caller has the keys. Which element
// is which column of the product is free, as long as queries and keys agree: so a lane takes 16 bytes of a key at once.
template <uint32_t COLUMNS, class W, class Keys>
DISTMK_FN void multiply_keys(const W& w, const Keys& key, float (&scores)[COLUMNS][4]) {
  const uint32_t lane = w.lane();
  const uint32_t* query = w.query(lane / 4);
#pragma unroll
  for (uint32_t j = 0; j < MAX_HEAD_DIM / 32; ++j) {
    if (32 * j % QUERY_STEP == 0 && 32 * j >= w.head_dim()) break;
    const auto* pieces = reinterpret_cast<const uint4*>(query + key_element(lane, j));
    const uint4 q[2] = {pieces[0], pieces[1]};
#pragma unroll
    for (uint32_t i = 0; i < COLUMNS; ++i) {
      const uint4 k = key(i, j);
      multiply({q[0].x, q[0].y, q[0].z, q[0].w}, k.x, k.y, scores[i]);
      multiply({q[1].x, q[1].y, q[1].z, q[1].w}, k.z, k.w, scores[i]);
    }
  }
}

// Asked for anew, see WorkOf::lane.
DISTMK_FN uint32_t group_of_lane() { return opaque(threadIdx.x) % 32 / 4; }
DISTMK_FN uint32_t place_in_group() { return opaque(threadIdx.x) % 4; }

// What a warp has found over the positions it took.
struct Partial {
  // Of query group_of_lane(); the maximum as a power of two, the sum of this lane's positions, until the end.
  float maximum = -INFINITY, sum = 0;
  float acc[MAX_HEAD_DIM / 16][4] = {};  // of queries 2 t and 2 t + 1, t the place in the group

  // Scores to weights, as columns of a product, high and low halves; the query sees [seen_begin, seen_end) of a chunk,
  // and all of one beside it, if `two`. FIRST: nothing was found before.
  template <bool FIRST, uint32_t COLUMNS>
  DISTMK_FN void weigh(uint32_t chunk, uint32_t seen_begin, uint32_t seen_end, bool two,
                       const float (&scores)[COLUMNS][4], uint32_t (&weights)[COLUMNS / 2][2][2]) {
    float s[COLUMNS][2], top = -INFINITY;
#pragma unroll
    for (uint32_t i = 0; i < COLUMNS; ++i)
#pragma unroll
      for (uint32_t e = 0; e < 2; ++e) {
        const uint32_t position = chunk * CHUNK + 8 * i + 2 * place_in_group() + e;
        const bool seen = i < 2 ? position >= seen_begin && position < seen_end : two;
        s[i][e] = seen ? scores[i][e] + scores[i][2 + e] : -INFINITY;
        top = fmaxf(top, s[i][e]);
      }
    for (uint32_t step = 1; step < 4; step <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    const float higher = FIRST ? top : fmaxf(maximum, top), base = higher > -INFINITY ? higher : 0.0f;
    if (!FIRST) rescale(exp2f(maximum - base));
    maximum = higher;
#pragma unroll
    for (uint32_t i = 0; i < COLUMNS; ++i) {
      const float a = exp2f(s[i][0] - base), b = exp2f(s[i][1] - base);
      const Halves halves(a, b);
      sum += a + b;
      weights[i / 2][0][i % 2] = halves.high;
      weights[i / 2][1][i % 2] = halves.low;
    }
  }

  // Values are the rows here. A lane's 16 bytes are eight of them, two a product.
  DISTMK_FN void add_values(const Tile& tile, uint32_t dim, const uint32_t (&weights)[2][2]) {
    const auto& v = tile.v;
#pragma unroll
    for (uint32_t j = 0; j < MAX_HEAD_DIM / 64; ++j) {
      if (64 * j >= dim) break;
      const uint32_t words[4][4] = {{v[0][j].x, v[0][j].y, v[0][j].z, v[0][j].w},
                                    {v[1][j].x, v[1][j].y, v[1][j].z, v[1][j].w},
                                    {v[2][j].x, v[2][j].y, v[2][j].z, v[2][j].w},
                                    {v[3][j].x, v[3][j].y, v[3][j].z, v[3][j].w}};
#pragma unroll
      for (uint32_t n = 0; n < 4; ++n) {
        constexpr uint32_t LOWER = 0x5410, UPPER = 0x7632;  // bf16 of two positions
        const uint32_t rows[4] = {
            __byte_perm(words[0][n], words[1][n], LOWER), __byte_perm(words[0][n], words[1][n], UPPER),
            __byte_perm(words[2][n], words[3][n], LOWER), __byte_perm(words[2][n], words[3][n], UPPER)};
        multiply(rows, weights[0][0], weights[0][1], acc[4 * j + n]);
        multiply(rows, weights[1][0], weights[1][1], acc[4 * j + n]);
      }
    }
  }

  // What was found is weighed anew.
  DISTMK_FN void rescale(float keep) {
    const float keeps[2] = {__shfl_sync(~0u, keep, 8 * place_in_group()),
                            __shfl_sync(~0u, keep, 8 * place_in_group() + 4)};
    sum *= keep;
#pragma unroll
    for (uint32_t n = 0; n < MAX_HEAD_DIM / 16; ++n)
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) acc[n][i] *= keeps[i % 2];
  }

  // The sums of all lanes' positions, once all have been seen.
  DISTMK_FN void add_up() {
    for (uint32_t step = 1; step < 4; step <<= 1) sum += __shfl_xor_sync(~0u, sum, step);
  }

  // This lane's share of the results of queries `first` to `end` - 1, of which query i's go to `out` +
  // (i - first) * COMBINE_STRIDE.
  DISTMK_FN void write(float* out, uint32_t first, uint32_t end) const {
    const uint32_t mine = group_of_lane();
    if (place_in_group() == 0 && mine >= first && mine < end)
      *reinterpret_cast<float2*>(out + (mine - first) * COMBINE_STRIDE + MAX_HEAD_DIM) = {maximum * LN_2, sum};
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
      const uint32_t query = 2 * place_in_group() + e;
      if (query < first || query >= end) continue;
#pragma unroll
      for (uint32_t n = 0; n < MAX_HEAD_DIM / 16; n += 2)
        *reinterpret_cast<float4*>(out + (query - first) * COMBINE_STRIDE + n / 4 * 64 + 8 * group_of_lane() +
                                   n % 4 * 2) = {acc[n][e], acc[n][2 + e], acc[n + 1][e], acc[n + 1][2 + e]};
    }
  }
};

}  // namespace attention
}  // namespace distmk
