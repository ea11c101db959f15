// Attention on the host: O = softmax(scale Q K^T) V for a block of queries and one KV head, over blocks of positions
// with an online softmax in float32 (runtime/log_sum_exp.h). Both products are a parameter: few queries multiply
// straight from the cache, many queries multiply packed keys and values.
#pragma once
#include <algorithm>

#include "host/bodies/heads.h"
#include "host/bodies/shares.h"
#include "runtime/log_sum_exp.h"
#include "runtime/scoring.h"

namespace distmk {

constexpr uint32_t KV_BLOCK = 64;  // positions whose scores are in memory at once

// Rows of a run and the query heads that share one KV head, against a range of positions. A query's number is head *
// number of rows + row, counted from the block's first head and row.
struct QueryBlock {
  BatchRun run;
  uint32_t kv_head;
  Range rows, heads;  // rows of the run; heads of this rank
  Range positions;

  template <class Args>
  QueryBlock(const Args& args, const BatchRun& of_run, uint32_t of_kv_head, Range of_rows)
      : run(of_run), kv_head(of_kv_head), rows(of_rows) {
    const QueryHeads<> found(args, kv_head);
    heads = {found.first, found.first + found.num};
  }
  uint32_t num_rows() const { return rows.end - rows.begin; }
  uint32_t num_queries() const { return (heads.end - heads.begin) * num_rows(); }
  uint32_t row_of(uint32_t query) const { return rows.begin + query % num_rows(); }
  uint32_t head_of(uint32_t query) const { return heads.begin + query / num_rows(); }
  uint32_t position_of(uint32_t row) const { return static_cast<uint32_t>(run.kv_len - run.num_rows) + row; }
};

// Softmax state of a row: the running maximum, and the sum of the weights in as many parts as a vector has lanes.
struct RowSoftmax {
  float max = -INFINITY;
  float lanes[simd::LANES] = {};

  LogSumExp<BaseE> total() const { return {max, simd::sum_of(simd::load(lanes))}; }
};

// `Products` multiplies group_size() queries together; Args are the task's arguments, Weight is the type of its softmax
// weights. With EVEN_FIRST, the even elements of each whole simd::BLOCK of the output come first until the end.
template <class Products>
class AttentionLoop {
 public:
  using Args = typename Products::Args;
  using Weight = typename Products::Weight;

  AttentionLoop(const Context& context, const Args& args, const QueryBlock& block)
      : context_(context),
        args_(args),
        block_(block),
        products_(context, args, block),
        padded_dim_(ceil_div(args.head_dim, simd::BLOCK) * simd::BLOCK) {
    struct WorkTag;
    const uint64_t group = products_.group_size(), num_queries = block.num_queries();
    constexpr uint64_t SOFTMAX_FLOATS = sizeof(RowSoftmax) / sizeof(float);
    scores_ = simd::scratch<WorkTag>(2 * group * KV_BLOCK + num_queries * (padded_dim_ + SOFTMAX_FLOATS));
    weights_ = reinterpret_cast<Weight*>(scores_ + group * KV_BLOCK);
    output_ = scores_ + 2 * group * KV_BLOCK;
    softmax_ = reinterpret_cast<RowSoftmax*>(output_ + num_queries * padded_dim_);
    std::fill_n(output_, num_queries * padded_dim_, 0.0f);
    std::fill_n(softmax_, num_queries, RowSoftmax{});
  }

  void run() {
    const Range all = block_.positions;
    for (uint32_t begin = all.begin; begin < all.end; begin += KV_BLOCK) {
      const uint32_t count = std::min(KV_BLOCK, all.end - begin), group = products_.group_size();
      const uint16_t *keys[KV_BLOCK] = {}, *values[KV_BLOCK] = {};
      for (uint32_t i = 0; i < count; ++i) {
        const uint64_t at = cache_index(context_, args_, block_.run.slot, block_.kv_head, begin + i);
        keys[i] = context_.at<uint16_t>(args_.k_cache) + at;
        values[i] = context_.at<uint16_t>(args_.v_cache) + at;
      }
      products_.load(keys, values, count);
      for (uint32_t first = 0; first < block_.num_queries(); first += group) {
        products_.multiply_qk(first, scores_);
        for (uint32_t i = 0, row = 0; i < group; ++i, row = row + 1 == block_.num_rows() ? 0 : row + 1)
          softmax_row(first + i, i, block_.position_of(block_.rows.begin + row), begin, count);
        products_.multiply_pv(weights_, output_ + uint64_t{first} * padded_dim_, padded_dim_);
      }
    }
    for (uint64_t at = 0; Products::EVEN_FIRST && at < uint64_t{block_.num_queries()} * padded_dim_; at += simd::BLOCK)
      if (at % padded_dim_ + simd::BLOCK <= args_.head_dim) simd::join_block(output_ + at);
  }
  const float* output(uint32_t query) const { return output_ + uint64_t{query} * padded_dim_; }
  LogSumExp<BaseE> softmax(uint32_t query) const { return softmax_[query].total(); }

 private:
  const Context& context_;
  const Args& args_;
  const QueryBlock& block_;
  Products products_;
  uint32_t padded_dim_;

  float* scores_;    // [group_size(), KV_BLOCK]
  Weight* weights_;  // [group_size(), KV_BLOCK], after the softmax
  float* output_;    // [query, padded_dim], unnormalized
  RowSoftmax* softmax_;

  // Turns the scores of `count` positions from `begin` on into weights relative to the running maximum. The query sees
  // the last `window` positions up to `position`; the weights of all others are zero.
  void softmax_row(uint32_t query, uint32_t in_group, uint32_t position, uint32_t begin, uint32_t count) {
    using namespace simd;
    float* scores = scores_ + in_group * KV_BLOCK;
    Weight* weights = weights_ + in_group * KV_BLOCK;
    RowSoftmax& softmax = softmax_[query];
    const uint32_t first = first_seen(args_.window, position);
    const uint32_t visible_begin = first > begin ? first - begin : 0,
                   visible_end = position >= begin ? std::min(position + 1 - begin, count) : 0;
    if (visible_begin >= visible_end) return void(std::fill_n(weights, KV_BLOCK, Weight{}));
    float scale = args_.scores.scale;
    if (!are_only_scaled(args_.scores)) {
      for (uint32_t i = 0; i < KV_BLOCK; i += LANES)
        store(scores + i, vary_score<VectorMath>(load(scores + i) * scale, args_.scores));
      scale = 1.0f;
    }
    if (visible_begin) std::fill(scores, scores + visible_begin, -INFINITY);
    if (visible_end < KV_BLOCK) std::fill(scores + visible_end, scores + KV_BLOCK, -INFINITY);
    Vec best = load(scores);
    for (uint32_t i = LANES; i < KV_BLOCK; i += LANES) best = max_of(best, load(scores + i));
    const float block_max = max_of(best) * scale;
    if (block_max > softmax.max) {  // rare after the first blocks
      const float factor = combine_weight(softmax.max, block_max);
      softmax.max = block_max;
      for (float& sum : softmax.lanes) sum *= factor;
      float* output = output_ + uint64_t{query} * padded_dim_;
      for (uint32_t d = 0; d < padded_dim_; d += LANES) store(output + d, load(output + d) * factor);
    }
    Vec sum = load(softmax.lanes);
    for (uint32_t i = 0; i < KV_BLOCK; i += LANES) {
      const Vec weight = exp_of(add_product(splat(-softmax.max), load(scores + i), splat(scale)));
      store_weights(weights + i, weight);
      sum += weight;
    }
    store(softmax.lanes, sum);
  }
  static void store_weights(float* to, simd::Vec weights) { simd::store(to, weights); }
  static void store_weights(uint16_t* to, simd::Vec weights) { simd::store(to, simd::operand_to_bf16(weights)); }
};

}  // namespace distmk
