// Attention of a job iteration on the host (distmk/tasks/attention_jobs.py): the append to the KV cache, and causal
// attention of blocks of rows.
#include "host/bodies/attention_loop.h"
#include "host/bodies/panels.h"
#include "runtime/job_batch.h"

namespace distmk {

namespace {

constexpr uint32_t ROW_BLOCK = 48;  // most rows of a run that share packed keys and values

void append_row(const Context& context, const AppendKvArgs& args, const Heads<AppendKvArgs>& heads, uint32_t row,
                const JobRow& found) {
  const uint64_t n = args.head_dim;
  const uint16_t* in = context.at<uint16_t>(args.qkv) + uint64_t{row} * args.qkv_stride;
  uint16_t* q = context.at<uint16_t>(args.q) + uint64_t{row} * args.q_stride;
  for (uint32_t head = 0; head < args.num_q; ++head)
    simd::to_bf16(q + head * n, heads.query(in + head * n, found.position), args.head_dim);
  const uint16_t *keys = in + args.num_q * n, *values = keys + args.num_kv * n;
  for (uint32_t head = 0; head < args.num_kv; ++head)
    heads.append(static_cast<int32_t>(found.slot), head, found.position, keys + head * n, values + head * n);
}

// Products for many queries: a head's queries together, by panels of keys and of values. Weights are rounded to bf16.
class ManyQueries {
 public:
  using Args = AttentionJobsArgs;
  using Weight = uint16_t;
  static constexpr bool EVEN_FIRST = false;

  ManyQueries(const Context& context, const AttentionJobsArgs& args, const QueryBlock& block)
      : args_(args),
        num_rows_(block.num_rows()),
        queries_(context.at<uint16_t>(args.q) +
                 uint64_t{static_cast<uint32_t>(block.run.row_begin) + block.rows.begin} * args.q_stride +
                 uint64_t{block.heads.begin} * args.head_dim),
        keys_(reinterpret_cast<uint32_t*>(
            simd::scratch<PanelTag>(KV_BLOCK / panels::COLS * key_words() + num_value_panels() * value_words()))),
        values_(keys_ + KV_BLOCK / panels::COLS * key_words()) {}
  uint32_t group_size() const { return num_rows_; }
  void load(const uint16_t* const* keys, const uint16_t** values, uint32_t count) {
    count_ = count;
    for (uint32_t i = 0; i < count; i += panels::COLS)
      panels::pack(keys_ + i / panels::COLS * key_words(), keys + i, args_.head_dim);
    for (uint32_t panel = 0; panel < num_value_panels(); ++panel) {
      panels::pack_columns(values_ + panel * value_words(), values, count,
                           std::min(args_.head_dim - panel * panels::COLS, panels::COLS));
      for (uint32_t i = 0; i < count; ++i) values[i] += panels::COLS;
    }
  }
  void multiply_qk(uint32_t first, float* scores) const {
    const uint16_t* q = queries_ + uint64_t{first / num_rows_} * args_.head_dim;
    for (uint32_t i = 0; i < count_; i += panels::COLS)
      panels::multiply(keys_ + i / panels::COLS * key_words(), args_.head_dim, q, args_.q_stride, num_rows_, scores + i,
                       KV_BLOCK);
  }
  void multiply_pv(const uint16_t* weights, float* output, uint32_t stride) const {
    for (uint32_t panel = 0; panel < num_value_panels(); ++panel)
      panels::multiply(values_ + panel * value_words(), count_, weights, KV_BLOCK, num_rows_,
                       output + panel * panels::COLS, stride, true);
  }

 private:
  struct PanelTag;
  const AttentionJobsArgs& args_;
  uint32_t num_rows_, count_ = 0;
  const uint16_t* queries_;  // of the block's first row and head
  uint32_t *keys_, *values_;

  uint64_t key_words() const { return panels::num_words(args_.head_dim); }
  uint64_t value_words() const { return panels::num_words(KV_BLOCK); }
  uint32_t num_value_panels() const { return ceil_div(args_.head_dim, panels::COLS); }
};

// Calls visit(block, cost) for each block of the iteration. The cost has no unit.
template <class Visit>
void for_each_block(const JobBatch& batch, uint32_t num_runs, const AttentionJobsArgs& args, const Visit& visit) {
  constexpr uint64_t PACKING = 8;  // cost of packing keys and values, in rows of a query head
  for (uint32_t index = 0; index < num_runs; ++index) {
    const BatchRun& run = batch.runs[index];
    const auto num_rows = static_cast<uint32_t>(run.num_rows);
    const uint32_t num_blocks = ceil_div(num_rows, ROW_BLOCK);
    for (uint32_t i = 0; i < num_blocks; ++i)
      for (uint32_t kv_head = 0; kv_head < args.num_kv; ++kv_head) {
        QueryBlock block(args, run, kv_head, share(num_rows, i, num_blocks));
        block.positions = {first_seen(args.window, block.position_of(block.rows.begin)),
                           block.position_of(block.rows.end)};
        const uint64_t num_positions = block.positions.end - block.positions.begin;
        block.positions.begin = block.positions.begin / KV_BLOCK * KV_BLOCK;
        visit(block, num_positions * (block.num_rows() * args.group + PACKING));
      }
  }
}

void attend(const Context& context, const AttentionJobsArgs& args, const QueryBlock& block) {
  if (!block.num_queries()) return;
  AttentionLoop<ManyQueries> loop(context, args, block);
  loop.run();
  auto* out = context.at<uint16_t>(args.out);
  for (uint32_t q = 0; q < block.num_queries(); ++q) {
    const uint32_t row = static_cast<uint32_t>(block.run.row_begin) + block.row_of(q);
    const float scale = normalizer(loop.softmax(q).sum), *output = loop.output(q);
    for (uint32_t d = 0; d < args.head_dim; ++d)
      out[activation_offset(row, block.head_of(q) * args.head_dim + d, args.num_q * args.head_dim, args.tiled)] =
          simd::to_bf16(output[d] * scale);
  }
}

}  // namespace

void body_append_kv(Context& context, const AppendKvArgs& args) {
  const Batch& batch = *context.batch(args.batch);
  const JobBatch& runs = job_batch(context, args.batch);
  const Heads<AppendKvArgs> heads(context, args);
  run_rows(context, batch.num_job_rows,
           [&](uint32_t row) { append_row(context, args, heads, row, job_row(runs, batch.num_job_runs, row)); });
}

// Each worker has consecutive blocks, with about the same cost in sum.
void body_attention_jobs(Context& context, const AttentionJobsArgs& args) {
  const JobBatch& batch = job_batch(context, args.batch);
  const uint32_t num_runs = context.batch(args.batch)->num_job_runs, shares = num_shares(context);
  uint64_t total = 0;
  for_each_block(batch, num_runs, args, [&](const QueryBlock&, uint64_t cost) { total += cost; });
  run_shares(context, shares, [&](uint32_t index) {
    uint64_t before = 0;
    for_each_block(batch, num_runs, args, [&](const QueryBlock& block, uint64_t cost) {
      if ((before + cost / 2) * shares / total == index) attend(context, args, block);
      before += cost;
    });
  });
}

}  // namespace distmk
