// Factors of a GEMM's sums in jobs, which only the kernel for packed weights has: scales of the matrix and of its rows.
// Elsewhere these types are empty.
#pragma once
#include "device/jobs/job_grid.cuh"

namespace distmk {
namespace jobs {

#ifdef DISTMK_PACKED
// The scales of the rows of a job's M tiles; null: the format has none.
struct RowScales {
  const float* of_tile[JOB_TILES];
};
// The factors of a feature's sums: of its row, and of its up row.
struct SumScale {
  float factor, up_factor;

  // Row `row` of M tile `tile`, whose up rows are `up` rows further down.
  DISTMK_FN void load(const LinearJobsArgs& args, const RowScales& scales, uint32_t tile, uint32_t row, uint32_t up) {
    const float* of_rows = scales.of_tile[tile];
    factor = up_factor = args.scale ? args.scale : 1.0f;
    if (!of_rows) return;
    factor *= of_rows[row];
    if (is_paired(args)) up_factor *= of_rows[row + up];
  }
  DISTMK_FN float of(float sum) const { return sum * factor; }
  DISTMK_FN float of_up(float sum) const { return sum * up_factor; }
};
#else
struct RowScales {};
struct SumScale {
  DISTMK_FN void load(const LinearJobsArgs&, const RowScales&, uint32_t, uint32_t, uint32_t) {}
  DISTMK_FN float of(float sum) const { return sum; }
  DISTMK_FN float of_up(float sum) const { return sum; }
};
#endif

}  // namespace jobs
}  // namespace distmk
