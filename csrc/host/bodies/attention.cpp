// Split-KV attention on the host: O = softmax(scale Q K^T) V of one instance (a run's rows x the query heads of one
// KV head x one split of the positions), in blocks of 64 positions with an online softmax. Partials are as on the GPU.
#include <algorithm>
#include <cmath>

#include "host/bodies/head_rows.h"
#include "host/bodies/matmul.h"
#include "host/bodies/weighted_values.h"
#include "runtime/log_sum_exp.h"
#include "runtime/splits.h"

namespace distmk {

using namespace simd;

namespace {

constexpr uint32_t KV_BLOCK = 64;  // positions whose scores are held at once
constexpr uint32_t Q_TILE = 3;     // queries that share a pass over V

struct HeadTag;
struct QueryTag;
struct WorkTag;
struct RowsTag;

class AttentionTask {
 public:
  AttentionTask(const Context& context, const AttentionArgs& args, uint32_t instance);
  void run();

 private:
  const Context& context_;
  const AttentionArgs& args_;
  AttentionInstance instance_;
  BatchRun run_;
  uint32_t begin_, end_;             // positions of the split
  uint32_t first_head_, num_heads_;  // query heads of this rank that use the KV head
  uint32_t num_queries_;             // numbered row * num_heads_ + head
  uint32_t head_dim_;
  const int32_t* pages_;
  uint16_t *k_cache_, *v_cache_;

  // Of every query: scores of a KV block, which the softmax turns to weights; O, in blocks of even elements, then odd
  // ones; running maximum and sum.
  float *scores_, *acc_;
  LogSumExp<BaseE>* softmax_;
  float** score_rows_;

  uint32_t first_new() const { return static_cast<uint32_t>(run_.kv_len - run_.num_rows); }
  const float* rope(uint32_t position) const { return context_.at<float>(args_.rope) + uint64_t{position} * head_dim_; }
  const float* qkv(uint32_t row) const {
    const uint64_t stride = args_.qkv_stride;
    return context_.at<float>(args_.qkv) + (static_cast<uint32_t>(run_.row_begin) + row) * stride;
  }
  uint64_t cache_index(uint32_t position) const {
    const auto page = static_cast<uint64_t>(pages_[position / args_.page_size]);
    return ((page * args_.num_kv + instance_.kv_head) * args_.page_size + position % args_.page_size) * head_dim_;
  }

  void append_new_kv();
  PackedRows pack_queries() const;
  void multiply_qk(const PackedRows& queries, uint32_t begin, uint32_t count);
  void softmax_step(uint32_t begin, uint32_t count);
  void multiply_pv(uint32_t begin, uint32_t count);
  void write_partials() const;
  void write_fused_partials() const;
  void reset_fused_partials() const;
};

AttentionTask::AttentionTask(const Context& context, const AttentionArgs& args, uint32_t instance)
    : context_(context), args_(args), head_dim_(args.head_dim) {
  const auto& batch = *context.at<Batch>(args.batch);
  instance_ = attention_instance(args, batch, instance);
  run_ = batch.runs[instance_.run];
  begin_ = split_begin(args, run_, instance_.split, instance_.num_splits);
  end_ =
      std::min(split_begin(args, run_, instance_.split + 1, instance_.num_splits), static_cast<uint32_t>(run_.kv_len));
  const uint32_t model_head = (args.kv_begin + instance_.kv_head) * args.group;
  first_head_ = model_head > args.q_begin ? model_head - args.q_begin : 0;
  const uint32_t past = model_head + args.group > args.q_begin ? model_head + args.group - args.q_begin : 0;
  num_heads_ = std::max(std::min(past, uint32_t{args.num_q}), first_head_) - first_head_;
  num_queries_ = num_heads_ * static_cast<uint32_t>(run_.num_rows);
  pages_ = context.at<int32_t>(args.page_table) + uint64_t{static_cast<uint32_t>(run_.slot)} * args.max_pages;
  k_cache_ = context.at<uint16_t>(args.k_cache);
  v_cache_ = context.at<uint16_t>(args.v_cache);

  const uint64_t n = num_queries_;
  scores_ = scratch<WorkTag>(n * (KV_BLOCK + head_dim_ + 2));
  acc_ = scores_ + n * KV_BLOCK;
  static_assert(sizeof(*softmax_) == 2 * sizeof(float));
  softmax_ = reinterpret_cast<LogSumExp<BaseE>*>(acc_ + n * head_dim_);
  score_rows_ = reinterpret_cast<float**>(scratch<RowsTag>(n * sizeof(float*) / sizeof(float)));
  for (uint32_t q = 0; q < n; ++q) {
    score_rows_[q] = scores_ + q * KV_BLOCK;
    softmax_[q] = {};
  }
  std::fill(acc_, acc_ + n * head_dim_, 0.0f);
}

// K (normed, rotated) and V of the split's new positions go to the cache first: all K and V below are read from there,
// rounded to bf16 like those that later iterations read.
void AttentionTask::append_new_kv() {
  float* k = scratch<HeadTag>(head_dim_);
  for (uint32_t position = std::max(begin_, first_new()); position < end_; ++position) {
    const float* row = qkv(position - first_new());
    const float* k_in = row + (args_.num_q + instance_.kv_head) * uint64_t{head_dim_};
    const float* v_in = k_in + uint64_t{args_.num_kv} * head_dim_;
    copy_bytes(Team{}, k, k_in, head_dim_ * sizeof(float));
    if (args_.k_norm) rms_norm(k, context_.at<float>(args_.k_norm), args_.eps, head_dim_);
    apply_rope(k, rope(position), head_dim_);
    const uint64_t at = cache_index(position);
    to_bf16(k_cache_ + at, k, head_dim_);
    to_bf16(v_cache_ + at, v_in, head_dim_);
  }
}

PackedRows AttentionTask::pack_queries() const {
  auto packed = PackedRows::in_scratch<QueryTag>(num_queries_, head_dim_, Elements::FLOAT32);
  float* q = scratch<HeadTag>(head_dim_);
  for (uint32_t i = 0; i < num_queries_; ++i) {
    const uint32_t row = i / num_heads_, head = first_head_ + i % num_heads_;
    copy_bytes(Team{}, q, qkv(row) + uint64_t{head} * head_dim_, head_dim_ * sizeof(float));
    if (args_.q_norm) rms_norm(q, context_.at<float>(args_.q_norm), args_.eps, head_dim_);
    apply_rope(q, rope(first_new() + row), head_dim_);
    packed.set(i, q, args_.scale);
  }
  packed.finish();
  return packed;
}

// S = Q K^T of `count` positions from `begin`. The K of a page are contiguous, like rows of a weight.
void AttentionTask::multiply_qk(const PackedRows& queries, uint32_t begin, uint32_t count) {
  for (uint32_t done = 0; done < count;) {
    const uint32_t position = begin + done;
    const uint32_t n = std::min(count - done, args_.page_size - position % args_.page_size);
    matmul(k_cache_ + cache_index(position), n, queries, score_rows_, done);
    done += n;
  }
}

// Online softmax step (runtime/log_sum_exp.h): scores of `count` positions become weights relative to the running
// maximum. Mask: a row sees its own position and those before it, `window` in all.
void AttentionTask::softmax_step(uint32_t begin, uint32_t count) {
  for (uint32_t q = 0; q < num_queries_; ++q) {
    float* scores = score_rows_[q];
    const uint32_t position = first_new() + q / num_heads_, first = first_seen(args_.window, position);
    const uint32_t visible_end = position + 1 > begin ? std::min(position + 1 - begin, count) : 0;
    const uint32_t visible_begin = first > begin ? first - begin : 0;
    const uint32_t padded = (count + LANES - 1) / LANES * LANES;
    if (visible_begin >= visible_end) {
      std::fill(scores, scores + padded, 0.0f);
      continue;
    }
    if (args_.softcap)
      for (uint32_t i = 0; i < padded; i += LANES) store(scores + i, capped(load(scores + i), args_.softcap, exp_of));
    std::fill(scores, scores + visible_begin, -INFINITY);
    std::fill(scores + visible_end, scores + padded, -INFINITY);
    Vec block_max = load(scores);
    for (uint32_t i = LANES; i < padded; i += LANES) block_max = max_of(block_max, load(scores + i));
    LogSumExp<BaseE>& softmax = softmax_[q];
    const float factor = softmax.raise(max_of(block_max));
    Vec sum{};
    for (uint32_t i = 0; i < padded; i += LANES) {
      const Vec weights = exp_of(load(scores + i) - softmax.max);
      store(scores + i, weights);
      sum += weights;
    }
    softmax.sum += sum_of(sum);
    if (factor != 1.0f)
      for (uint32_t d = 0; d < head_dim_; ++d) acc_[uint64_t{q} * head_dim_ + d] *= factor;
  }
}

void AttentionTask::multiply_pv(uint32_t begin, uint32_t count) {
  const uint16_t* values[KV_BLOCK];
  for (uint32_t p = 0; p < count; ++p) values[p] = v_cache_ + cache_index(begin + p);
  for (uint32_t q = 0; q < num_queries_;) {
    float* acc = acc_ + uint64_t{q} * head_dim_;
    const uint32_t tile = std::min(num_queries_ - q, Q_TILE);
    if (tile == 1)
      add_values<1, KV_BLOCK>(acc, head_dim_, score_rows_[q], values, count);
    else if (tile == 2)
      add_values<2, KV_BLOCK>(acc, head_dim_, score_rows_[q], values, count);
    else
      add_values<3, KV_BLOCK>(acc, head_dim_, score_rows_[q], values, count);
    q += tile;
  }
}

// Partials f32 [q head, slice, row, split, PARTIAL_FLOATS]: maximum, sum, elements.
void AttentionTask::write_partials() const {
  const uint32_t slices = (head_dim_ + COMBINE_SLICE - 1) / COMBINE_SLICE;
  for (uint32_t q = 0; q < num_queries_; ++q) {
    const uint64_t head = first_head_ + q % num_heads_;
    const uint32_t row = static_cast<uint32_t>(run_.row_begin) + q / num_heads_;
    for (uint32_t slice = 0; slice < slices; ++slice) {
      float* out = context_.at<float>(args_.partials) + (head * slices + slice) * slice_floats(args_.max_splits) +
                   partial_begin(row, instance_.split, args_.max_splits);
      out[0] = softmax_[q].max;
      out[1] = softmax_[q].sum;
      const uint32_t begin = slice * COMBINE_SLICE, num_elements = std::min(head_dim_ - begin, COMBINE_SLICE);
      const float* acc = acc_ + uint64_t{q} * head_dim_ + begin;
      uint32_t d = 0;
      for (; d + BLOCK <= num_elements; d += BLOCK) join_block(out + PARTIAL_HEADER_FLOATS + d, acc + d);
      for (; d < num_elements; ++d) out[PARTIAL_HEADER_FLOATS + d] = acc[d];
    }
  }
}

// Normalized partials of a batch-1 row, bf16 [q head, split, FUSED_PARTIAL_HEADER + head_dim]: the f32 log-sum-exp,
// then o / l. Zeros are written as negative ones (Lamport).
void AttentionTask::write_fused_partials() const {
  for (uint32_t q = 0; q < num_queries_; ++q) {
    uint16_t* out = context_.at<uint16_t>(args_.fused_partials) +
                    fused_partial_begin(first_head_ + q, instance_.split, args_.max_splits, head_dim_);
    const float lse = softmax_[q].log(), scale = normalizer(softmax_[q].sum);
    const float header = lse == 0.0f ? -0.0f : lse;
    memcpy(out, &header, sizeof header);
    const float* acc = acc_ + uint64_t{q} * head_dim_;
    float* row = scratch<HeadTag>(head_dim_);
    uint32_t d = 0;
    for (; d + BLOCK <= head_dim_; d += BLOCK) join_block(row + d, acc + d);
    for (; d < head_dim_; ++d) row[d] = acc[d];
    for (d = 0; d < head_dim_; ++d) {
      const uint16_t bits = to_bf16(row[d] * scale);
      out[FUSED_PARTIAL_HEADER + d] = bits ? bits : 0x8000;
    }
  }
}

// Resets the fused partials of an earlier task (Lamport; rotating buffers), whatever number of splits it had: each
// split of this task its share of them.
void AttentionTask::reset_fused_partials() const {
  if (!args_.reset || instance_.run != 0) return;
  for (uint32_t head = first_head_; head < first_head_ + num_heads_; ++head)
    for (uint32_t split = instance_.split; split < max_fused_splits(args_.max_splits); split += instance_.num_splits)
      clear(context_.at<uint16_t>(args_.reset) + fused_partial_begin(head, split, args_.max_splits, head_dim_), 1, 0,
            FUSED_PARTIAL_HEADER + head_dim_);
}

void AttentionTask::run() {
  append_new_kv();
  reset_fused_partials();
  if (!num_queries_) return;
  const PackedRows queries = pack_queries();
  for (uint32_t begin = begin_; begin < end_; begin += KV_BLOCK) {
    const uint32_t count = std::min(KV_BLOCK, end_ - begin);
    multiply_qk(queries, begin, count);
    softmax_step(begin, count);
    multiply_pv(begin, count);
  }
  if (fuses_combine(args_, context_.at<Batch>(args_.batch)->num_rows, run_))
    write_fused_partials();
  else
    write_partials();
}

}  // namespace

uint32_t num_work_items(const Context& context, const AttentionArgs& args) {
  return num_attention_instances(args, *context.batch(args.batch));
}

void body_attention(Context& context, const AttentionArgs& args) {
  if (!context.take_assigned(num_work_items(context, args))) return;
  uint32_t instance = context.instance;
  do AttentionTask(context, args, instance).run();
  while (context.next_assigned(instance));
}
void body_general_attention(Context& context, const AttentionArgs& args) { body_attention(context, args); }

}  // namespace distmk
