// Row jobs of attention: one KV head and all queries of a short run, mostly of one decoding row. Such a job reads much
// and computes little, so its speed depends on how many bytes are in flight. Each warp takes every eighth tile of
// positions, copies it into a ring of its own and multiplies it alone. A worker's jobs form one sequence of tiles:
// copies for the next job run while the warps combine the current one.
#pragma once
#include "device/core/end_task.cuh"
#include "device/jobs/attention_plan.cuh"
#include "device/jobs/query_tile.cuh"
#include "platform/wgmma.cuh"

namespace distmk {
namespace jobs {

constexpr uint32_t ROW_TILE = 16;                      // positions of a tile
constexpr uint32_t ROW_STRIDE = NUM_WARPS * ROW_TILE;  // from a warp's tile to its next one in a job
static_assert(ROW_QUERIES == QUERIES_PER_WARP && 2 * ROW_TILE == 32, "");

// A cursor over a worker's row jobs. Each warp has its own.
class RowJobs {
 public:
  BatchRun run;
  uint32_t kv_head, num_heads, first_head;

  // Moves on to the next job. False: there is none.
  DISTMK_FN bool next() {
    const AttentionPlan& plan = attention_plan();
    const AttentionSchedule& schedule = attention_schedule();
    num_tiles_before_ += (end_ - begin_ + ROW_TILE - 1) / ROW_TILE;
    begin_ = end_ = 0;
    for (;;) {
      const uint32_t index = plan.job_of_round(round_);
      if (index >= schedule.num_jobs) return false;
      ++round_;
      if (index < schedule.num_block_jobs) continue;
      const uint32_t row_job = index - schedule.num_block_jobs, row_run = row_job / plan.args.num_kv;
      kv_head = row_job - row_run * plan.args.num_kv;
      const QueryHeads<> heads(plan.args, kv_head);
      if (!heads.num) continue;
      run = schedule.runs[schedule.num_block_runs + row_run];
      first_head = heads.first;
      num_heads = heads.num;
      end_ = static_cast<uint32_t>(run.kv_len);
      begin_ = first_seen(plan.args.window, first_new()) / ROW_TILE * ROW_TILE;
      return true;
    }
  }
  DISTMK_FN uint32_t num_queries() const { return static_cast<uint32_t>(run.num_rows) * num_heads; }
  // The first position of this warp's first tile, and the begin and end of all positions.
  DISTMK_FN uint32_t first_position() const { return begin_ + way(threadIdx.x / 32) * ROW_TILE; }
  DISTMK_FN uint32_t begin() const { return begin_; }
  DISTMK_FN uint32_t end() const { return end_; }
  // Position of the run's first row. Earlier positions are in the caches when the iteration begins.
  DISTMK_FN uint32_t first_new() const { return static_cast<uint32_t>(run.kv_len - run.num_rows); }
  // Warps take tiles in turn, continuing from one job to the next, so that all have equally much to do. Way i has tiles
  // i, i + 8, and so on. Partials are combined by way, so a job's result does not depend on the jobs before it.
  DISTMK_FN uint32_t way(uint32_t warp) const { return (warp - num_tiles_before_) % NUM_WARPS; }
  DISTMK_FN uint32_t warp_of(uint32_t way) const { return (way + num_tiles_before_) % NUM_WARPS; }

 private:
  uint32_t round_ = 0, num_tiles_before_ = 0;
  uint32_t begin_ = 0, end_ = 0;
};

// A warp's ring of tiles, with the keys and then the values of each. They are in slots of 64 columns. For ldmatrix, the
// 16-byte chunk c of row r is stored as chunk c ^ r % 8. DIM: head_dim rounded up; elements behind head_dim are zero.
template <uint32_t DIM>
struct RowRing {
  static constexpr uint32_t BYTES = 24 * 1024, ROW_BYTES = 64 * sizeof(__nv_bfloat16),
                            SLOT_BYTES = ROW_TILE * ROW_BYTES, VALUES = DIM / 64 * SLOT_BYTES, TILE_BYTES = 2 * VALUES,
                            COUNT = BYTES / TILE_BYTES;
  static_assert(!BULK_COPIES || NUM_WARPS * BYTES <= overlay_bytes(Overlay::ROW_RINGS), "");
  static_assert(ROW_QUERIES * DIM * sizeof(float) <= TILE_BYTES, "a warp leaves its accumulator in a tile's place");

  DISTMK_FN static uint32_t offset(uint32_t tile) { return threadIdx.x / 32 * BYTES + tile * TILE_BYTES; }
};

// A warp's copies of its tiles, one after another through all jobs, COUNT - 1 tiles ahead.
template <uint32_t DIM>
class RowCopies {
 public:
  using Ring = RowRing<DIM>;

  // Starts the first copies. Tiles from earlier iterations are copied before the task's inputs are there, others
  // afterwards.
  DISTMK_FN void begin(Context& context) {
    look_up();
#pragma unroll 1
    for (uint32_t i = 0; i < Ring::COUNT - 1; ++i) {
      if (is_new() && !context.inputs_ready()) return;
      copy_next();
    }
  }
  // Waits for the warp's next tile and returns its address. Also starts one more copy, over the tile that was returned
  // last.
  DISTMK_FN uint32_t await_tile() {
    await_copies<Ring::COUNT - 2>();
    __syncwarp();
    copy_next();
    return shared_address(shared().at<Overlay::ROW_RINGS>()) + free_offset();
  }
  // Offset in the stages of the place that the next copy overwrites, where the warp's latest tile lies.
  DISTMK_FN uint32_t free_offset() const { return Ring::offset(next_); }

 private:
  RowJobs job_;
  uint32_t position_ = 0;  // position of the tile to copy next; behind job_.end(), there is none
  uint32_t page_;          // page of this lane's position
  uint32_t next_ = 0;      // its place in the ring

  // The pages of two tiles of a job are looked up together, each by half a warp. They are the next tile, if it is the
  // first of two, and the warp's tile after it. Positions behind the last are looked up as the last.
  DISTMK_FN bool is_second() const { return (position_ - job_.begin()) / ROW_STRIDE % 2; }
  DISTMK_FN uint32_t own_position() const {
    const uint32_t first = is_second() ? position_ - ROW_STRIDE : position_, lane = threadIdx.x % 32;
    return min(first + lane / ROW_TILE * ROW_STRIDE + lane % ROW_TILE, job_.end() - 1);
  }
  // Whether the next tile has positions that this iteration appends.
  DISTMK_FN bool is_new() const { return position_ < job_.end() && position_ + ROW_TILE > job_.first_new(); }
  // Moves on to the next tile, and looks up its page while earlier copies are in flight.
  DISTMK_FN void look_up() {
    position_ += ROW_STRIDE;
    if (is_second() && position_ < job_.end()) return;
    while (position_ >= job_.end()) {
      const bool found = job_.next();
      position_ = job_.first_position();
      if (!found) return;
    }
    const AttentionJobsArgs& args = attention_plan().args;
    page_ = page_of(at_operand<int32_t>(args.page_table), args, static_cast<uint32_t>(job_.run.slot), own_position());
  }
  DISTMK_FN void copy_next() {
    if (position_ < job_.end()) copy();
    commit_copies();
    next_ = next_ + 1 == Ring::COUNT ? 0 : next_ + 1;
    look_up();
  }
  // Each lane copies the same chunk of some rows. Positions behind the last are not read but become zeros, because a
  // weight of 0 times NaN would be NaN.
  DISTMK_FN void copy() const {
    constexpr uint32_t CHUNKS = DIM / 8, ROWS_PER_PASS = 32 / CHUNKS;
    const AttentionJobsArgs& args = attention_plan().args;
    const uint32_t dim = args.head_dim, own = row_of_page(args, page_, job_.kv_head, own_position());
    const uint32_t first_lane = is_second() ? ROW_TILE : 0, row_bytes = dim * sizeof(__nv_bfloat16);
    const uint32_t chunk = opaque(threadIdx.x) % CHUNKS, first_row = opaque(threadIdx.x) % 32 / CHUNKS;
    const uint32_t num_rows = 8 * chunk < dim ? job_.end() - position_ : 0, col = num_rows ? 8 * chunk : 0;
    const auto *k = reinterpret_cast<const char*>(at_operand<__nv_bfloat16>(args.k_cache) + col),
               *v = reinterpret_cast<const char*>(at_operand<__nv_bfloat16>(args.v_cache) + col);
    const bool swizzled = swizzles_cache(dim, args.page_size);
    const uint32_t to =
        shared_address(shared().at<Overlay::ROW_RINGS>()) + free_offset() + chunk / 8 * Ring::SLOT_BYTES;
#pragma unroll
    for (uint32_t i = 0; i < ROW_TILE / ROWS_PER_PASS; ++i) {
      const uint32_t row = i * ROWS_PER_PASS + first_row, at = to + row * Ring::ROW_BYTES;
      const uint32_t swizzle = swizzled ? row % 2 * 4 : row % 8;
      const uint64_t from = uint64_t{__shfl_sync(~0u, own, first_lane + row)} * row_bytes;
      copy_chunk(at + (chunk % 8 ^ swizzle) * 16, k + from, row < num_rows);
      copy_chunk(at + (chunk % 8 ^ swizzle) * 16 + Ring::VALUES, v + from, row < num_rows);
    }
  }
};

// A warp's part in a row job: all queries, over the warp's tiles.
template <uint32_t DIM>
struct RowWarp : QueryTile<DIM, ROW_TILE> {
  using Ring = RowRing<DIM>;
  using Tile = QueryTile<DIM, ROW_TILE>;
  using Tile::acc, Tile::lane, Tile::p, Tile::SCORES, Tile::softmax;
  uint32_t q[DIM / 16][4];

  // Loads the queries. A product has 16 rows; rows without a query are zero, and their results are dropped.
  DISTMK_FN void begin(const RowJobs& job) {
    const AttentionJobsArgs& args = attention_plan().args;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t query = lane() / 4 + 8 * i, dim = query < job.num_queries() ? args.head_dim : 0;
      const auto* from = reinterpret_cast<const uint32_t*>(QueryPlace(job, query).input(args)) + lane() % 4;
#pragma unroll
      for (uint32_t j = 0; j < DIM / 8; ++j) q[j / 2][i + j % 2 * 2] = 8 * j < dim ? __ldcg(from + 4 * j) : 0;
    }
  }
  DISTMK_FN void attend(const RowJobs& job, RowCopies<DIM>& copies, bool is_first) {
    const AttentionJobsArgs& args = attention_plan().args;
    const uint32_t ends[2] = {end_of_query(job.run, job.num_heads, lane() / 4),
                              end_of_query(job.run, job.num_heads, lane() / 4 + 8)};
    const uint32_t first_end = job.first_new() + 1;
    const uint32_t seen_by_all = job.end() - min(job.end(), args.window);
    const uint32_t window = args.window;
    const ScoreArgs scores = args.scores;
    const bool varies = !are_only_scaled(scores);
    const float scale = scores.scale * LOG2_E;
    this->clear();
#pragma unroll 1
    for (uint32_t first = job.first_position(); first < job.end(); first += ROW_STRIDE) {
      const uint32_t tile = copies.await_tile();
      if (is_first && first == job.first_position()) mark(Mark::FIRST);
      float s[SCORES], factor[2];
      multiply_keys(tile, s);
      if (varies) Tile::vary(s, scale, scores);
      if (first + ROW_TILE > first_end) Tile::mask_from(first, ends, s);
      if (first < seen_by_all) Tile::mask_before(first, ends, window, s);
      this->weigh(s, varies ? 1.0f : scale, factor);
      this->rescale(factor);
      this->keep_weights(s);
      add_values(tile + Ring::VALUES);
    }
    this->reduce_sums();
  }
  // Leaves the partials for combine_rows(). `offset`: place of the accumulator in the stages.
  DISTMK_FN void leave(uint32_t num_queries, uint32_t offset) const {
    RowPartials& partials = attention_plan().partials;
    const uint32_t warp = threadIdx.x / 32;
    __syncwarp();
    if (lane() == 0) partials.accumulators[warp] = offset;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t query = lane() / 4 + 8 * i;
      if (query >= num_queries) continue;
      if (lane() % 4 == 0) partials.softmax[warp][query] = softmax[i];
#pragma unroll
      for (uint32_t j = 0; j < DIM / 8; ++j)
        *accumulated(offset, query, 4 * j + lane() % 4) = {acc[j][2 * i], acc[j][2 * i + 1]};
    }
  }
  // A pair of columns of a query's accumulator. The order of pairs varies with the query, against bank conflicts.
  DISTMK_FN static float2* accumulated(uint32_t offset, uint32_t query, uint32_t pair) {
    return reinterpret_cast<float2*>(shared().at<Overlay::ROW_RINGS>() + offset) + query * DIM / 2 +
           (pair ^ query % 8 * 4);
  }

 private:
  DISTMK_FN void multiply_keys(uint32_t keys, float (&s)[SCORES]) const {
#pragma unroll
    for (float& score : s) score = 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < DIM / 16; ++k)
      tensor::multiply_by_mma<ROW_TILE>(s, q[k], keys + k / 4 * Ring::SLOT_BYTES, k % 4);
  }
  DISTMK_FN void add_values(uint32_t values) {
#pragma unroll
    for (uint32_t i = 0; i < DIM / 64; ++i)
      tensor::multiply_rows_by_mma<64>(reinterpret_cast<float (&)[32]>(acc[8 * i]), p[0], values + i * Ring::SLOT_BYTES,
                                       0);
  }
};

// Computes a job's output from the partials of all warps. All threads call it, and each takes pairs of columns.
template <uint32_t DIM>
DISTMK_FN void combine_rows(const RowJobs& job) {
  const AttentionJobsArgs& args = attention_plan().args;
  const RowPartials& partials = attention_plan().partials;
  auto* out = at_operand<__nv_bfloat16>(args.out);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < job.num_queries() * DIM / 2; i += NUM_CONSUMERS) {
    const uint32_t query = i / (DIM / 2), pair = i % (DIM / 2);
    if (2 * pair >= args.head_dim) continue;
    const auto of_warp = [&](uint32_t warp) { return partials.softmax[warp][query]; };
    auto total = begin_merge<Base2>(NUM_WARPS, of_warp);
    float2 o = {0.0f, 0.0f};
#pragma unroll
    for (uint32_t way = 0; way < NUM_WARPS; ++way) {
      const uint32_t warp = job.warp_of(way);
      const float weight = total.add(of_warp(warp));
      const float2 each = *RowWarp<DIM>::accumulated(partials.accumulators[warp], query, pair);
      o.x += weight * each.x;
      o.y += weight * each.y;
    }
    const float scale = normalizer(total.sum);
    *reinterpret_cast<uint32_t*>(out + QueryPlace(job, query).output(args, 2 * pair)) =
        pack_bf16(o.x * scale, o.y * scale);
  }
}

// Runs all row jobs of this worker. All consumers call it, once they are done with the stages.
template <uint32_t DIM>
DISTMK_NOINLINE bool run_row_jobs() {
  Context context(own_rank_state(), {threadIdx.x, NUM_CONSUMERS});
  begin_current(context);
  RowCopies<DIM> copies;
  RowWarp<DIM> warp;
  RowJobs job, attended;
  copies.begin(context);
#pragma unroll 1
  for (bool is_first = true;; is_first = false) {
    const bool found = job.next();
    if (is_first) {
      mark(Mark::PREPARED);
      if (!context.inputs_ready()) return end_copies(), false;
    }
    if (found) warp.begin(job);  // the queries land while the previous job is combined
    if (!is_first) {
      if (!found) mark(Mark::LAST);
      barrier_sync<NUM_CONSUMERS>();
      combine_rows<DIM>(attended);
      if (!found) mark(Mark::STORED);
    }
    if (!found) return end_task_of_body(), true;
    if (!is_first) barrier_sync<NUM_CONSUMERS>();  // the next copies overwrite the partials that were combined
    if (is_first && !attention_plan().has_block_jobs()) mark(Mark::INPUTS);
    warp.attend(job, copies, is_first);
    warp.leave(job.num_queries(), copies.free_offset());
    attended = job;
  }
}

}  // namespace jobs
}  // namespace distmk
