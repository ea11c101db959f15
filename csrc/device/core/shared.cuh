// A worker CTA's shared memory: its layout, and how a consumer warp finds its own part of it.
#pragma once
#include "device/core/overlays.cuh"
#include "runtime/splits.h"

namespace distmk {

static_assert(2 * N_TILE >= MAX_ROWS, "two tiles hold all rows");
constexpr uint32_t LOCAL_RING_ENTRIES = 16;

// The two buffers of the intra-CTA split-K reduction: one is written while the other is reduced.
struct SplitKBuffers {
  static constexpr uint32_t COUNT = 2;
  // Buffer and barrier phase of a reduction round; rounds count from the beginning of the launch.
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

// A consumer warp's position in what it shares with others. Each warp goes through tasks at its own pace.
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
  uint32_t begin, end;             // positions of this split
  uint32_t num_rows;               // of the batch
};

// The first attention instance that is assigned to this worker (device/attention/work_assignment.cuh).
struct alignas(16) AttentionAssignment {
  AttentionSplit split;
  uint32_t lines[NUM_WARPS];              // of the KV cache, at which the warps' first chunks begin
  uint32_t new_line;                      // of the split's first new position, if it has one
  uint32_t num_instances;                 // of the whole task; the fields above are set only if this worker has one
  uint32_t at_hand[NUM_HANDSHAKE_SLOTS];  // a KvPath, by handshake slot: whether the above is about that task
  uint32_t rounds[NUM_WARPS];             // assigned instances that a consumer warp has completed
  // From dispatcher to loader, for successive attention tasks in rotation: whether the keys and values of the first
  // assigned instance come through the pipeline.
  uint64_t told[2];
  uint8_t streams[2];
  Flag num_heard;  // tasks that the loader has learned of

  DISTMK_FN void init() {
    for (uint64_t& barrier : told) barrier_init(&barrier, WARP_ARRIVALS);
    for (uint32_t& round : rounds) round = 0;
    num_heard = {0};
  }
};
// What a body finds in the AttentionAssignment, and which way its keys and values come: nothing; the split, any way;
// the split, through the pipeline; the split of a decode row, of which each warp loads one chunk from memory.
enum KvPath : uint32_t { UNASSIGNED, ASSIGNED, PIPELINED, NEAR };

constexpr uint32_t CACHED_RANKS = 8;  // of more ranks, the batcher reads the candidates in global memory

// What the scheduler step works on.
struct SchedulerCopies {
  alignas(16) BatcherState state;
  alignas(16) Batch batch;
  Candidate candidates[CACHED_RANKS * MAX_ROWS];
};

struct Shared {
  char stages[STAGES_BYTES];  // first, as they must be aligned; what these regions hold: overlays.cuh
  char work[WORK_BYTES];
  char scratch[SCRATCH_BYTES];
  float squares[MAX_ROWS][NUM_WARPS];  // sums of squares of the activations, for RMSNorm
  Pipeline pipeline;
  SplitKBuffers split_k;
  ConsumerState consumer[NUM_WARPS];
  Flag num_slabs[NUM_WARPS];         // slabs that a consumer warp has released
  uint32_t task_numbers[NUM_WARPS];  // of a consumer warp's current task
  TaskPipeline tasks;
  TaskSlot dispatched[2], scheduled[2];  // tasks held by the dispatcher and by the scheduler
  TaskHandshake handshake;
  uint64_t attention_schedule;  // the iteration + 1 whose schedule is in the scratch memory (device/jobs); 0: none
  AttentionAssignment attention_assignment;
  LocalRing local_ring;
  alignas(16) Batch batch;
  uint64_t num_batches;      // see RankState::num_cached_batches
  uint64_t product_entered;  // from consumers to loader: they have entered the body of a product in jobs (device/jobs)
  SchedulerCopies prepare;
  alignas(16) char state_memory[sizeof(RankState)];
  alignas(16) char transport_memory[16];  // of Transport
  LaunchParams params;
  ProgramHeader header;
  uint32_t worker_index;      // see device/core/worker_index.cuh; num_workers: the CTA of the schedulers
  bool dispatcher_schedules;  // the dispatcher steps the worker's own scheduler
  uint64_t heap_bases[MAX_RANKS];

  // The first T of an overlay.
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

constexpr uint32_t MAX_SHARED_BYTES = 232448;  // of a block, compute capability 9.0 and 10.0
static_assert(sizeof(Shared) <= MAX_SHARED_BYTES, "a worker's shared memory does not fit");

#ifndef DISTMK_EMULATED
extern __shared__ __align__(1024) char shared_memory[];
#endif
#if defined(DISTMK_EMULATED) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900)
DISTMK_FN Shared& shared() { return *reinterpret_cast<Shared*>(shared_memory); }
DISTMK_FN void check_shared() {}
#else
// Shared memory begins behind the 1 KB that every block leaves to the system. A number, because the compiler computes
// the address of a symbol anew or keeps it on the stack.
constexpr uint32_t SHARED_BEGIN = 1024;
DISTMK_FN Shared& shared() { return *static_cast<Shared*>(__cvta_shared_to_generic(SHARED_BEGIN)); }
DISTMK_FN void check_shared() {
  if (shared_address(shared_memory) != SHARED_BEGIN) __trap();
}
#endif

DISTMK_FN const RankState& own_rank_state() { return *reinterpret_cast<const RankState*>(shared().state_memory); }

// The consumer warp of this thread. Opaque: the compiler would keep what follows from it in a register in all tasks.
DISTMK_FN uint32_t own_warp() { return opaque(threadIdx.x) / 32; }

DISTMK_FN ConsumerState consumer_state() { return shared().consumer[own_warp()]; }
// By a consumer warp that has released all stages that the loader filled for its task (mostly a slab).
DISTMK_FN void store_consumer_state(const ConsumerState& consumer) {
  const uint32_t warp = own_warp();
  __syncwarp();
  if (threadIdx.x % 32) return;
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
