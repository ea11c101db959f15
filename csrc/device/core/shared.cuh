// The layout of a worker CTA's shared memory, which all roles share, and how a consumer warp finds its own part of it.
#pragma once
#include "device/core/overlays.cuh"
#include "runtime/splits.h"

namespace distmk {

static_assert(2 * N_TILE >= MAX_ROWS, "two tiles hold all rows");
constexpr uint32_t LOCAL_RING_ENTRIES = 16;

// The two buffers of the intra-CTA split-K reduction: one is written while the other is reduced.
struct SplitKBuffers {
  static constexpr uint32_t COUNT = 2;
  // Buffer and barrier phase of a reduction round. Rounds count from the beginning of the launch.
  DISTMK_FN static uint32_t slot(uint32_t round) { return round % COUNT; }
  DISTMK_FN static uint32_t parity(uint32_t round) { return round / COUNT % 2; }
  uint64_t full[COUNT], empty[COUNT];

  DISTMK_FN void init() {
    for (uint32_t i = 0; i < COUNT; ++i) {
      barrier_init(&full[i], NUM_WARPS * WARP_ARRIVALS);
      barrier_init(&empty[i], NUM_WARPS * WARP_ARRIVALS);
    }
  }
};

// A consumer warp's position in the pipeline and in the split-K buffers. Each warp has its own, because it goes through
// tasks at its own pace.
struct ConsumerState {
  PipelineState<NUM_STAGES> stage;
  uint32_t reduction_round = 0;
};

struct LocalRing {
  JitRing ring;
  JitEntry entries[LOCAL_RING_ENTRIES];
};

// The work of one attention instance, the same in every layer.
struct AttentionSplit {
  AttentionInstance instance;
  BatchRun run;
  uint32_t first_head, num_heads;  // query heads of this rank that share the KV head
  uint32_t begin, end;             // KV positions of this split
  uint32_t num_rows;               // rows of the batch
};

// The first attention instance assigned to this worker. The dispatcher writes it
// (device/attention/work_assignment.cuh), and consumers and loader read it.
struct alignas(16) AttentionAssignment {
  AttentionSplit split;
  uint32_t lines[NUM_WARPS];  // cache row at which each warp's first tile begins
  uint32_t new_line;          // cache row of the split's first new position, if it has one
  uint32_t num_instances;     // instances of the whole task; the fields above are set only if this worker has one
  uint32_t kv_path[NUM_HANDSHAKE_SLOTS];  // the KvPath of the task in each handshake slot
  uint32_t rounds[NUM_WARPS];             // instances of the current task that each consumer warp has completed
  // Notification from dispatcher to loader, for successive attention tasks in rotation: whether the keys and values of
  // the first assigned instance come through the pipeline.
  uint64_t notified[2];
  uint8_t streams[2];
  Flag num_received;  // number of notifications that the loader has received

  DISTMK_FN void init() {
    for (uint64_t& barrier : notified) barrier_init(&barrier, WARP_ARRIVALS);
    for (uint32_t& round : rounds) round = 0;
    num_received = {0};
  }
};
// The contents of the AttentionAssignment for a body, and the body's way to keys and values. UNASSIGNED: it holds
// nothing. ASSIGNED: it holds the split, and the warps gather rows from the cache. PIPELINED: it holds the split, and
// the loader streams keys and values through the pipeline. ONE_TILE_PER_WARP: it holds the split of a batch's only row,
// and each warp loads at most one tile straight from the cache.
enum KvPath : uint32_t { UNASSIGNED, ASSIGNED, PIPELINED, ONE_TILE_PER_WARP };

constexpr uint32_t CACHED_RANKS = 8;  // with more ranks, the batcher reads the candidates from global memory

// Copies that the scheduler step works on.
struct SchedulerCopies {
  alignas(16) BatcherState state;
  alignas(16) Batch batch;
  union {
    Candidate candidates[CACHED_RANKS * MAX_ROWS];  // of a slab iteration
    TokenEvent events[EVENTS_PER_ROW * MAX_ROWS];   // in a job program, the step's first events
  };
};

struct Shared {
  char stages[STAGES_BYTES];  // first, because of their alignment; overlays.cuh says what the three regions hold
  char work[WORK_BYTES];
  char scratch[SCRATCH_BYTES];
  float squares[MAX_ROWS][NUM_WARPS];  // sums of squares of the activations, for RMSNorm
  Pipeline pipeline;
  SplitKBuffers split_k;
  ConsumerState consumer[NUM_WARPS];
  Flag num_slabs[NUM_WARPS];         // slabs that each consumer warp has released
  uint32_t task_numbers[NUM_WARPS];  // each consumer warp's current task
  TaskPipeline tasks;
  TaskSlot dispatched[2], scheduled[2];  // tasks that the dispatcher and the scheduler hold
  TaskHandshake handshake;
  uint64_t attention_schedule;  // 1 + the iteration whose schedule is in scratch memory (device/jobs); 0: none
  AttentionAssignment attention_assignment;
  LocalRing local_ring;
  alignas(16) Batch batch;
  uint64_t num_batches;      // see RankState::num_cached_batches
  uint64_t product_entered;  // consumers to loader: they have entered the body of a GEMM in jobs (device/jobs)
  SchedulerCopies prepare;
  alignas(16) char state_memory[sizeof(RankState)];
  alignas(16) char transport_memory[16];  // holds a Transport
  LaunchParams params;
  ProgramHeader header;
  uint32_t worker_index;      // see device/core/worker_index.cuh; the schedulers' CTA has num_workers
  bool dispatcher_schedules;  // the dispatcher steps the worker's own scheduler
  uint64_t heap_bases[MAX_RANKS];

  // The beginning of an overlay, as a T.
  template <Overlay WHAT, class T = char>
  DISTMK_FN T* at() {
    using Place = PlaceOf<WHAT>;
    static_assert(sizeof(T) <= Place::BYTES && Place::FIRST_BYTE % alignof(T) == 0, "");
    if constexpr (Place::REGION == regions::STAGES.begin)
      return reinterpret_cast<T*>(stages + Place::BEGIN);
    else if constexpr (Place::REGION == regions::WORK.begin)
      return reinterpret_cast<T*>(work + Place::BEGIN);
    else
      return reinterpret_cast<T*>(scratch + Place::BEGIN);
  }
};
static_assert(offsetof(Shared, work) == regions::WORK.begin && offsetof(Shared, scratch) == regions::SCRATCH.begin, "");

constexpr uint32_t MAX_SHARED_BYTES = 232448;  // limit of a block on compute capability 9.0 and 10.0
static_assert(sizeof(Shared) <= MAX_SHARED_BYTES, "a worker's shared memory does not fit");

#ifndef DISTMK_EMULATED
extern __shared__ __align__(1024) char shared_memory[];
#endif
#if defined(DISTMK_EMULATED) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900)
DISTMK_FN Shared& shared() { return *reinterpret_cast<Shared*>(shared_memory); }
DISTMK_FN void check_shared() {}
#else
// Dynamic shared memory begins behind the 1 KB that the system reserves in every block. The address is a constant,
// because the compiler would compute a symbol's address anew or keep it on the stack.
constexpr uint32_t SHARED_BEGIN = 1024;
DISTMK_FN Shared& shared() { return *static_cast<Shared*>(__cvta_shared_to_generic(SHARED_BEGIN)); }
DISTMK_FN void check_shared() {
  if (shared_address(shared_memory) != SHARED_BEGIN) __trap();
}
#endif

DISTMK_FN const RankState& own_rank_state() { return *reinterpret_cast<const RankState*>(shared().state_memory); }

// This thread's consumer warp. Opaque, because the compiler would otherwise keep values derived from it in registers
// across all tasks.
DISTMK_FN uint32_t own_warp() { return opaque(threadIdx.x) / 32; }
// This thread, opaque as own_warp() is in the kernel for packed weights alone. It has more bodies that would keep such
// values, and too few registers for them.
DISTMK_FN uint32_t own_thread() {
#ifdef DISTMK_PACKED
  return opaque(threadIdx.x);
#else
  return threadIdx.x;
#endif
}

DISTMK_FN ConsumerState consumer_state() { return shared().consumer[own_warp()]; }
// Called by a consumer warp that has released all stages that the loader filled for its task (mostly one slab).
DISTMK_FN void store_consumer_state(const ConsumerState& consumer) {
  const uint32_t warp = own_warp();
  __syncwarp();
  if (own_thread() % 32) return;
  shared().consumer[warp] = consumer;
  shared().num_slabs[warp].set(shared().num_slabs[warp].get() + 1);
}

DISTMK_FN uint32_t task_number() { return shared().task_numbers[own_warp()]; }

// A body's view of the handshake, declared in platform/start_signal.h.
DISTMK_FN bool StartSignal::wait() const {
  if (!issued) return true;
  TaskHandshake& handshake = shared().handshake;
  return handshake.wait_ready(task_number(), shared().params.trace_capacity) &&
         !(may_be_revoked && handshake.is_revoked(task_number()));
}
DISTMK_FN bool StartSignal::confirm() const { return !issued || shared().handshake.wait_ready(task_number(), false); }
DISTMK_FN void StartSignal::wait_previous() const {
  if (issued) shared().handshake.wait_previous(task_number());
}
DISTMK_FN bool StartSignal::is_ready() const { return !issued || shared().handshake.is_ready(task_number()); }
DISTMK_FN void StartSignal::record_time() const {
  if (threadIdx.x == 0 && issued && shared().params.trace_capacity) shared().handshake.record_time(task_number());
}

}  // namespace distmk
