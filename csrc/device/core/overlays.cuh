// The layout of a worker's shared memory over time. Each of its three large regions holds something else in each phase
// of the worker; what a region holds in a phase is an overlay. Every use of the regions goes through the table below
// (csrc/README.md shows it).
#pragma once
#include "device/core/task_queue.cuh"

namespace distmk {

// Stride in floats between the tokens of a warp's partial sums: the rows of an M block, padded against bank conflicts.
constexpr uint32_t PARTIAL_SUM_STRIDE = 68;
static_assert(PARTIAL_SUM_STRIDE >= M_BLOCK, "");
constexpr uint32_t WORK_BYTES = 8192, SCRATCH_BYTES = NUM_WARPS * N_TILE * PARTIAL_SUM_STRIDE * sizeof(float),
                   BODY_BYTES = WORK_BYTES + SCRATCH_BYTES;

struct Region {
  uint32_t begin, bytes;
};
namespace regions {
constexpr Region STAGES = {0, STAGES_BYTES}, WORK = {STAGES_BYTES, WORK_BYTES},
                 SCRATCH = {STAGES_BYTES + WORK_BYTES, SCRATCH_BYTES};
constexpr Region BODY = {WORK.begin, BODY_BYTES};  // work and scratch together
}  // namespace regions

// What a worker's consumers are running, one bit each. Overlays that share a phase have no byte in common.
enum Phase : uint32_t {
  GEMV = 1 << 0,    // a slab times one token
  SLAB = 1 << 1,    // a slab times several tokens
  HEAD = 1 << 2,    // a slab of the LM head, which keeps the best tokens
  ARGMAX = 1 << 3,  // the end of a head slab, when its sums are complete
  SPLIT = 1 << 4,   // attention over one split of the KV cache
  SAMPLING = 1 << 5,
  PRODUCT = 1 << 6,      // a GEMM of a whole matrix in jobs (device/jobs)
  APPEND = 1 << 7,       // appends the keys and values of an iteration's rows
  BLOCK_JOB = 1 << 8,    // attention for a block of queries
  ROW_JOBS = 1 << 9,     // attention for runs with few queries
  ROW_SUM = 1 << 10,     // the sum of an all-reduce, row by row
  OWN_BODY = 1 << 11,    // a body of a registered task type
  SCHEDULERS = 1 << 12,  // no consumers: the schedulers' CTA
  JOB_STEP = 1 << 13     // the scheduler step of a job program, which runs when all tasks of the iteration are done
};
constexpr uint32_t SLABS = GEMV | SLAB | HEAD | ARGMAX, LAYERS = PRODUCT | APPEND | BLOCK_JOB | ROW_JOBS | ROW_SUM;

constexpr uint32_t PIPELINE_BYTES = NUM_STAGES * STAGE_BYTES;
constexpr uint32_t PAGES_BYTES = 8192, SCHEDULE_BYTES = 20 * MAX_SEQUENCES + 64;

// With packed weights, accumulators and activations are behind the pipeline.
#ifdef DISTMK_PACKED
constexpr uint32_t GEMV_ACCUMULATORS_BYTES = ACCUMULATORS_BYTES / 2,
                   GEMV_ACCUMULATORS_BEGIN = STAGES_BYTES - GEMV_ACCUMULATORS_BYTES,
                   ACCUMULATORS_BEGIN = STAGES_BYTES - ACCUMULATORS_BYTES;
#define DISTMK_PACKED_OVERLAYS(X)                                                       \
  /* accumulators of each thread */                                                     \
  X(ACCUMULATORS, STAGES, ACCUMULATORS_BEGIN, ACCUMULATORS_BYTES, SLAB | HEAD | ARGMAX) \
  X(GEMV_ACCUMULATORS, STAGES, GEMV_ACCUMULATORS_BEGIN, GEMV_ACCUMULATORS_BYTES, GEMV)  \
  /* input vector of a GEMV */                                                          \
  X(GEMV_INPUT, STAGES, PIPELINE_BYTES, GEMV_ACCUMULATORS_BEGIN - PIPELINE_BYTES, GEMV) \
  /* factors of the norm before a slab */                                               \
  X(NORM_FACTORS, STAGES, PIPELINE_BYTES, ACCUMULATORS_BEGIN - PIPELINE_BYTES, SLAB | HEAD | ARGMAX)
#else
#define DISTMK_PACKED_OVERLAYS(X) \
  /* input vector of a GEMV */    \
  X(GEMV_INPUT, WORK, 0, WORK_BYTES, GEMV)
#endif

// For each overlay: a comment on its contents, then its name, region, first byte in the region, size in bytes and
// phases.
#define DISTMK_OVERLAYS(X)                                                                  \
  /* pipeline stages from loader to consumers: weights, or keys and values of a split */    \
  X(PIPELINE_STAGES, STAGES, 0, PIPELINE_BYTES, SLABS | SPLIT | SAMPLING | OWN_BODY)        \
  DISTMK_PACKED_OVERLAYS(X)                                                                 \
  /* best token of each thread, by row */                                                   \
  X(THREAD_CANDIDATES, WORK, 0, WORK_BYTES, HEAD | ARGMAX)                                  \
  /* partial sums of each warp: one round, or two of half as many tokens */                 \
  X(PARTIAL_SUMS, SCRATCH, 0, SCRATCH_BYTES, GEMV | SLAB | HEAD)                            \
  /* best token of each warp, by row */                                                     \
  X(WARP_CANDIDATES, SCRATCH, 0, SCRATCH_BYTES, ARGMAX)                                     \
  /* new keys and values, queries, partials of each warp */                                 \
  X(SPLIT_ROWS, BODY, 0, BODY_BYTES, SPLIT)                                                 \
  /* `SamplingMemory` */                                                                    \
  X(SAMPLER, BODY, 0, BODY_BYTES, SAMPLING)                                                 \
  /* rings of weights and activations from loader to consumers; over one, a job's output */ \
  X(PRODUCT_RINGS, STAGES, 0, STAGES_BYTES, PRODUCT)                                        \
  /* operand of warps without weights; its values do not matter */                          \
  X(NO_WEIGHTS, WORK, 0, WORK_BYTES, PRODUCT)                                               \
  /* `Rings`: barriers, plans and output features of jobs; loader and consumers */          \
  X(RING_STATE, SCRATCH, 0, SCRATCH_BYTES - SCHEDULE_BYTES, PRODUCT)                        \
  /* `AttentionSchedule`, from an iteration's first attention to its last */                \
  X(SCHEDULE, SCRATCH, SCRATCH_BYTES - SCHEDULE_BYTES, SCHEDULE_BYTES, LAYERS)              \
  /* queries, keys, values and RoPE of rows */                                              \
  X(APPENDED_HEADS, STAGES, 0, STAGES_BYTES, APPEND)                                        \
  /* `AppendState` */                                                                       \
  X(APPEND_STATE, WORK, 0, WORK_BYTES, APPEND)                                              \
  /* `AttentionPlan` */                                                                     \
  X(PLAN, WORK, 0, WORK_BYTES, BLOCK_JOB | ROW_JOBS)                                        \
  /* buffers of keys and values; behind them queries, or partials of ways */                \
  X(KV_BUFFERS, STAGES, 0, STAGES_BYTES - PAGES_BYTES, BLOCK_JOB)                           \
  /* cache rows of pages */                                                                 \
  X(PAGES, STAGES, STAGES_BYTES - PAGES_BYTES, PAGES_BYTES, BLOCK_JOB)                      \
  /* for each warp, a ring of keys and values, in it later the warp's accumulator */        \
  X(ROW_RINGS, STAGES, 0, STAGES_BYTES, ROW_JOBS)                                           \
  /* sums of rows */                                                                        \
  X(SUMS, STAGES, 0, STAGES_BYTES, ROW_SUM)                                                 \
  /* sums of squares of each warp, by row */                                                \
  X(SQUARES, WORK, 0, WORK_BYTES, ROW_SUM)                                                  \
  /* free for the body */                                                                   \
  X(OWN_WORK, WORK, 0, WORK_BYTES, OWN_BODY)                                                \
  /* tasks that each scheduler holds */                                                     \
  X(SCHEDULER_TASKS, STAGES, 0, 2 * MAX_OWN_SCHEDULERS * sizeof(TaskSlot), SCHEDULERS)      \
  /* sequences in the slots from MAX_ROWS on */                                             \
  X(FAR_SEQUENCES, WORK, 0, (MAX_SEQUENCES - MAX_ROWS) * sizeof(Sequence), SCHEDULERS | JOB_STEP)

enum class Overlay : uint32_t {
#define DISTMK_NAME(name, region, begin, bytes, phases) name,
  DISTMK_OVERLAYS(DISTMK_NAME)
#undef DISTMK_NAME
};

struct OverlayPlace {
  Region region;
  uint32_t begin, bytes, phases;

  constexpr uint32_t first_byte() const { return region.begin + begin; }  // in shared memory
  constexpr bool fits() const { return begin + bytes <= region.bytes; }
  constexpr bool collides_with(const OverlayPlace& other) const {
    return (phases & other.phases) && first_byte() < other.first_byte() + other.bytes &&
           other.first_byte() < first_byte() + bytes;
  }
};
constexpr OverlayPlace OVERLAY_PLACES[] = {
#define DISTMK_PLACE(name, region, begin, bytes, phases) {regions::region, begin, bytes, phases},
    DISTMK_OVERLAYS(DISTMK_PLACE)
#undef DISTMK_PLACE
};
constexpr const OverlayPlace& place_of(Overlay overlay) { return OVERLAY_PLACES[static_cast<uint32_t>(overlay)]; }
constexpr uint32_t overlay_bytes(Overlay overlay) { return place_of(overlay).bytes; }

constexpr bool overlays_fit() {
  for (const OverlayPlace& place : OVERLAY_PLACES)
    if (!place.fits()) return false;
  return true;
}
constexpr bool overlays_collide() {
  for (const OverlayPlace& a : OVERLAY_PLACES)
    for (const OverlayPlace& b : OVERLAY_PLACES)
      if (&a != &b && a.collides_with(b)) return true;
  return false;
}
static_assert(overlays_fit(), "an overlay is larger than its region");
static_assert(!overlays_collide(), "overlays of one phase have bytes in common");

// An overlay's place as compile-time constants.
template <Overlay WHAT>
struct PlaceOf {
  static constexpr uint32_t REGION = place_of(WHAT).region.begin, BEGIN = place_of(WHAT).begin,
                            FIRST_BYTE = REGION + BEGIN, BYTES = place_of(WHAT).bytes;
};

}  // namespace distmk
