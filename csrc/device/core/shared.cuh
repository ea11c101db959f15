// A worker CTA's shared memory.
#pragma once
#include "device/core/loader.cuh"
#include "device/core/task_queue.cuh"
#include "runtime/splits.h"
#include "runtime/worker.h"

namespace distmk {

constexpr uint32_t NUM_WARPS = NUM_CONSUMERS / 32;
constexpr uint32_t N_TILE = 8;  // columns of a product on tensor cores
constexpr uint32_t PARTIAL_SUM_STRIDE =
    68;  // of a warp's sums for a token: a round's rows, and room to lie in other banks
constexpr uint32_t SCRATCH_BYTES = NUM_WARPS * N_TILE * PARTIAL_SUM_STRIDE * sizeof(float);
constexpr uint32_t WORK_BYTES = 8192;  // of attention, with the scratch behind it, and of the head's candidates
static_assert(PARTIAL_SUM_STRIDE >= M_BLOCK, "");
static_assert(2 * N_TILE >= MAX_ROWS, "two tiles hold all rows");
constexpr uint32_t LOCAL_RING_ENTRIES = 16;

// Which code the consumers run for a task, so that they need not look it up: LINEAR and the rows that it multiplies, or
// OTHER and the task's type.
enum CodePath : uint32_t { LEAVE, ATTENTION, COMBINE, SUM, LINEAR, OTHER = LINEAR + MAX_ROWS + 1 };

// What the warps tell each other about a task: the waiter the consumers that it is announced, while others run where
// that can be, and everybody that its waits are met; the consumers the clerk that its body is done; the clerk the
// waiter that its triggers were fired. A task is announced once the waits of the last but one are met, or of the one
// before that, and the triggers of those before fired.
struct TaskHandshake {
  uint64_t issued[NUM_HANDSHAKE_SLOTS], ready[NUM_HANDSHAKE_SLOTS], done[NUM_HANDSHAKE_SLOTS],
      signaled[NUM_HANDSHAKE_SLOTS];
  Action action[NUM_HANDSHAKE_SLOTS];
  Flag code_path[NUM_HANDSHAKE_SLOTS];     // read anew wherever it is needed: there is no register for it
  uint64_t pushed[NUM_HANDSHAKE_SLOTS];    // ranks whose triggers the body has fired itself
  uint64_t ready_ns[NUM_HANDSHAKE_SLOTS];  // where the launch is traced
  Flag end_at;                             // from this task on none will be ready, as the launch is over
  Flag revoked;                            // the last task that was announced though another came

  DISTMK_FN void init() {
    for (uint32_t i = 0; i < NUM_HANDSHAKE_SLOTS; ++i) {
      barrier_init(&issued[i], WARP_ARRIVALS);
      barrier_init(&ready[i], WARP_ARRIVALS);
      barrier_init(&done[i], NUM_WARPS * WARP_ARRIVALS);
      barrier_init(&signaled[i], WARP_ARRIVALS);
    }
    end_at = revoked = {~0u};
  }
  DISTMK_FN void issue(const Team& team, uint32_t n, const Action& what, uint32_t how) {
    if (team.leader()) action[handshake_slot(n)] = what, code_path[handshake_slot(n)].set(how);
    warp_arrive(&issued[handshake_slot(n)]);
  }
  // The last task that was announced is not run: its number is that of no task.
  DISTMK_FN void revoke(const Team& team, uint32_t n) {
    if (team.leader()) revoked.set(n);
    warp_arrive(&ready[handshake_slot(n)]);
  }
  // Of a task that is ready. Until its triggers would have been fired no other is taken back.
  DISTMK_FN bool is_revoked(uint32_t n) const { return revoked.get() == n; }
  // By the consumers: task `n` is ready, and all warps have left the one before, so what it had in shared memory is
  // free. False: the launch is over.
  DISTMK_FN bool wait_ready(uint32_t n, bool traced) {
    barrier_wait(&ready[handshake_slot(n)], handshake_phase(n));
    if (is_ended(n)) return false;
    wait_previous(n);
    if (traced) record_time(n);
    return true;
  }
  DISTMK_FN void wait_previous(uint32_t n) {
    if (n) barrier_wait(&done[handshake_slot(n - 1)], handshake_phase(n - 1));
  }
  DISTMK_FN bool is_ready(uint32_t n) { return barrier_test(&ready[handshake_slot(n)], handshake_phase(n)); }
  // Of a task that is ready: whether that is because the launch is over.
  DISTMK_FN bool is_ended(uint32_t n) const { return end_at.get() <= n; }
  DISTMK_FN void record_time(uint32_t n) {
    if (opaque(threadIdx.x) == 0) ready_ns[handshake_slot(n)] = now_ns();
  }
};

// Two buffers for the sums of the warps: one is written while the other is added up.
struct SplitKBuffers {
  static constexpr uint32_t COUNT = 2;
  // Of a turn, since the launch began, which of them it is, and the parity of its barriers.
  DISTMK_FN static uint32_t slot(uint32_t turn) { return turn % COUNT; }
  DISTMK_FN static uint32_t parity(uint32_t turn) { return turn / COUNT % 2; }
  uint64_t full[COUNT], empty[COUNT];

  DISTMK_FN void init() {
    for (uint32_t i = 0; i < COUNT; ++i) {
      barrier_init(&full[i], NUM_WARPS * WARP_ARRIVALS);
      barrier_init(&empty[i], NUM_WARPS * WARP_ARRIVALS);
    }
  }
};

// Where a consumer warp is in what it shares with others; it goes through tasks at its own pace.
struct ConsumerState {
  PipelineState<NUM_STAGES> stage;
  uint32_t reduction_round = 0;
};

struct LocalRing {
  JitRing ring;
  JitEntry entries[LOCAL_RING_ENTRIES];
};

// What an instance of attention has to do, whatever the layer.
struct AttentionSplit {
  AttentionInstance instance;
  BatchRun run;
  uint32_t first_head, num_heads;  // query heads of this rank that share the KV head
  uint32_t begin, end;             // positions of this split
  uint32_t num_rows;               // of the batch
};

// The first instance of this worker's share of attention, see device/attention/work_assignment.cuh.
struct alignas(16) AttentionAssignment {
  AttentionSplit split;
  uint32_t lines[NUM_WARPS];              // of the cache, where the warps' first chunks begin
  uint32_t new_line;                      // and where the first new position goes that is this split's, if there is one
  uint32_t num_instances;                 // of the whole task; all of the above is set only if this worker has one
  uint32_t at_hand[NUM_HANDSHAKE_SLOTS];  // a KvPath: whether this is about a task, at its place
  uint32_t rounds[NUM_WARPS];             // instances of its share that a consumer warp is done with
  // What the waiter tells the loader of a spread task of attention, by turns: whether its first instance's keys and
  // values come through the ring.
  uint64_t told[2];
  uint8_t streams[2];
  Flag num_heard;  // of how many the loader has heard

  DISTMK_FN void init() {
    for (uint64_t& barrier : told) barrier_init(&barrier, WARP_ARRIVALS);
    for (uint32_t& round : rounds) round = 0;
    num_heard = {0};
  }
};
enum KvPath : uint32_t { UNASSIGNED, ASSIGNED, PIPELINED, NEAR };

constexpr uint32_t CACHED_RANKS = 8;  // whose candidates the batcher has at hand; those of more are read where they lie

struct SchedulerCopies {
  alignas(16) BatcherState state;
  alignas(16) Batch batch;
  Candidate candidates[CACHED_RANKS * MAX_ROWS];
};

struct Shared {
  char slots[NUM_STAGES * STAGE_BYTES];  // first: stages must be aligned
  char work[WORK_BYTES];
  char scratch[SCRATCH_BYTES];
  float squares[MAX_ROWS][NUM_WARPS];  // of the activations, for their norm
  Ring ring;
  SplitKBuffers sums;
  ConsumerState consumer[NUM_WARPS];
  Flag num_slabs[NUM_WARPS];         // that a consumer warp has drained
  uint32_t task_numbers[NUM_WARPS];  // that a consumer warp is at, since the launch began
  TaskPipeline tasks;
  TaskSlot dispatched[2], scheduled[2];
  TaskHandshake handshake;
  AttentionAssignment attention_assignment;
  LocalRing local_ring;
  alignas(16) Batch batch;
  uint64_t num_batches;  // see RankState::num_cached_batches
  SchedulerCopies prepare;
  alignas(16) char state_memory[sizeof(RankState)];
  alignas(16) char transport_memory[16];  // of Transport
  LaunchParams params;
  ProgramHeader header;
  uint32_t worker_index;      // of the launch's: see device/core/worker_index.cuh
  bool dispatcher_schedules;  // what its own scheduler would
  uint64_t heap_bases[MAX_RANKS];
};

constexpr uint32_t MAX_SHARED_BYTES = 232448;  // of a block, compute capability 9.0 and 10.0
static_assert(sizeof(Shared) <= MAX_SHARED_BYTES, "a worker's shared memory does not fit");

#ifndef DISTMK_EMULATED
extern __shared__ __align__(1024) char shared_memory[];
#endif
#if defined(DISTMK_EMULATED) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900)
DISTMK_FN Shared& shared() { return *reinterpret_cast<Shared*>(shared_memory); }
DISTMK_FN void check_shared() {}
#else
// Behind what every block leaves to the system. A number instead of a name: the compiler works the address of what has
// a name out anew, or keeps it on the stack.
constexpr uint32_t SHARED_BEGIN = 1024;
DISTMK_FN Shared& shared() { return *static_cast<Shared*>(__cvta_shared_to_generic(SHARED_BEGIN)); }
DISTMK_FN void check_shared() {
  if (shared_address(shared_memory) != SHARED_BEGIN) __trap();
}
#endif

// Of a consumer warp. Worked out anew: what follows from it the compiler would keep in a register in all tasks.
DISTMK_FN uint32_t own_warp() { return opaque(threadIdx.x) / 32; }

DISTMK_FN ConsumerState consumer_state() { return shared().consumer[own_warp()]; }
// By a consumer warp, which is done with what the loader brought for a task, a slab mostly.
DISTMK_FN void store_consumer_state(const ConsumerState& consumer) {
  const uint32_t warp = own_warp();
  __syncwarp();
  if (threadIdx.x % 32) return;
  shared().consumer[warp] = consumer;
  shared().num_slabs[warp].set(shared().num_slabs[warp].get() + 1);
}

DISTMK_FN uint32_t task_number() { return shared().task_numbers[own_warp()]; }

DISTMK_FN bool StartSignal::wait() const {
  if (!issued) return true;
  TaskHandshake& handshake = shared().handshake;
  return handshake.wait_ready(task_number(), shared().params.trace_capacity) &&
         !(expected && handshake.is_revoked(task_number()));
}
DISTMK_FN bool StartSignal::confirm() const { return !issued || shared().handshake.wait_ready(task_number(), false); }
DISTMK_FN void StartSignal::wait_previous() const {
  if (issued) shared().handshake.wait_previous(task_number());
}
DISTMK_FN bool StartSignal::given() const { return !issued || shared().handshake.is_ready(task_number()); }
DISTMK_FN void StartSignal::record_time() const {
  if (threadIdx.x == 0 && issued && shared().params.trace_capacity) shared().handshake.record_time(task_number());
}

}  // namespace distmk
