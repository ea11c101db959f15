// Split-KV attention on the host. An instance is a run's rows x the query heads of one KV head x one split of the
// positions. Partials have the same layout on GPUs.
#include "host/bodies/attention_loop.h"
#include "host/bodies/matmul.h"
#include "host/bodies/weighted_values.h"
#include "runtime/splits.h"

namespace distmk {

namespace {

const float* qkv_of(const Context& context, const AttentionArgs& args, const BatchRun& run, uint32_t row) {
  return context.at<float>(args.qkv) + (static_cast<uint32_t>(run.row_begin) + row) * uint64_t{args.qkv_stride};
}

// Products for few queries, all together and in float32. Keys and values are read once, straight from the cache.
class FewQueries {
 public:
  using Args = AttentionArgs;
  using Weight = float;
  static constexpr bool EVEN_FIRST = true;

  FewQueries(const Context& context, const AttentionArgs& args, const QueryBlock& block)
      : head_dim_(args.head_dim),
        queries_(PackedRows::in_scratch<QueryTag>(block.num_queries(), args.head_dim, Elements::FLOAT32)),
        score_rows_(reinterpret_cast<float**>(simd::scratch<RowsTag>(group_size() * sizeof(float*) / sizeof(float)))) {
    const Heads<AttentionArgs> heads(context, args);
    for (uint32_t i = 0; i < group_size(); ++i) {
      const uint32_t row = block.row_of(i);
      const float* query = qkv_of(context, args, block.run, row) + uint64_t{block.head_of(i)} * head_dim_;
      queries_.set(i, heads.query(query, block.position_of(row)));
    }
    queries_.finish();
  }
  uint32_t group_size() const { return queries_.num_rows(); }
  void load(const uint16_t* const* keys, const uint16_t* const* values, uint32_t count) {
    keys_ = keys, values_ = values, count_ = count;
  }
  // Keys of a page are contiguous, like the rows of a weight.
  void multiply_qk(uint32_t, float* scores) const {
    for (uint32_t q = 0; q < group_size(); ++q) score_rows_[q] = scores + q * KV_BLOCK;
    for (uint32_t done = 0, n; done < count_; done += n) {
      for (n = 1; done + n < count_ && keys_[done + n] == keys_[done] + n * head_dim_;) ++n;
      matmul(keys_[done], n, queries_, score_rows_, done);
    }
  }
  void multiply_pv(const float* weights, float* output, uint32_t stride) const {
    simd::add_values<KV_BLOCK>(output, stride, head_dim_, weights, group_size(), values_, count_);
  }

 private:
  struct QueryTag;
  struct RowsTag;
  uint32_t head_dim_;
  PackedRows queries_;
  float** score_rows_;
  const uint16_t *const *keys_, *const *values_;
  uint32_t count_;
};

// One instance of the task.
class AttentionTask {
 public:
  AttentionTask(const Context& context, const AttentionArgs& args, uint32_t index)
      : context_(context),
        args_(args),
        instance_(attention_instance(args, *context.batch(args.batch), index)),
        run_(context.batch(args.batch)->runs[instance_.run]),
        block_(args, run_, instance_.kv_head, {0, static_cast<uint32_t>(run_.num_rows)}) {
    const uint32_t end = split_begin(args, run_, instance_.split + 1, instance_.num_splits);
    block_.positions = {split_begin(args, run_, instance_.split, instance_.num_splits),
                        std::min(end, static_cast<uint32_t>(run_.kv_len))};
  }
  void run() const {
    append_new_kv();
    reset_fused_partials();
    if (!block_.num_queries()) return;
    AttentionLoop<FewQueries> loop(context_, args_, block_);
    loop.run();
    const bool is_fused = fuses_combine(args_, context_.batch(args_.batch)->num_rows, run_);
    for (uint32_t q = 0; q < block_.num_queries(); ++q)
      is_fused ? write_fused_partial(q, loop.softmax(q), loop.output(q))
               : write_partial(q, loop.softmax(q), loop.output(q));
  }

 private:
  const Context& context_;
  const AttentionArgs& args_;
  const AttentionInstance instance_;
  const BatchRun run_;
  QueryBlock block_;

  // Stores K and V of the split's new positions to the cache first. All K and V are then read from the cache, rounded
  // to bf16 as in later iterations.
  void append_new_kv() const {
    const uint64_t n = args_.head_dim;
    const uint32_t first_new = block_.position_of(0);
    const Heads<AttentionArgs> heads(context_, args_);
    for (uint32_t at = std::max(block_.positions.begin, first_new); at < block_.positions.end; ++at) {
      const float* key = qkv_of(context_, args_, run_, at - first_new) + (args_.num_q + instance_.kv_head) * n;
      heads.append(run_.slot, instance_.kv_head, at, key, key + args_.num_kv * n);
    }
  }

  // Partials are f32 [q head, slice, row, split, PARTIAL_FLOATS]: maximum, sum, elements.
  void write_partial(uint32_t query, const LogSumExp<BaseE>& softmax, const float* output) const {
    const uint32_t slices = ceil_div(args_.head_dim, COMBINE_SLICE),
                   row = static_cast<uint32_t>(run_.row_begin) + block_.row_of(query);
    for (uint32_t slice = 0; slice < slices; ++slice) {
      float* out = context_.at<float>(args_.partials) +
                   partial_of_slice(block_.head_of(query) * slices + slice, row, instance_.split, args_.max_kv_splits);
      out[0] = softmax.max;
      out[1] = softmax.sum;
      const uint32_t begin = slice * COMBINE_SLICE;
      memcpy(out + PARTIAL_HEADER_FLOATS, output + begin,
             std::min(args_.head_dim - begin, COMBINE_SLICE) * sizeof(float));
    }
  }

  // Normalized partials of a batch-1 row are bf16 [q head, split, FUSED_PARTIAL_HEADER + head_dim]: the f32
  // log-sum-exp, then o / l. Zeros are written as -0 (Lamport).
  void write_fused_partial(uint32_t query, const LogSumExp<BaseE>& softmax, const float* output) const {
    uint16_t* out = context_.at<uint16_t>(args_.fused_partials) +
                    fused_partial_begin(block_.head_of(query), instance_.split, args_.max_kv_splits, args_.head_dim);
    const float lse = softmax.log(), scale = normalizer(softmax.sum), header = lse == 0.0f ? -0.0f : lse;
    memcpy(out, &header, sizeof header);
    for (uint32_t d = 0; d < args_.head_dim; ++d) {
      const uint16_t bits = simd::to_bf16(output[d] * scale);
      out[FUSED_PARTIAL_HEADER + d] = bits ? bits : 0x8000;
    }
  }

  // Zeros the fused partials of an earlier task (rotating Lamport buffers), whatever number of splits it had. The
  // splits of this task share the work.
  void reset_fused_partials() const {
    if (!args_.lamport_reset || instance_.run != 0) return;
    for (uint32_t head = block_.heads.begin; head < block_.heads.end; ++head)
      for (uint32_t split = instance_.split; split < max_fused_splits(args_.max_kv_splits);
           split += instance_.num_splits)
        simd::clear(context_.at<uint16_t>(args_.lamport_reset) +
                        fused_partial_begin(head, split, args_.max_kv_splits, args_.head_dim),
                    1, 0, FUSED_PARTIAL_HEADER + args_.head_dim);
  }
};

}  // namespace

uint32_t num_work_items(const Context& context, const AttentionArgs& args) {
  return num_attention_instances(args, *context.batch(args.batch));
}

void body_attention(Context& context, const AttentionArgs& args) {
  run_shares(context, num_work_items(context, args),
             [&](uint32_t instance) { AttentionTask(context, args, instance).run(); });
}
void body_general_attention(Context& context, const AttentionArgs& args) { body_attention(context, args); }

}  // namespace distmk
