// Row jobs of attention (row_jobs.cuh) read much and compute little, so their speed depends on how many bytes are in
// flight. Each warp copies the tiles of its share into a ring of its own and multiplies them alone, from one job to the
// next without a pause. At the end, the warps that share a job combine their partials.
#pragma once
#include "device/core/end_task.cuh"
#include "device/jobs/query_tile.cuh"
#include "device/jobs/row_shares.cuh"
#include "platform/wgmma.cuh"

namespace distmk {
namespace jobs {

static_assert(ROW_QUERIES == QUERIES_PER_WARP && 2 * ROW_TILE == 32, "");

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

// A warp's copies of its tiles, one after another through all jobs of its share, COUNT - 1 tiles ahead.
template <uint32_t DIM, bool SHARED>
class RowCopies {
 public:
  using Ring = RowRing<DIM>;

  DISTMK_FN explicit RowCopies(const WarpShare<SHARED>& share) : share_(share) {}
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
  WarpShare<SHARED> share_;
  uint32_t position_ = 0;  // position of the tile to copy next; behind share_.end, there is none
  uint32_t page_;          // page of this lane's position
  uint32_t next_ = 0;      // its place in the ring

  // The pages of two tiles are looked up together, each by half a warp. Positions behind the last are looked up as the
  // last.
  DISTMK_FN bool is_second() const { return (position_ - share_.begin) / ROW_TILE % 2; }
  DISTMK_FN uint32_t own_position() const {
    const uint32_t first = is_second() ? position_ - ROW_TILE : position_;
    return min(first + threadIdx.x % 32, share_.end - 1);
  }
  // Whether the next tile has positions that this iteration appends.
  DISTMK_FN bool is_new() const { return position_ < share_.end && position_ + ROW_TILE > share_.job.first_new(); }
  // Moves on to the next tile, and looks up its page while earlier copies are in flight.
  DISTMK_FN void look_up() {
    position_ += ROW_TILE;
    if (position_ < share_.end && is_second()) return;
    if (position_ >= share_.end) {
      if (!share_.next()) return;
      position_ = share_.begin;
    }
    const AttentionJobsArgs& args = attention_plan().args;
    page_ =
        page_of(at_operand<int32_t>(args.page_table), args, static_cast<uint32_t>(share_.job.run.slot), own_position());
  }
  DISTMK_FN void copy_next() {
    if (position_ < share_.end) copy();
    commit_copies();
    next_ = next_ + 1 == Ring::COUNT ? 0 : next_ + 1;
    look_up();
  }
  // Each lane copies the same chunk of some rows. Positions behind the last are not read but become zeros, because a
  // weight of 0 times NaN would be NaN.
  DISTMK_FN void copy() const {
    constexpr uint32_t CHUNKS = DIM / 8, ROWS_PER_PASS = 32 / CHUNKS;
    const AttentionJobsArgs& args = attention_plan().args;
    const uint32_t dim = args.head_dim, own = row_of_page(args, page_, share_.job.kv_head, own_position());
    const uint32_t first_lane = is_second() ? ROW_TILE : 0, row_bytes = dim * sizeof(__nv_bfloat16);
    const uint32_t chunk = opaque(threadIdx.x) % CHUNKS, first_row = opaque(threadIdx.x) % 32 / CHUNKS;
    const uint32_t num_rows = 8 * chunk < dim ? share_.end - position_ : 0, col = num_rows ? 8 * chunk : 0;
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

// A warp's part in a row job: all queries, over the warp's positions.
template <uint32_t DIM>
struct RowWarp : QueryTile<DIM, ROW_TILE> {
  using Ring = RowRing<DIM>;
  using Tile = QueryTile<DIM, ROW_TILE>;
  using Tile::acc, Tile::lane, Tile::p, Tile::SCORES, Tile::softmax;
  uint32_t q[DIM / 16][4];

  // Loads the queries. A product has 16 rows; rows without a query are zero, and their results are dropped.
  DISTMK_FN void begin(const RowJob& job) {
    const AttentionJobsArgs& args = attention_plan().args;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t query = lane() / 4 + 8 * i, dim = query < job.num_queries() ? args.head_dim : 0;
      const auto* from = reinterpret_cast<const uint32_t*>(QueryPlace(job, query).input(args)) + lane() % 4;
#pragma unroll
      for (uint32_t j = 0; j < DIM / 8; ++j) q[j / 2][i + j % 2 * 2] = 8 * j < dim ? __ldcg(from + 4 * j) : 0;
    }
  }
  template <bool SHARED>
  DISTMK_FN void attend(const WarpShare<SHARED>& share, RowCopies<DIM, SHARED>& copies, bool is_first) {
    const AttentionJobsArgs& args = attention_plan().args;
    const RowJob& job = share.job;
    const uint32_t ends[2] = {end_of_query(job.run, job.num_heads, lane() / 4),
                              end_of_query(job.run, job.num_heads, lane() / 4 + 8)};
    const uint32_t first_end = job.first_new() + 1;
    const uint32_t kv_len = static_cast<uint32_t>(job.run.kv_len), seen_by_all = kv_len - min(kv_len, args.window);
    const uint32_t window = args.window;
    const ScoreArgs scores = args.scores;
    const bool varies = !are_only_scaled(scores);
    const float scale = scores.scale * LOG2_E;
    this->clear();
#pragma unroll 1
    for (uint32_t first = share.begin; first < share.end; first += ROW_TILE) {
      const uint32_t tile = copies.await_tile();
      if (is_first && first == share.begin) mark(Mark::FIRST);
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
  // Stores the outputs of a job that this warp has attended alone.
  DISTMK_FN void store(const RowJob& job) const {
    const AttentionJobsArgs& args = attention_plan().args;
    auto* out = at_operand<__nv_bfloat16>(args.out);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t query = lane() / 4 + 8 * i;
      if (query >= job.num_queries()) continue;
      const float scale = normalizer(softmax[i].sum);
      const QueryPlace place(job, query);
#pragma unroll
      for (uint32_t j = 0; j < DIM / 8; ++j)
        if (8 * j < args.head_dim)
          *reinterpret_cast<uint32_t*>(out + place.output(args, 8 * j + lane() % 4 * 2)) =
              pack_bf16(acc[j][2 * i] * scale, acc[j][2 * i + 1] * scale);
    }
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
  // Leaves the partials of a job that other workers share, if no other warp of this one does.
  DISTMK_FN void leave(const RowJob& job) const {
    const SharePartials partials(job, job.part());
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t query = lane() / 4 + 8 * i;
      if (query >= job.num_queries()) continue;
      if (lane() % 4 == 0) partials.store(query, softmax[i]);
#pragma unroll
      for (uint32_t j = 0; j < DIM / 8; ++j)
        partials.store(query, 4 * j + lane() % 4, {acc[j][2 * i], acc[j][2 * i + 1]});
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

// Combines the partials of a job that several warps share. Each of these warps takes pairs of columns.
template <uint32_t DIM, bool SHARED>
DISTMK_FN void combine_rows(const WarpShare<SHARED>& share) {
  const RowPartials& partials = attention_plan().partials;
  const Team warps = {threadIdx.x - share.first_warp * 32, share.num_pieces * 32};
  const auto softmax = [&](uint32_t piece, uint32_t query) {
    return partials.softmax[share.first_warp + piece][query];
  };
  const auto accumulated = [&](uint32_t piece, uint32_t query, uint32_t pair) {
    return *RowWarp<DIM>::accumulated(partials.accumulators[share.first_warp + piece], query, pair);
  };
  if (!SHARED || share.job.num_workers == 1)
    return store_combined<DIM>(share.job, warps, share.num_pieces, softmax, accumulated);
  const SharePartials shared_job(share.job, share.job.part());
  for_each_combined<DIM>(share.job, warps, share.num_pieces, softmax, accumulated,
                         [&](uint32_t query, uint32_t pair, const LogSumExp<Base2>& total, float2 o) {
                           if (pair == 0) shared_job.store(query, total);
                           shared_job.store(query, pair, o);
                         });
}

// Runs all row jobs of this worker. All consumers call it, once they are done with the stages.
template <uint32_t DIM, bool SHARED>
DISTMK_NOINLINE bool run_row_jobs() {
  Context context(own_rank_state(), {threadIdx.x, NUM_CONSUMERS});
  begin_current(context);
  WarpShare<SHARED> share;
  RowCopies<DIM, SHARED> copies(share);
  RowWarp<DIM> warp;
  copies.begin(context);
  mark(Mark::PREPARED);
  if (!context.inputs_ready()) return end_copies(), false;
  if (!attention_plan().has_block_jobs()) mark(Mark::INPUTS);
#pragma unroll 1
  for (bool is_first = true; share.next(); is_first = false) {
    warp.begin(share.job);
    warp.attend(share, copies, is_first);
    if (share.num_pieces > 1)
      warp.leave(share.job.num_queries(), copies.free_offset());
    else if (SHARED && share.job.num_workers > 1)
      warp.leave(share.job);
    else
      warp.store(share.job);
  }
  mark(Mark::LAST);
  barrier_sync<NUM_CONSUMERS>();
  if (share.num_pieces > 1) combine_rows<DIM>(share);
  if constexpr (SHARED) combine_shares<DIM>();
  mark(Mark::STORED);
  return end_task_of_body(), true;
}

}  // namespace jobs
}  // namespace distmk
