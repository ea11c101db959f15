// The loader's part of a wide product: the copies of all jobs of its worker, in the order in which the consumers use
// them. Activations are written during the iteration, so it begins once the consumers have entered the body.
#pragma once
#include "device/wide/rings.cuh"

namespace distmk {
namespace wide {

DISTMK_FN bool is_told_of(const TaskDesc& task) {
  return BULK_COPIES && task.type == static_cast<uint16_t>(TaskType::WIDE_LINEAR);
}

// Where the tile of some M tile in a K tile begins in the packed weights, and its bytes (distmk/weights/packing.py).
class PackedTile {
 public:
  DISTMK_FN PackedTile(const char* weight, const WideLinearArgs& args, const TileRows& rows)
      : slab_(weight + uint64_t{rows.slab_begin} * args.k_pitch * sizeof(__nv_bfloat16)),
        pitch_(args.k_pitch),
        num_rows_(rows.count),
        block_first_(rows.first / M_BLOCK * M_BLOCK),
        block_rows_(rows.count ? min(M_BLOCK, rows.slab_rows - block_first_) : 0),
        row_in_block_(rows.first % M_BLOCK) {}

  DISTMK_FN uint32_t num_bytes(uint32_t k_tile) const {
    return num_rows_ * min(K_TILE, pitch_ - k_tile * K_TILE) * sizeof(__nv_bfloat16);
  }
  DISTMK_FN const char* begin(uint32_t k_tile) const {
    const uint32_t k = k_tile * K_TILE, block_k = k / K_BLOCK * K_BLOCK, block_cols = min(K_BLOCK, pitch_ - block_k);
    const uint64_t elements = uint64_t{block_first_} * pitch_ + uint64_t{block_rows_} * block_k +
                              row_in_block_ * block_cols + num_rows_ * (k - block_k);
    return slab_ + elements * sizeof(__nv_bfloat16);
  }

 private:
  const char* slab_;
  uint32_t pitch_, num_rows_;
  uint32_t block_first_, block_rows_, row_in_block_;  // of the M block
};

// The M tile of a job that this lane copies, perhaps one without rows.
DISTMK_FN PackedTile tile_of_lane(const RankState& state, const WideLinearArgs& args, const Division& division,
                                  const Job& job) {
  const uint32_t lane = threadIdx.x % 32;
  TileRows rows = division.tile_rows(args, job.first_tile + min(lane, job.num_tiles - 1));
  if (lane >= job.num_tiles) rows.count = 0;
  return {reinterpret_cast<const char*>(state.address(args.weight)), args, rows};
}

// The producer of the rings.
class RingFiller {
 public:
  DISTMK_FN RingFiller(const RankState& state, const Team& lanes, const WideLinearArgs& args, const Division& division)
      : lanes_(lanes),
        args_(args),
        x_(reinterpret_cast<const char*>(state.address(args.x))),
        slot_bytes_(b_slot_bytes(division.tile_tokens)),
        b_slots_(num_b_slots(division.tile_tokens)) {}

  // Both rings at once, activations up to a ring ahead of weights: those of the next job are copied while the output of
  // the last one is still in the A ring.
  DISTMK_FN void fill(const Job& job, const PackedTile& tile) {
    const BlockRange blocks = Division::blocks_of(args_, job.split);
    if (blocks.begin == blocks.end) return pass(job);
    const uint32_t first_tile = blocks.begin / BLOCKS_PER_TILE;
    const uint32_t num_tiles = (blocks.end + BLOCKS_PER_TILE - 1) / BLOCKS_PER_TILE;
    uint32_t next_tile = first_tile, due = num_jobs_ ? b_slots_ : 0;
    const auto next_a = [&] {
      const bool first = next_tile == first_tile;
      if (first) await_stored();
      fill_a(tile, next_tile++);
      due = first ? b_slots_ : due + BLOCKS_PER_TILE;
    };
#pragma unroll 1
    for (uint32_t block = blocks.begin; block < blocks.end; ++block) {
      while (next_tile < num_tiles && block - blocks.begin >= due) next_a();
      fill_b(job.first_token, block, slot_bytes_);
    }
    while (next_tile < num_tiles) next_a();
    ++num_jobs_;
  }

 private:
  const Team lanes_;
  const WideLinearArgs& args_;
  const char* x_;
  const uint32_t slot_bytes_, b_slots_;
  uint32_t num_jobs_ = 0;  // filled completely
  uint32_t a_count_ = 0, b_slot_ = 0, b_phase_ = 0;

  // A job without columns still takes a slot, with nothing in it, so that the consumers get no further ahead than
  // others.
  DISTMK_FN void pass(const Job& job) {
    await_stored();
    fill_b(job.first_token, 0, 0);
    ++num_jobs_;
  }
  // Waits until the last job's output has been read.
  DISTMK_FN void await_stored() {
    if (num_jobs_) barrier_wait(&rings().stored, (num_jobs_ - 1) % 2);
  }
  // A lane copies an M tile.
  DISTMK_FN void fill_a(const PackedTile& tile, uint32_t k_tile) {
    const RingPosition<A_SLOTS> at{a_count_++};
    const uint32_t slot = at.slot(), full = shared_address(&rings().a_full[slot]);
    barrier_wait(&rings().a_empty[slot], at.parity() ^ 1);
    lanes_.sync();
    if (lanes_.index >= JOB_TILES) return;
    const uint32_t num_bytes = tile.num_bytes(k_tile);
    expect_bytes(full, num_bytes);
    const uint32_t dst = shared_address(shared().stages) + slot * A_SLOT_BYTES + lanes_.index * A_TILE_BYTES;
    if (num_bytes) copy_expected(dst, tile.begin(k_tile), num_bytes, full);
  }
  DISTMK_FN void fill_b(uint32_t first_token, uint32_t block, uint32_t num_bytes) {
    const uint32_t full = shared_address(&rings().b_full[b_slot_]);
    barrier_wait(&rings().b_empty[b_slot_], b_phase_ ^ 1);
    lanes_.sync();
    if (lanes_.leader()) {
      const char* src = x_ + (uint64_t{block} * WIDE_ROWS + first_token) * WIDE_COLS * sizeof(__nv_bfloat16);
      expect_bytes(full, num_bytes);
      const uint32_t dst = shared_address(shared().stages) + A_BYTES + b_slot_ * slot_bytes_;
      if (num_bytes) copy_kept(dst, src, num_bytes, full);
    }
    if (++b_slot_ == b_slots_) b_slot_ = 0, b_phase_ ^= 1;
  }
};

// While the inputs are computed: the weights with which this worker begins. They are then in the second-level cache.
DISTMK_FN void prefetch_weights(const WideLinearArgs& args, const Job& job, const PackedTile& tile) {
  const BlockRange blocks = Division::blocks_of(args, job.split);
  if (threadIdx.x % 32 >= JOB_TILES) return;
#pragma unroll 1
  for (uint32_t i = 0; i < A_SLOTS; ++i) {
    const uint32_t k_tile = blocks.begin / BLOCKS_PER_TILE + i;
    if (k_tile * BLOCKS_PER_TILE >= blocks.end || !tile.num_bytes(k_tile)) return;
    prefetch_bulk(tile.begin(k_tile), tile.num_bytes(k_tile));
  }
}

// What the jobs of a worker follow from.
struct Instance {
  uint32_t number, num_tokens;

  DISTMK_FN bool operator==(const Instance& o) const { return number == o.number && num_tokens == o.num_tokens; }
};

// Before the iteration has begun its batch may still be that of another one, or be written meanwhile; then this is a
// guess, the same in all lanes.
DISTMK_FN Instance guess_instance(const RankState& state, const Team& lanes, const TaskDesc& task) {
  const auto& args = *reinterpret_cast<const WideLinearArgs*>(task.args);
  const uint32_t num_workers = state.program->num_workers;
  const volatile Batch& batch = *state.batch(args.batch);
  const uint32_t num_tokens = lanes.from_leader(args.sampled ? batch.num_rows : batch.num_wide_rows);
  const uint32_t most = args.sampled ? args.sampled : WIDE_ROWS;
  return {(shared().worker_index + num_workers - task.first_worker) % num_workers,
          num_tokens && num_tokens <= most ? num_tokens : most};
}

// The producer of a task's rings, once the consumers have entered its body. `number` of such tasks came before. False:
// the worker has left. A body that has been entered needs nothing more than these copies, so it is not left midway.
DISTMK_NOINLINE bool stream_product(const RankState& state, const Team lanes, const TaskDesc& task, uint32_t number) {
  const auto& args = *reinterpret_cast<const WideLinearArgs*>(task.args);
  Instance instance = guess_instance(state, lanes, task);
  // Where the copies begin takes long to compute, so that is done before. If the guess was wrong, once more.
#pragma unroll 1
  for (bool told = false;;) {
    const Division division(args, instance.num_tokens);
    JobCursor jobs(division, instance.number, state.program->num_workers);
    RingFiller filler(state, lanes, args, division);
    Job job;
    bool has_job = jobs.next(job);
    PackedTile tile = tile_of_lane(state, args, division, has_job ? job : Job{0, 1, 0, 0, 0});
    if (!told) {
      if (has_job) prefetch_weights(args, job, tile);
      lanes.sync();
      while (!lanes.all(barrier_try_wait(&shared().wide_entered, number % 2)))
        if (!lanes.all(!shared().pipeline.leave.get())) return false;
      told = true;
      fence_copies();
      const Batch& batch = *state.batch(args.batch);
      const Instance entered{rings().instance, args.sampled ? batch.num_rows : batch.num_wide_rows};
      if (!(instance == entered)) {
        instance = entered;
        continue;
      }
    }
#pragma unroll 1
    while (has_job) {
      filler.fill(job, tile);
      has_job = jobs.next(job);
      if (has_job) tile = tile_of_lane(state, args, division, job);
    }
    break;
  }
  warp_arrive(&rings().left);
  return true;
}

}  // namespace wide
}  // namespace distmk
