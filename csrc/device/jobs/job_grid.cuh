// Divides a GEMM of a job iteration into jobs: what a worker's consumers multiply, and what its loader copies for them.
//
// Weights are the m dimension, in M tiles of up to M_TILE rows. Every slab has as many M tiles as the largest, so the
// last M tiles of a smaller slab have fewer rows or none. Tokens are the n dimension, in tiles of 32 to 256. The GEMM
// is divided into columns of jobs; each column is an N tile and a split of k. Workers are dealt to the columns
// round-robin, and the workers of a column share its M tiles evenly, in jobs of up to JOB_TILES. So neighbouring
// workers read the same weights at the same time.
#pragma once
#include "runtime/context.h"
#include "runtime/pointwise.h"
#include "runtime/slabs.h"

namespace distmk {
namespace jobs {

constexpr uint32_t JOB_TILES = NUM_WARPS;  // one M tile per consumer warp
constexpr uint32_t MAX_TOKENS = 256;       // tokens of an N tile at most
static_assert(MAX_BUCKET_ROWS % MAX_TOKENS == 0, "an N tile ends within the activations");

// The rows of an M tile: `count` rows of slab number `slab`, from its row `first` on. The slab has `slab_rows` rows and
// begins at row `slab_begin` of the matrix.
struct TileRows {
  uint32_t slab, slab_begin, slab_rows, first, count;
};

DISTMK_FN bool is_packed(const LinearJobsArgs& args) { return HAS_PACKED_WEIGHTS && args.format != Bf16Format::ID; }
DISTMK_FN bool is_paired(const LinearJobsArgs& args) { return is_gated(static_cast<Epilogue>(args.epilogue)); }

// Output features. A gated matrix has one feature for two rows, gate and up.
struct FeatureRange {
  uint32_t begin, count;

  DISTMK_FN uint32_t end() const { return begin + count; }
};
// The features of an M tile. Gate rows are in its first half, up rows in its second half.
DISTMK_FN FeatureRange features_of(const LinearJobsArgs& args, const TileRows& tile) {
  const uint32_t half = is_paired(args) ? 2 : 1;
  return {(tile.slab_begin + min(tile.first, tile.slab_rows)) / half, tile.count / half};
}

DISTMK_FN uint32_t tokens_of(const LinearJobsArgs& args, const Batch& batch) {
  return args.max_sampled_rows ? batch.num_rows : batch.num_job_rows;
}
// Tokens of an N tile, without regard to the weights (see JobGrid).
DISTMK_FN uint32_t tile_tokens_of(uint32_t num_tokens) {
  return num_tokens <= 32 ? 32 : num_tokens <= 64 ? 64 : num_tokens <= 128 ? 128 : MAX_TOKENS;
}
// The same of packed tiles. There are two sizes, as each is compiled for every format.
DISTMK_FN constexpr uint32_t packed_tile_tokens_of(uint32_t num_tokens) { return num_tokens <= 64 ? 64 : 128; }

// The 64-column blocks of a split of k. Every split begins at a K tile.
struct BlockRange {
  uint32_t begin, end;
};

// Blocks of the activations, with those that are zero. Rows of packed tiles are longer.
DISTMK_FN uint32_t num_k_blocks(const LinearJobsArgs& args) {
  return HAS_PACKED_WEIGHTS ? (args.lead + args.k + ACTIVATION_BLOCK_COLS - 1) / ACTIVATION_BLOCK_COLS
                            : args.k_pitch / ACTIVATION_BLOCK_COLS;
}

// The slabs of the matrix, or of the part of a matrix that a task multiplies. Only the kernel for packed weights has
// parts: rows [first_row, end_row), the slabs from `first_slab` to `end_slab`.
DISTMK_FN uint32_t slabs_of(const LinearJobsArgs& args) {
  return HAS_PACKED_WEIGHTS ? args.end_slab - args.first_slab : args.num_slabs;
}
// The first row of a slab, counted from the part's first row.
DISTMK_FN uint32_t part_begin(const LinearJobsArgs& args, uint32_t slab) {
  if (!HAS_PACKED_WEIGHTS) return slab_begin(args, slab);
  return min(max(slab_begin(args, args.first_slab + slab), args.first_row), args.end_row) - args.first_row;
}

struct JobGrid {
  uint32_t num_tokens;  // tokens of the whole GEMM
  uint32_t tile_tokens, num_n_tiles;
  uint32_t tiles_per_slab, num_m_tiles;
  uint32_t num_job_columns;  // columns of jobs

  // Divides the GEMM among `num_workers`. If a worker has few M tiles for its MAX_TOKENS tokens, it reads fewer bytes
  // with twice as many M tiles and half as many tokens.
  DISTMK_FN JobGrid(const LinearJobsArgs& args, uint32_t all_tokens, uint32_t num_workers) : num_tokens(all_tokens) {
    const uint32_t num_others = args.num_slabs - args.num_reduced;
    const uint32_t most_pairs = (num_pairs(args) + num_others - 1) / num_others;
    const uint32_t largest_slab = max(2 * most_pairs, args.num_reduced ? args.reduced_rows : 0);
    tiles_per_slab = (largest_slab + M_TILE - 1) / M_TILE;
    num_m_tiles = slabs_of(args) * tiles_per_slab;
    set_tile(is_packed(args) ? packed_tile_tokens_of(num_tokens) : tile_tokens_of(num_tokens), args.num_k_splits);
    if (tile_tokens == MAX_TOKENS && num_m_tiles * num_job_columns <= JOB_TILES / 2 * num_workers)
      set_tile(MAX_TOKENS / 2, args.num_k_splits);
  }

  DISTMK_FN TileRows tile_rows(const LinearJobsArgs& args, uint32_t m_tile) const {
    const uint32_t slab = m_tile / tiles_per_slab, first = m_tile % tiles_per_slab * M_TILE;
    const uint32_t begin = part_begin(args, slab), rows = part_begin(args, slab + 1) - begin;
    return {slab, begin, rows, first, first < rows ? min(M_TILE, rows - first) : 0};
  }
  DISTMK_FN static BlockRange blocks_of(const LinearJobsArgs& args, uint32_t k_split) {
    constexpr uint32_t PER_TILE = K_TILE / ACTIVATION_BLOCK_COLS;
    const uint32_t num_blocks = num_k_blocks(args), num_tiles = (num_blocks + PER_TILE - 1) / PER_TILE;
    const auto at = [&](uint32_t i) { return min(num_tiles * i / args.num_k_splits * PER_TILE, num_blocks); };
    return {at(k_split), at(k_split + 1)};
  }

 private:
  DISTMK_FN void set_tile(uint32_t tokens, uint32_t num_k_splits) {
    tile_tokens = tokens;
    num_n_tiles = (num_tokens + tile_tokens - 1) / tile_tokens;
    num_job_columns = num_n_tiles * num_k_splits;
  }
};

// The unit of work that the consumers multiply between two epilogues.
struct Job {
  uint32_t first_tile, num_tiles;    // M tiles
  uint32_t first_token, num_tokens;  // tokens of the N tile
  uint32_t k_split;
};

// With many tokens, a job takes as long as its activations take from L2. All jobs then have as few M tiles as possible,
// which leaves more room for activations (rings.cuh).
DISTMK_FN constexpr bool splits_evenly(uint32_t tile_tokens) { return tile_tokens >= MAX_TOKENS / 2; }

// Iterates over a worker's jobs. `instance`: the worker's number. `num_workers`: the number of workers that take part.
class JobCursor {
 public:
  DISTMK_FN JobCursor(const JobGrid& grid, uint32_t instance, uint32_t num_workers) : grid_(grid) {
    const uint32_t num_job_columns = grid.num_job_columns;
    if (num_workers < num_job_columns) {
      job_column_ = instance, step_ = num_workers, num_shares_ = 1, share_ = 0;
    } else {
      job_column_ = num_job_columns ? instance % num_job_columns : 0, step_ = num_job_columns;
      num_shares_ = num_job_columns ? (num_workers - job_column_ + num_job_columns - 1) / num_job_columns : 1;
      share_ = num_job_columns ? instance / num_job_columns : 0;
    }
    next_ = begin();
    const uint32_t num_tiles = end() - begin(), num_jobs = (num_tiles + JOB_TILES - 1) / JOB_TILES;
    job_tiles_ = splits_evenly(grid.tile_tokens) && num_jobs ? (num_tiles + num_jobs - 1) / num_jobs : JOB_TILES;
  }
  // The largest number of M tiles in a job.
  DISTMK_FN uint32_t job_tiles() const { return job_tiles_; }
  // Moves on to the next job. False: there is none.
  DISTMK_FN bool next(Job& job) {
    while (next_ == end()) {
      job_column_ += step_;
      if (job_column_ >= grid_.num_job_columns || !step_) return false;
      next_ = begin();
    }
    if (job_column_ >= grid_.num_job_columns) return false;
    const uint32_t n_tile = job_column_ % grid_.num_n_tiles, first_token = n_tile * grid_.tile_tokens;
    job = {next_, min(job_tiles_, end() - next_), first_token, min(grid_.tile_tokens, grid_.num_tokens - first_token),
           job_column_ / grid_.num_n_tiles};
    next_ += job.num_tiles;
    return true;
  }

 private:
  const JobGrid& grid_;
  uint32_t job_column_, step_;   // columns of jobs
  uint32_t share_, num_shares_;  // this worker's share of the column's M tiles
  uint32_t next_;                // M tile
  uint32_t job_tiles_;

  DISTMK_FN uint32_t begin() const { return grid_.num_m_tiles * share_ / num_shares_; }
  DISTMK_FN uint32_t end() const { return grid_.num_m_tiles * (share_ + 1) / num_shares_; }
};

}  // namespace jobs
}  // namespace distmk
