// Attention of a wide iteration on the host (distmk/tasks/wide_attention.py): the append to the KV cache, and causal
// attention of blocks of rows, both products of which are those of panels.h, with an online softmax in float32.
#include <algorithm>
#include <cmath>

#include "host/bodies/head_rows.h"
#include "host/bodies/panels.h"
#include "host/bodies/wide_shares.h"
#include "runtime/splits.h"

namespace distmk {

namespace {

struct HeadTag;
struct PanelTag;
struct WorkTag;

constexpr uint32_t KV_BLOCK = 64;   // positions whose scores are held at once
constexpr uint32_t ROW_BLOCK = 48;  // rows of a run at most that share packed keys and values

// Where a cache has the head of a position.
template <class Args>
uint64_t cache_index(const Context& context, const Args& args, uint32_t slot, uint32_t kv_head, uint32_t position) {
  const int32_t* pages = context.at<int32_t>(args.page_table) + uint64_t{slot} * args.max_pages;
  const auto page = static_cast<uint64_t>(pages[position / args.page_size]);
  return ((page * args.num_kv + kv_head) * args.page_size + position % args.page_size) * args.head_dim;
}

void append_row(const Context& context, const WideAppendArgs& args, uint32_t row, const WideRow& found) {
  const uint32_t n = args.head_dim;
  float* x = simd::scratch<HeadTag>(n);
  const float* rope = context.at<float>(args.rope) + uint64_t{found.position} * n;
  const uint16_t* in = context.at<uint16_t>(args.qkv) + uint64_t{row} * args.qkv_stride;
  const auto rotate = [&](uint64_t norm) {
    simd::from_bf16(x, in, n);
    in += n;
    if (norm) rms_norm(x, context.at<float>(norm), args.eps, n);
    apply_rope(x, rope, n);
  };
  uint16_t* q = context.at<uint16_t>(args.q) + uint64_t{row} * args.q_stride;
  for (uint32_t head = 0; head < args.num_q; ++head, q += n) {
    rotate(args.q_norm);
    simd::to_bf16(q, x, n);
  }
  const auto cached = [&](uint64_t cache, uint32_t head) {
    return context.at<uint16_t>(cache) + cache_index(context, args, found.slot, head, found.position);
  };
  for (uint32_t head = 0; head < args.num_kv; ++head) {
    rotate(args.k_norm);
    simd::to_bf16(cached(args.k_cache, head), x, n);
  }
  for (uint32_t head = 0; head < args.num_kv; ++head, in += n)
    memcpy(cached(args.v_cache, head), in, n * sizeof(uint16_t));
}

// A block of rows of a run and a KV head.
struct AttentionBlock {
  BatchRun run;
  Range rows;  // of the run
  uint32_t kv_head;

  // Positions that its rows see.
  uint32_t begin(uint32_t window) const { return first_seen(window, end() - (rows.end - rows.begin)); }
  uint32_t end() const { return static_cast<uint32_t>(run.kv_len - run.num_rows) + rows.end; }
};

// Calls `visit` with each block of the iteration and what it costs, up to a factor.
template <class Visit>
void for_each_block(const WideBatch& batch, uint32_t num_runs, const WideAttentionArgs& args, const Visit& visit) {
  constexpr uint64_t PACKING = 8;  // keys and values, in rows of a query head
  for (uint32_t index = 0; index < num_runs; ++index) {
    const BatchRun& run = batch.runs[index];
    const auto num_rows = static_cast<uint32_t>(run.num_rows);
    const uint32_t num_blocks = (num_rows + ROW_BLOCK - 1) / ROW_BLOCK;
    for (uint32_t block = 0; block < num_blocks; ++block) {
      const Range rows = share(num_rows, block, num_blocks);
      for (uint32_t kv_head = 0; kv_head < args.num_kv; ++kv_head) {
        const AttentionBlock found{run, rows, kv_head};
        const uint64_t num_positions = found.end() - found.begin(args.window);
        visit(found, num_positions * ((rows.end - rows.begin) * args.group + PACKING));
      }
    }
  }
}

// Of a row's softmax: the running maximum, and the sum of the weights in as many parts as a vector has lanes.
struct RowSums {
  float max = -INFINITY;
  float lanes[wide::LANES] = {};
};

class WideAttentionBlock {
 public:
  WideAttentionBlock(const Context& context, const WideAttentionArgs& args, const AttentionBlock& block);
  void run();

 private:
  const Context& context_;
  const WideAttentionArgs& args_;
  const AttentionBlock& block_;
  Range heads_;  // query heads of this rank that use the KV head
  uint32_t num_rows_, head_dim_;
  uint32_t padded_dim_;      // elements of a row of the sums: whole panels
  uint32_t first_row_;       // of the iteration
  uint32_t first_position_;  // of the first row

  // Keys, in panels of positions; values, in panels of elements.
  uint32_t *keys_, *values_;
  // Of a head: scores [rows, KV_BLOCK], and the weights that the softmax makes of them, bf16.
  float* scores_;
  uint16_t* weights_;
  // Of all heads: unnormalized output [head, row, padded_dim], and the sums of every row.
  float* output_;
  RowSums* sums_;

  uint64_t key_words() const { return panels::num_words(head_dim_); }
  uint64_t value_words() const { return panels::num_words(KV_BLOCK); }
  // Of `count` positions from `begin` on, those that the row at `position` sees.
  Range visible_in(uint32_t position, uint32_t begin, uint32_t count) const {
    const uint32_t first = first_seen(args_.window, position);
    return {first > begin ? first - begin : 0, position >= begin ? std::min(position + 1 - begin, count) : 0};
  }
  void pack(uint32_t begin, uint32_t count) const;
  void multiply_qk(uint32_t head, uint32_t count) const;
  void softmax_row(uint32_t row, float* output, RowSums& sums, Range visible) const;
  void write(uint32_t head) const;
};

WideAttentionBlock::WideAttentionBlock(const Context& context, const WideAttentionArgs& args,
                                       const AttentionBlock& block)
    : context_(context),
      args_(args),
      block_(block),
      num_rows_(block.rows.end - block.rows.begin),
      head_dim_(args.head_dim),
      padded_dim_((args.head_dim + panels::COLS - 1) / panels::COLS * panels::COLS),
      first_row_(static_cast<uint32_t>(block.run.row_begin) + block.rows.begin),
      first_position_(block.end() - num_rows_) {
  const uint32_t model_head = (args.kv_begin + block.kv_head) * args.group;
  const uint32_t past = model_head + args.group;
  heads_.begin = model_head > args.q_begin ? model_head - args.q_begin : 0;
  heads_.end = std::max(past > args.q_begin ? std::min(past - args.q_begin, args.num_q) : 0, heads_.begin);
  const uint64_t num_queries = uint64_t{heads_.end - heads_.begin} * num_rows_;
  keys_ = reinterpret_cast<uint32_t*>(
      simd::scratch<PanelTag>(KV_BLOCK / panels::COLS * key_words() + padded_dim_ / panels::COLS * value_words()));
  values_ = keys_ + KV_BLOCK / panels::COLS * key_words();
  constexpr uint64_t HEAD = ROW_BLOCK * KV_BLOCK * 3 / 2, ROW_FLOATS = sizeof(RowSums) / sizeof(float);
  scores_ = simd::scratch<WorkTag>(HEAD + num_queries * (padded_dim_ + ROW_FLOATS));
  weights_ = reinterpret_cast<uint16_t*>(scores_ + ROW_BLOCK * KV_BLOCK);
  output_ = scores_ + HEAD;
  sums_ = reinterpret_cast<RowSums*>(output_ + num_queries * padded_dim_);
  std::fill_n(output_, num_queries * padded_dim_, 0.0f);
  std::fill_n(sums_, num_queries, RowSums{});
}

// Keys and values of `count` positions from `begin` on.
void WideAttentionBlock::pack(uint32_t begin, uint32_t count) const {
  const uint16_t *keys[KV_BLOCK] = {}, *values[KV_BLOCK];
  const auto slot = static_cast<uint32_t>(block_.run.slot);
  for (uint32_t i = 0; i < count;) {  // page by page, in which positions lie one after another
    const uint32_t page_end = std::min(count, i + args_.page_size - (begin + i) % args_.page_size);
    const uint64_t at = cache_index(context_, args_, slot, block_.kv_head, begin + i);
    const uint16_t *key = context_.at<uint16_t>(args_.k_cache) + at, *value = context_.at<uint16_t>(args_.v_cache) + at;
    for (; i < page_end; ++i, key += head_dim_, value += head_dim_) {
      keys[i] = key;
      values[i] = value;
    }
  }
  for (uint32_t i = 0; i < count; i += panels::COLS)
    panels::pack(keys_ + i / panels::COLS * key_words(), keys + i, head_dim_);
  for (uint32_t d = 0; d < head_dim_; d += panels::COLS) {
    panels::pack_columns(values_ + d / panels::COLS * value_words(), values, count,
                         std::min(head_dim_ - d, panels::COLS));
    for (uint32_t i = 0; i < count; ++i) values[i] += panels::COLS;
  }
}

void WideAttentionBlock::multiply_qk(uint32_t head, uint32_t count) const {
  const uint16_t* q =
      context_.at<uint16_t>(args_.q) + uint64_t{first_row_} * args_.q_stride + uint64_t{head} * head_dim_;
  for (uint32_t i = 0; i < count; i += panels::COLS)
    panels::multiply(keys_ + i / panels::COLS * key_words(), head_dim_, q, args_.q_stride, num_rows_, scores_ + i,
                     KV_BLOCK);
}

// Online softmax step (runtime/log_sum_exp.h): the scores of the positions that a row sees become weights relative to
// the running maximum, those of others zero.
void WideAttentionBlock::softmax_row(uint32_t row, float* output, RowSums& sums, Range visible) const {
  using namespace wide;
  constexpr uint32_t COUNT = KV_BLOCK / LANES;
  float* scores = scores_ + row * KV_BLOCK;
  uint16_t* weights = weights_ + row * KV_BLOCK;
  if (visible.begin >= visible.end) return void(std::fill_n(weights, KV_BLOCK, uint16_t{0}));
  float scale = args_.scale;
  if (args_.softcap) {
    for (uint32_t i = 0; i < COUNT; ++i)
      store(scores + i * LANES, capped(load(scores + i * LANES) * scale, args_.softcap, exp_of));
    scale = 1.0f;
  }
  if (visible.begin) std::fill(scores, scores + visible.begin, -INFINITY);
  if (visible.end < KV_BLOCK) std::fill(scores + visible.end, scores + KV_BLOCK, -INFINITY);
  Vec best = load(scores);
  for (uint32_t i = 1; i < COUNT; ++i) best = max_of(best, load(scores + i * LANES));
  const float block_max = max_of(best) * scale;
  if (block_max > sums.max) {  // seldom, but in the first blocks
    const float factor = std::exp(sums.max - block_max);
    sums.max = block_max;
    for (float& sum : sums.lanes) sum *= factor;
    for (uint32_t d = 0; d < padded_dim_; d += LANES) store(output + d, load(output + d) * factor);
  }
  Vec sum = load(sums.lanes);
  for (uint32_t i = 0; i < COUNT; ++i) {
    const Vec weight = exp_of(add_product(Vec{} - sums.max, load(scores + i * LANES), Vec{} + scale));
    normal_to_bf16(weights + i * LANES, weight);
    sum += weight;
  }
  store(sums.lanes, sum);
}

void WideAttentionBlock::run() {
  if (heads_.begin == heads_.end) return;
  const uint32_t end = block_.end();
  for (uint32_t begin = block_.begin(args_.window) / KV_BLOCK * KV_BLOCK; begin < end; begin += KV_BLOCK) {
    const uint32_t count = std::min(KV_BLOCK, end - begin);
    pack(begin, count);
    for (uint32_t head = heads_.begin; head < heads_.end; ++head) {
      const uint64_t first = uint64_t{head - heads_.begin} * num_rows_;
      float* output = output_ + first * padded_dim_;
      multiply_qk(head, count);
      for (uint32_t row = 0; row < num_rows_; ++row) {
        softmax_row(row, output + uint64_t{row} * padded_dim_, sums_[first + row],
                    visible_in(first_position_ + row, begin, count));
      }
      for (uint32_t d = 0; d < padded_dim_; d += panels::COLS)
        panels::multiply(values_ + d / panels::COLS * value_words(), count, weights_, KV_BLOCK, num_rows_, output + d,
                         padded_dim_, true);
    }
  }
  for (uint32_t head = heads_.begin; head < heads_.end; ++head) write(head);
}

void WideAttentionBlock::write(uint32_t head) const {
  auto* out = context_.at<uint16_t>(args_.out);
  for (uint32_t row = 0; row < num_rows_; ++row) {
    const uint64_t query = uint64_t{head - heads_.begin} * num_rows_ + row;
    const float* output = output_ + query * padded_dim_;
    const float scale = 1.0f / wide::sum_of(wide::load(sums_[query].lanes));
    for (uint32_t d = 0; d < head_dim_; ++d) {
      const uint64_t at =
          activation_offset(first_row_ + row, head * head_dim_ + d, args_.num_q * head_dim_, args_.tiled);
      out[at] = simd::to_bf16(output[d] * scale);
    }
  }
}

}  // namespace

void body_wide_append(Context& context, const WideAppendArgs& args) {
  const Batch& batch = *context.batch(args.batch);
  const WideBatch& runs = wide_batch(context, args.batch);
  const uint32_t shares = num_shares(context);
  run_shares(context, shares, [&](uint32_t index) {
    const Range rows = share(batch.num_wide_rows, index, shares);
    for (uint32_t row = rows.begin; row < rows.end; ++row)
      append_row(context, args, row, wide_row(runs, batch.num_wide_runs, row));
  });
}

// A worker has consecutive blocks that cost as much as those of the others.
void body_wide_attention(Context& context, const WideAttentionArgs& args) {
  const WideBatch& batch = wide_batch(context, args.batch);
  const uint32_t num_runs = context.batch(args.batch)->num_wide_runs, shares = num_shares(context);
  uint64_t total = 0;
  for_each_block(batch, num_runs, args, [&](const AttentionBlock&, uint64_t cost) { total += cost; });
  run_shares(context, shares, [&](uint32_t index) {
    uint64_t before = 0;
    for_each_block(batch, num_runs, args, [&](const AttentionBlock& block, uint64_t cost) {
      if ((before + cost / 2) * shares / total == index) WideAttentionBlock(context, args, block).run();
      before += cost;
    });
  });
}

}  // namespace distmk
