// Row jobs of attention that several workers share: each worker leaves its partials in global memory, and the one that
// comes last combines them. Nobody waits. Partials are added up in the order of workers, whoever does it.
#pragma once
#include "device/jobs/row_jobs.cuh"

namespace distmk {
namespace jobs {

// A worker's partials of a job that it shares with others. It shares at most two: the one at the beginning of its tiles
// began at an earlier worker, and the one at their end goes on at the next worker.
class SharePartials {
 public:
  // part: number of the worker among those that share the job.
  DISTMK_FN SharePartials(const RowJob& job, uint32_t part)
      : begin_(of_worker(job.first_worker + part) + (part ? 0 : ROW_PARTIAL_FLOATS)) {}

  DISTMK_FN void store(uint32_t query, const LogSumExp<Base2>& softmax) const {
    *at(query) = {softmax.max, softmax.sum};
  }
  DISTMK_FN void store(uint32_t query, uint32_t pair, float2 accumulated) const { *at(query, pair) = accumulated; }
  // Loads go past L1, which may have older partials.
  DISTMK_FN LogSumExp<Base2> softmax(uint32_t query) const {
    const float2 loaded = __ldcg(at(query));
    return {loaded.x, loaded.y};
  }
  DISTMK_FN float2 accumulated(uint32_t query, uint32_t pair) const { return __ldcg(at(query, pair)); }

  // Counts the workers that have left their partials of the job that ends at a later worker than `worker`.
  DISTMK_FN static uint32_t* counter(uint32_t worker) {
    return reinterpret_cast<uint32_t*>(of_worker(worker) + 2 * ROW_PARTIAL_FLOATS);
  }

 private:
  float* begin_;  // float2 [ROW_QUERIES], maxima and sums; then float2 [ROW_QUERIES, columns / 2]

  DISTMK_FN static float* of_worker(uint32_t worker) {
    return at_operand<float>(attention_plan().args.shares) + worker * ROW_SHARE_FLOATS;
  }
  DISTMK_FN float2* at(uint32_t query) const { return reinterpret_cast<float2*>(begin_) + query; }
  DISTMK_FN float2* at(uint32_t query, uint32_t pair) const {
    constexpr uint32_t PAIRS = MAX_HEAD_DIM / 4;  // row jobs have heads of at most half as many elements
    static_assert(ROW_PARTIAL_FLOATS == ROW_QUERIES * (2 + 2 * PAIRS), "");
    return reinterpret_cast<float2*>(begin_) + ROW_QUERIES + query * PAIRS + pair;
  }
};

// Combines the partials of a job's pieces. softmax(piece, query) and accumulated(piece, query, pair) return a partial;
// visit(query, pair, total, o) gets the sums over all pieces. Each thread of the team takes some pairs of columns.
template <uint32_t DIM, class Softmax, class Accumulated, class Visit>
DISTMK_FN void for_each_combined(const RowJob& job, const Team& team, uint32_t num_pieces, const Softmax& softmax,
                                 const Accumulated& accumulated, const Visit& visit) {
#pragma unroll 1
  for (uint32_t i = team.index; i < job.num_queries() * DIM / 2; i += team.size) {
    const uint32_t query = i / (DIM / 2), pair = i % (DIM / 2);
    if (2 * pair >= attention_plan().args.head_dim) continue;
    auto total = begin_merge<Base2>(num_pieces, [&](uint32_t piece) { return softmax(piece, query); });
    const float max = total.max;  // -inf: the query sees none of these positions
    total.max = finite_max(max);
    float2 o = {0.0f, 0.0f};
#pragma unroll 2
    for (uint32_t piece = 0; piece < num_pieces; ++piece) {
      const float weight = total.add(softmax(piece, query));
      const float2 each = accumulated(piece, query, pair);
      o.x += weight * each.x;
      o.y += weight * each.y;
    }
    total.max = max;
    visit(query, pair, total, o);
  }
}
// Stores the outputs of a job from the partials of all its pieces.
template <uint32_t DIM, class Softmax, class Accumulated>
DISTMK_FN void store_combined(const RowJob& job, const Team& team, uint32_t num_pieces, const Softmax& softmax,
                              const Accumulated& accumulated) {
  const AttentionJobsArgs& args = attention_plan().args;
  auto* out = at_operand<__nv_bfloat16>(args.out);
  for_each_combined<DIM>(job, team, num_pieces, softmax, accumulated,
                         [&](uint32_t query, uint32_t pair, const LogSumExp<Base2>& total, float2 o) {
                           const float scale = normalizer(total.sum);
                           *reinterpret_cast<uint32_t*>(out + QueryPlace(job, query).output(args, 2 * pair)) =
                               pack_bf16(o.x * scale, o.y * scale);
                         });
}

// Ends this worker's parts of shared jobs. All consumers call it, when all warps have left their partials.
template <uint32_t DIM>
DISTMK_FN void combine_shares() {
  uint32_t* comes_last = attention_plan().partials.comes_last;
  barrier_sync<NUM_CONSUMERS>();
  if (threadIdx.x < 2) {
    RowJob job;
    comes_last[threadIdx.x] = 0;
    if (job.find_at_border(threadIdx.x)) {
      uint32_t* counter = SharePartials::counter(job.first_worker);
      comes_last[threadIdx.x] = count_up_in_order(counter) == job.num_workers;
      if (comes_last[threadIdx.x]) *counter = 0;
    }
  }
  barrier_sync<NUM_CONSUMERS>();
#pragma unroll 1
  for (uint32_t border = 0; border < 2; ++border) {
    RowJob job;
    if (!comes_last[border] || !job.find_at_border(border)) continue;
    store_combined<DIM>(
        job, {threadIdx.x, NUM_CONSUMERS}, job.num_workers,
        [&](uint32_t part, uint32_t query) { return SharePartials(job, part).softmax(query); },
        [&](uint32_t part, uint32_t query, uint32_t pair) {
          return SharePartials(job, part).accumulated(query, pair);
        });
  }
}

}  // namespace jobs
}  // namespace distmk
