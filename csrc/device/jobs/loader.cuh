// The loader's part in a GEMM in jobs (linear_jobs.cuh): plans all jobs of its worker, and copies their operands into
// the rings in the order of their use. Weights are copied once the consumers have entered the task, because all earlier
// tasks of this worker are then done. Activations, which other workers write during the iteration, are copied once the
// task is ready.
#pragma once
#include "device/jobs/rings.cuh"
#include "device/jobs/tile_source.cuh"

namespace distmk {
namespace jobs {

// The M tile of a job that this lane copies. It may have no rows.
DISTMK_FN TileRows tile_of_lane(const LinearJobsArgs& args, const JobGrid& grid, const Job& job) {
  const uint32_t lane = threadIdx.x % 32;
  TileRows rows = grid.tile_rows(args, job.first_tile + min(lane, job.num_tiles - 1));
  if (lane >= job.num_tiles) rows.count = 0;
  return rows;
}
DISTMK_FN TileSource tile_source(const RankState& state, const LinearJobsArgs& args, const TileRows& rows) {
  return {reinterpret_cast<const char*>(state.address(args.weight)), args, rows};
}

// Publishes the plan of job number `round` to the consumers. All lanes call it, each with its M tile.
DISTMK_FN void plan_job(const Team& lanes, const LinearJobsArgs& args, const Job& job, const TileRows& rows,
                        const TileSource& tile, uint32_t round) {
  JobPlan& plan = plan_of(round);
  const FeatureRange features = features_of(args, rows);
  const uint32_t end = __shfl_sync(~0u, features.end(), job.num_tiles - 1);
  if (lanes.index < job.num_tiles) {
    const uint32_t bias = rows.slab_begin + (is_paired(args) ? rows.first / 2 : rows.first);
    plan.tiles[lanes.index] = {features, bias, bias + (is_paired(args) ? rows.slab_rows / 2 : 0)};
    tile.find_row_scales(rows, lanes.index, plan);
  }
  if (lanes.leader()) {
    const BlockRange blocks = JobGrid::blocks_of(args, job.k_split);
    plan.num_tiles = job.num_tiles, plan.num_blocks = blocks.end - blocks.begin;
    plan.first_token = job.first_token, plan.num_tokens = job.num_tokens, plan.k_split = job.k_split;
    plan.features = {features.begin, end - features.begin};
  }
  warp_arrive(&plan.planned);
}
DISTMK_FN void plan_end(const Team& lanes, uint32_t round) {
  JobPlan& plan = plan_of(round);
  if (lanes.leader()) plan.num_tiles = 0;
  warp_arrive(&plan.planned);
}

// The producer of the rings. One lane copies each M tile of a job, and one lane each slot of activations. Each ring is
// filled as it has room, whatever the other one waits for: all M tiles of a K tile at once, activations one slot at a
// time.
//
// With MAX_TOKENS, the B ring has as few as two slots, which are filled just in time. The A ring is then polled only in
// every eighth pass of the loop. Testing the barriers of eight M tiles takes long, and there is time for it while the
// four blocks of a K tile are multiplied.
class RingFiller {
  static constexpr uint32_t FIRST_B_LANE = JOB_TILES;
  static_assert(FIRST_B_LANE + MAX_B_SLOTS <= 32, "");

 public:
  DISTMK_FN RingFiller(const RankState& state, const Team& lanes, const LinearJobsArgs& args, uint32_t tile_tokens,
                       const RingSizes& sizes)
      : lanes_(lanes),
        args_(args),
        x_(reinterpret_cast<const char*>(state.address(args.x))),
        slot_bytes_(b_slot_bytes(tile_tokens)),
        polls_per_tile_(tile_tokens == MAX_TOKENS ? 8 : 1),
        sizes_(sizes),
        output_is_over_a_(output_begin(tile_tokens) < sizes.a_bytes()),
        output_is_over_b_(output_begin(tile_tokens) + output_bytes(tile_tokens) > sizes.a_bytes() &&
                          output_begin(tile_tokens) < sizes.a_bytes() + sizes.num_slots * slot_bytes_) {}

  // Fills the rings for job number `round`. False: the task will not run, and all copies have landed.
  DISTMK_FN bool fill(const Job& job, const TileSource& tile, uint32_t round) {
    const BlockRange blocks = JobGrid::blocks_of(args_, job.k_split);
    const bool has_tile = lanes_.index < job.num_tiles;
    const uint32_t first_tile = blocks.begin / BLOCKS_PER_TILE, num_blocks = blocks.end - blocks.begin;
    const uint32_t num_tiles = num_k_tiles(num_blocks);
    const uint32_t slot = lanes_.index - FIRST_B_LANE;  // wraps around for lanes without a slot
    WeightPosition at(phases_, sizes_.num_tiles, job.num_tiles, has_tile ? lanes_.index : 0);
    uint32_t next_tile = 0, block = num_blocks;
    if (slot < sizes_.num_slots) block = (slot + sizes_.num_slots - b_slot_) % sizes_.num_slots;
    bool is_stored = !round;  // the last job's output, which may lie over a ring, has been read
#pragma unroll 1
    for (uint32_t poll = 0; next_tile < num_tiles || !lanes_.all(block >= num_blocks); ++poll) {
      if (!is_stored) is_stored = lanes_.all(barrier_test(&plan_of(round - 1).stored, plan_parity(round - 1)));
      if (!has_inputs_ && !look_for_inputs()) {
        if (has_tile) await_landed(job.num_tiles, next_tile);
        return false;
      }
      if (next_tile < num_tiles && (poll & (polls_per_tile_ - 1)) == 0 && (is_stored || !output_is_over_a_) &&
          lanes_.all(!has_tile || barrier_test(&rings().a_empty[at.place()], at.parity() ^ 1))) {
        if (has_tile) copy_weights(tile, first_tile + next_tile, at.place());
        ++next_tile, at.advance();
      }
      if (has_inputs_ && (is_stored || !output_is_over_b_) && block < num_blocks &&
          barrier_test(&rings().b_empty[slot], b_phase_ ^ 1)) {
        copy_activations(job.first_token, blocks.begin + block, slot);
        block += sizes_.num_slots, b_phase_ ^= 1;
      }
    }
    phases_ = WeightPosition::phases_after(phases_, sizes_.num_tiles, job.num_tiles, num_tiles);
    b_slot_ = (b_slot_ + num_blocks) % sizes_.num_slots;
    return true;
  }

 private:
  const Team lanes_;
  const LinearJobsArgs& args_;
  const char* x_;
  const uint32_t slot_bytes_;
  const uint32_t polls_per_tile_;  // a power of two
  const RingSizes sizes_;
  const bool output_is_over_a_, output_is_over_b_;
  bool has_inputs_ = false;
  uint32_t phases_ = 0;   // parities of the A ring's places
  uint32_t b_slot_ = 0;   // slot of the job's first block
  uint32_t b_phase_ = 0;  // parity of this lane's slot

  // Checks whether the inputs are there. False: they never will be.
  DISTMK_FN bool look_for_inputs() {
    has_inputs_ = lanes_.all(barrier_test(&rings().ready, 0));
    if (has_inputs_) fence_copies();  // other workers stored them
    return has_inputs_ || lanes_.all(!shared().pipeline.leave.get());
  }
  // Waits until the weights of the job's first `count` K tiles have landed.
  DISTMK_FN void await_landed(uint32_t num_tiles, uint32_t count) const {
    WeightPosition at(phases_, sizes_.num_tiles, num_tiles, lanes_.index);
    for (; count; --count, at.advance()) barrier_wait(&rings().a_full[at.place()], at.parity());
  }
  DISTMK_FN void copy_weights(const TileSource& tile, uint32_t k_tile, uint32_t place) const {
    const uint32_t full = shared_address(&rings().a_full[place]), num_bytes = tile.num_bytes(k_tile);
    expect_bytes(full, num_bytes);
    const uint32_t dst = shared_address(shared().at<Overlay::PRODUCT_RINGS>()) + place * A_TILE_BYTES;
    if (num_bytes) copy_expected(dst, tile.begin(k_tile), num_bytes, full);
  }
  DISTMK_FN void copy_activations(uint32_t first_token, uint32_t block, uint32_t slot) const {
    const uint32_t full = shared_address(&rings().b_full[slot]);
    const char* src =
        x_ + (uint64_t{block} * MAX_BUCKET_ROWS + first_token) * ACTIVATION_BLOCK_COLS * sizeof(__nv_bfloat16);
    expect_bytes(full, slot_bytes_);
    copy_kept(shared_address(shared().at<Overlay::PRODUCT_RINGS>()) + sizes_.a_bytes() + slot * slot_bytes_, src,
              slot_bytes_, full);
  }
};

// Prefetches into L2 the weights with which this worker begins, while earlier tasks still run.
DISTMK_FN void prefetch_weights(const LinearJobsArgs& args, const Job& job, const TileSource& tile,
                                uint32_t num_tiles) {
  if (threadIdx.x % 32 >= JOB_TILES) return;
  const BlockRange blocks = JobGrid::blocks_of(args, job.k_split);
#pragma unroll 1
  for (uint32_t i = 0; i < num_tiles / job.num_tiles; ++i) {
    const uint32_t k_tile = blocks.begin / BLOCKS_PER_TILE + i;
    if (k_tile * BLOCKS_PER_TILE >= blocks.end || !tile.num_bytes(k_tile)) return;
    prefetch_bulk(tile.begin(k_tile), tile.num_bytes(k_tile));
  }
}
// Number of M tiles to prefetch. Few tokens need more, because they are multiplied faster than weights arrive.
DISTMK_FN constexpr uint32_t num_prefetched(uint32_t tile_tokens) {
  return tile_tokens < MAX_TOKENS ? 20 : MAX_A_TILES;
}

// The values that determine a worker's jobs, beside the task's arguments.
struct WorkerShare {
  uint32_t number, num_tokens;

  DISTMK_FN bool operator==(const WorkerShare& o) const { return number == o.number && num_tokens == o.num_tokens; }
};

// The values as the loader finds them early. Before the iteration begins, its batch may still be another one's, or be
// written at this moment. The result is then only a guess, but the same in all lanes.
DISTMK_FN WorkerShare predict_share(const RankState& state, const Team& lanes, const TaskDesc& task) {
  const auto& args = *reinterpret_cast<const LinearJobsArgs*>(task.args);
  const uint32_t num_workers = state.program->num_workers;
  const Batch& batch = *state.batch(args.batch);
  const uint32_t num_rows = args.max_sampled_rows ? load_guess(&batch.num_rows) : load_guess(&batch.num_job_rows);
  const uint32_t num_tokens = lanes.from_leader(num_rows);
  const uint32_t most = args.max_sampled_rows ? args.max_sampled_rows : MAX_BUCKET_ROWS;
  return {(shared().worker_index + num_workers - task.first_worker) % num_workers,
          num_tokens && num_tokens <= most ? num_tokens : most};
}

// All lanes call it. False: the worker has left.
DISTMK_FN bool await_consumers(const Team& lanes, uint64_t& barrier, uint32_t parity) {
  while (!lanes.all(barrier_try_wait(&barrier, parity)))
    if (!lanes.all(!shared().pipeline.leave.get())) return false;
  return true;
}

// Streams the operands of one GEMM. `number`: how many GEMMs came before it. False: the worker has left. A task that is
// ready waits for nothing but these copies, so they are not abandoned midway.
DISTMK_NOINLINE bool stream_product(const RankState& state, const Team lanes, const TaskDesc& task, uint32_t number) {
  const auto& args = *reinterpret_cast<const LinearJobsArgs*>(task.args);
  WorkerShare share = predict_share(state, lanes, task);
  // Computing where the copies begin takes long, so it is done from a guess before the consumers enter the task. If the
  // guess was wrong, it is done again.
#pragma unroll 1
  for (bool knows_share = false;;) {
    const JobGrid grid(args, share.num_tokens, state.program->num_workers);
    JobCursor jobs(grid, share.number, state.program->num_workers);
    const RingSizes sizes(grid.tile_tokens, jobs.job_tiles());
    RingFiller filler(state, lanes, args, grid.tile_tokens, sizes);
    Job job;
    bool has_job = jobs.next(job);
    TileRows rows = tile_of_lane(args, grid, has_job ? job : Job{0, 1, 0, 0, 0});
    TileSource tile = tile_source(state, args, rows);
    if (!knows_share) {
      if (has_job) prefetch_weights(args, job, tile, num_prefetched(grid.tile_tokens));
      lanes.sync();
      if (!await_consumers(lanes, shared().product_entered, number % 2)) return false;
      knows_share = true;
      fence_copies();  // earlier tasks used the rings' memory
      const WorkerShare entered{rings().instance, rings().num_tokens};
      if (!(share == entered)) {
        share = entered;
        continue;
      }
    }
    if (lanes.leader())
      rings().tile_tokens = grid.tile_tokens, rings().num_tiles = sizes.num_tiles, rings().num_slots = sizes.num_slots,
      rings().b_begin = sizes.a_bytes();
    uint32_t round = 0;
#pragma unroll 1
    for (; has_job; ++round) {
      plan_job(lanes, args, job, rows, tile, round);
      if (!filler.fill(job, tile, round)) return false;
      has_job = jobs.next(job);
      if (has_job) rows = tile_of_lane(args, grid, job), tile = tile_source(state, args, rows);
      if (round && !await_consumers(lanes, plan_of(round - 1).stored, plan_parity(round - 1))) return false;
    }
    plan_end(lanes, round);
    return true;
  }
}

// The loader's hook for these GEMMs (core/loader.cuh).
struct InputStream {
  uint32_t num_products = 0;  // GEMMs so far

  DISTMK_FN static bool handles(const TaskDesc& task) {
    return BULK_COPIES && task.type == static_cast<uint16_t>(TaskType::LINEAR_JOBS);
  }
  DISTMK_FN bool stream(const RankState& state, const Team& lanes, Loader&, const TaskDesc& task) {
    return stream_product(state, lanes, task, num_products++);
  }
};

}  // namespace jobs
}  // namespace distmk
