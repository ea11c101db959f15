// QK-norm and RoPE of one head by a warp. They produce Q and the K of new positions in shared memory; V and the append
// to the cache are here, too.
#pragma once
#include "device/attention/lse.cuh"
#include "device/attention/params.cuh"
#include "device/comm/lamport.cuh"

namespace distmk {
namespace attention {

DISTMK_FN float squares_of(const float2& a, const float2& b) { return a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y; }

// Applies norm weights, `scale` (which includes 1/rms) and RoPE to two pairs of elements: a at e, and b at e + half.
template <class Store>
DISTMK_FN void rotate(uint32_t e, uint32_t half, float2& a, float2& b, const float2& cosine, const float2& sine,
                      const float2& norm_a, const float2& norm_b, float scale, const Store& store) {
  a = {a.x * norm_a.x * scale, a.y * norm_a.y * scale};
  b = {b.x * norm_b.x * scale, b.y * norm_b.y * scale};
  store(e, float2{a.x * cosine.x - b.x * sine.x, a.y * cosine.y - b.y * sine.y});
  store(e + half, float2{b.x * cosine.x + a.x * sine.x, b.y * cosine.y + a.y * sine.y});
}

// norm_and_rotate() for a head of several parts, with four elements of each part per lane. The version for one part is
// separate: the compiler generates different code for a loop over one part, and decode rows are on the hot path.
template <uint32_t PARTS, class Store>
DISTMK_FN void norm_and_rotate_parts(const Context& context, bool polls, const float* src, const float* norm,
                                     const float* rope, float eps, uint32_t dim, float scale, const Store& store) {
  const uint32_t half = dim / 2;
  const auto element = [](uint32_t part) { return own_thread() % 32 * 2 + part * (HOT_HEAD_DIM / 2); };
  float2 a[PARTS], b[PARTS], cosine[PARTS], sine[PARTS], norm_a[PARTS], norm_b[PARTS];
#pragma unroll
  for (uint32_t i = 0; i < PARTS; ++i) {
    const uint32_t e = element(i);
    const auto load = [&](const float* from) {
      return from && e < half ? __ldcg(reinterpret_cast<const float2*>(from)) : float2{1, 1};
    };
    cosine[i] = load(rope + e), sine[i] = load(rope + e + half);
    norm_a[i] = load(norm ? norm + e : nullptr), norm_b[i] = load(norm ? norm + e + half : nullptr);
  }
  context.poll(polls, [&] {
    bool published = true;
#pragma unroll
    for (uint32_t i = 0; i < PARTS; ++i) {
      const float* from = src + (element(i) < half ? element(i) : 0);
      a[i] = poll_load(reinterpret_cast<const float2*>(from));
      b[i] = poll_load(reinterpret_cast<const float2*>(from + half));
      published = published && is_published(a[i]) && is_published(b[i]);
    }
    return published;
  });
  if (norm) {
    float squares = 0;
#pragma unroll
    for (uint32_t i = 0; i < PARTS; ++i) squares += element(i) < half ? squares_of(a[i], b[i]) : 0.0f;
    scale *= rsqrtf(__fdividef(warp_sum(squares), static_cast<float>(dim)) + eps);
  }
#pragma unroll
  for (uint32_t i = 0; i < PARTS; ++i)
    if (element(i) < half) rotate(element(i), half, a[i], b[i], cosine[i], sine[i], norm_a[i], norm_b[i], scale, store);
}

// y = RoPE(x / rms(x) * norm) * scale for one head x[dim], four elements per lane. Pairs are (e, e + dim / 2). If
// `norm` is null, there is no norm. Each lane calls store(e, {y[e], y[e + 1]}) for two even e. All loads are issued
// before the first is used. If `polls`, `src` is polled (Lamport).
template <uint32_t PARTS, class Store>
DISTMK_FN void norm_and_rotate(const Context& context, bool polls, const float* src, const float* norm,
                               const float* rope, float eps, uint32_t dim, float scale, const Store& store) {
  if constexpr (PARTS > 1) return norm_and_rotate_parts<PARTS>(context, polls, src, norm, rope, eps, dim, scale, store);
  const uint32_t e = own_thread() % 32 * 2, half = dim / 2;
  const bool has_pairs = e < half;
  const auto load = [&](const float* from) {
    return from && has_pairs ? __ldcg(reinterpret_cast<const float2*>(from)) : float2{1, 1};
  };
  const float2 cosine = load(rope + e), sine = load(rope + e + half);
  const float2 norm_a = load(norm ? norm + e : nullptr), norm_b = load(norm ? norm + e + half : nullptr);
  float2 a, b;
  context.poll(polls, [&] {
    const float* from = src + (has_pairs ? e : 0);
    a = poll_load(reinterpret_cast<const float2*>(from));
    b = poll_load(reinterpret_cast<const float2*>(from + half));
    return is_published(a) && is_published(b);
  });
  if (norm) {
    const float squares = warp_sum(has_pairs ? squares_of(a, b) : 0.0f);
    scale *= rsqrtf(__fdividef(squares, static_cast<float>(dim)) + eps);
  }
  if (!has_pairs) return;
  rotate(e, half, a, b, cosine, sine, norm_a, norm_b, scale, store);
}

// Loads Q of `count` queries into shared memory, one query per warp, normalized and rotated. Q is scaled by log2(e)
// times the scale of scores, so that softmax weights are powers of two.
template <class P>
DISTMK_FN void load_q(const P& p, uint32_t first_query, uint32_t count, bool polls) {
  const uint32_t i = own_thread() / 32, dim = p.head_dim();
  if (i >= count) return;
  const uint32_t row = p.row_of(first_query + i), head = p.first_head + first_query + i - row * p.num_heads;
  const auto store = [&](uint32_t e, float2 pair) {
    const Halves halves(pair.x, pair.y);
    *reinterpret_cast<uint2*>(p.query(i) + e) = {halves.high, halves.low};
  };
  norm_and_rotate<P::PARTS>(p.context, polls, p.qkv(row, head), p.f32(p.args.q_norm), p.rope(p.first_new() + row),
                            p.args.eps, dim, p.args.scores.scale * LOG2_E, store);
  if (const uint32_t e = dim + p.lane() * 2; e < p.padded_head_dim()) store(e, {0, 0});
}

// Loads K (normalized, rotated) and V of the split's new positions into shared memory. A warp takes K or V of one
// position at a time, beginning with warp `first_warp`, because the warps before it have a query.
template <class P>
DISTMK_FN void load_new_kv(const P& p, uint32_t first_warp, bool polls) {
  const uint32_t lane = p.lane(), dim = p.head_dim(), first = max(p.begin, p.first_new());
#pragma unroll 1
  for (uint32_t i = (own_thread() / 32 - first_warp) % NUM_WARPS; first + i / 2 < p.end_of_positions();
       i += NUM_WARPS) {
    const uint32_t position = first + i / 2, row = position - p.first_new();
    const float* key = p.qkv(row, p.args.num_q + p.instance.kv_head);
    if (i % 2 == 0) {
      norm_and_rotate<P::PARTS>(
          p.context, polls, key, p.f32(p.args.k_norm), p.rope(position), p.args.eps, dim, 1.0f,
          [&](uint32_t e, float2 pair) { *reinterpret_cast<uint32_t*>(p.new_k(row) + e) = pack_bf16(pair.x, pair.y); });
      continue;
    }
    const auto* value = reinterpret_cast<const uint4*>(key + uint64_t{p.args.num_kv} * dim);
    const auto load_part = [&](uint32_t part) {
      const bool has_elements = part * HOT_HEAD_DIM + 4 * lane < dim;
      uint4 v;
      p.context.poll(polls, [&] {
        v = poll_load(value + (has_elements ? part * 32 + lane : 0));
        return v.x && v.y && v.z && v.w;
      });
      if (has_elements)
        reinterpret_cast<uint2*>(p.new_v(row))[part * 32 + lane] = {
            pack_bf16(__uint_as_float(v.x), __uint_as_float(v.y)),
            pack_bf16(__uint_as_float(v.z), __uint_as_float(v.w))};
    };
    load_part(0);
    if constexpr (P::PARTS > 1) load_part(1);
  }
}

// Appends K and V of the split's new positions from shared memory to the cache, one position per warp. `kv_row` returns
// a position's cache row.
template <class P, class KvRow>
DISTMK_FN void append_new_kv(const P& p, const KvRow& kv_row) {
  const uint32_t lane = p.lane(), dim = p.head_dim(), first = max(p.begin, p.first_new());
  if (4 * lane >= dim) return;
#pragma unroll 1
  for (uint32_t position = first + own_thread() / 32; position < p.end_of_positions(); position += NUM_WARPS) {
    const uint32_t row = position - p.first_new();
    const uint64_t at = uint64_t{kv_row(position)} * dim + (4 * lane ^ p.swizzle(position));
    const auto copy = [&](__nv_bfloat16* cache, const __nv_bfloat16* from) {
#pragma unroll
      for (uint32_t part = 0; part < P::PARTS; ++part) {
        if (part && part * HOT_HEAD_DIM + 4 * lane >= dim) break;
        *reinterpret_cast<uint2*>(cache + at + part * HOT_HEAD_DIM) =
            reinterpret_cast<const uint2*>(from + part * HOT_HEAD_DIM)[lane];
      }
    };
    copy(p.k_cache(), p.new_k(row));
    copy(p.v_cache(), p.new_v(row));
  }
}

}  // namespace attention
}  // namespace distmk
