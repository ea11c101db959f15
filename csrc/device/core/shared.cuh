// A worker CTA's shared memory.
#pragma once
#include "device/core/loader.cuh"
#include "device/core/task_queue.cuh"
#include "runtime/splits.h"
#include "runtime/worker.h"

namespace distmk {

constexpr uint32_t NUM_WARPS = NUM_CONSUMERS / 32;
constexpr uint32_t TILE_TOKENS = 8;   // columns of a product on tensor cores
constexpr uint32_t SUMS_STRIDE = 68;  // of a warp's sums for a token: a round's rows, and room to lie in other banks
constexpr uint32_t SCRATCH_BYTES = NUM_WARPS * TILE_TOKENS * SUMS_STRIDE * sizeof(float);
constexpr uint32_t WORK_BYTES = 8192;  // of attention, with the scratch behind it, and of the head's candidates
static_assert(SUMS_STRIDE >= ROUND_ROWS, "");
static_assert(2 * TILE_TOKENS >= MAX_ROWS, "two tiles hold all rows");
constexpr uint32_t NEAR_RING_ENTRIES = 16;

// Which code the consumers run for a task, so that they need not look it up: LINEAR and the rows that it multiplies, or
// OTHER and the task's type.
enum Route : uint32_t { LEAVE, ATTENTION, MERGE, SUM, LINEAR, OTHER = LINEAR + MAX_ROWS + 1 };

// What the warps tell each other about a task: the waiter the consumers that it is announced, while others run where
// that can be, and everybody that its waits are met; the consumers the clerk that its body is done; the clerk the
// waiter that its triggers were fired. A task is announced once the waits of the last but one are met, or of the one
// before that, and the triggers of those before fired.
struct Handoff {
  uint64_t announced[TASK_PLACES], ready[TASK_PLACES], done[TASK_PLACES], fired[TASK_PLACES];
  Action action[TASK_PLACES];
  Flag route[TASK_PLACES];         // read anew wherever it is needed: there is no register for it
  uint64_t pushed[TASK_PLACES];    // ranks whose triggers the body has fired itself
  uint64_t ready_ns[TASK_PLACES];  // where the launch is traced
  Flag over_at;                    // from this task on none will be ready, as the launch is over
  Flag taken_back;                 // the last task that was announced though another came

  DISTMK_FN void init() {
    for (uint32_t i = 0; i < TASK_PLACES; ++i) {
      barrier_init(&announced[i], WARP_ARRIVALS);
      barrier_init(&ready[i], WARP_ARRIVALS);
      barrier_init(&done[i], NUM_WARPS * WARP_ARRIVALS);
      barrier_init(&fired[i], WARP_ARRIVALS);
    }
    over_at = taken_back = {~0u};
  }
  DISTMK_FN void announce(const Team& team, uint32_t n, const Action& what, uint32_t how) {
    if (team.leader()) action[task_place(n)] = what, route[task_place(n)].set(how);
    warp_arrive(&announced[task_place(n)]);
  }
  // The last task that was announced is not run: its number is that of no task.
  DISTMK_FN void take_back(const Team& team, uint32_t n) {
    if (team.leader()) taken_back.set(n);
    warp_arrive(&ready[task_place(n)]);
  }
  // Of a task that is ready. Until its triggers would have been fired no other is taken back.
  DISTMK_FN bool is_taken_back(uint32_t n) const { return taken_back.get() == n; }
  // By the consumers: task `n` is ready, and all warps have left the one before, so what it had in shared memory is
  // free. False: the launch is over.
  DISTMK_FN bool wait_until_ready(uint32_t n, bool traced) {
    barrier_wait(&ready[task_place(n)], task_parity(n));
    if (is_over(n)) return false;
    await_last(n);
    if (traced) keep_time(n);
    return true;
  }
  DISTMK_FN void await_last(uint32_t n) {
    if (n) barrier_wait(&done[task_place(n - 1)], task_parity(n - 1));
  }
  DISTMK_FN bool is_ready(uint32_t n) { return barrier_test(&ready[task_place(n)], task_parity(n)); }
  // Of a task that is ready: whether that is because the launch is over.
  DISTMK_FN bool is_over(uint32_t n) const { return over_at.get() <= n; }
  DISTMK_FN void keep_time(uint32_t n) {
    if (opaque(threadIdx.x) == 0) ready_ns[task_place(n)] = now_ns();
  }
};

// Two buffers for the sums of the warps: one is written while the other is added up.
struct SumsBuffers {
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
struct Places {
  RingPlace<NUM_STAGES> stage;
  uint32_t sums_turn = 0;
};

struct NearRing {
  JitRing ring;
  JitEntry entries[NEAR_RING_ENTRIES];
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
struct alignas(16) AttentionShare {
  AttentionSplit split;
  uint32_t lines[NUM_WARPS];      // of the cache, where the warps' first chunks begin
  uint32_t new_line;              // and where the first new position goes that is this split's, if there is one
  uint32_t num_instances;         // of the whole task; all of the above is set only if this worker has one
  uint32_t at_hand[TASK_PLACES];  // a Hand: whether this is about a task, at its place
  uint32_t rounds[NUM_WARPS];     // instances of its share that a consumer warp is done with
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
enum Hand : uint32_t { ELSEWHERE, AT_HAND, IN_RING, NEAR };

constexpr uint32_t NEAR_RANKS = 8;  // whose candidates the batcher has at hand; those of more are read where they lie

struct PrepareCopies {
  alignas(16) BatcherState state;
  alignas(16) Batch batch;
  Candidate candidates[NEAR_RANKS * MAX_ROWS];
};

struct Shared {
  char slots[NUM_STAGES * STAGE_BYTES];  // first: stages must be aligned
  char work[WORK_BYTES];
  char scratch[SCRATCH_BYTES];
  float squares[MAX_ROWS][NUM_WARPS];  // of the activations, for their norm
  Ring ring;
  SumsBuffers sums;
  Places places[NUM_WARPS];
  Flag num_slabs[NUM_WARPS];         // that a consumer warp has drained
  uint32_t task_numbers[NUM_WARPS];  // that a consumer warp is at, since the launch began
  TaskRing tasks;
  TaskSlot handed_out[2], scheduled[2];
  Handoff handoff;
  AttentionShare attention_share;
  NearRing near_ring;
  alignas(16) Batch batch;
  uint64_t num_batches;  // see RankState::num_near_batches
  PrepareCopies prepare;
  alignas(16) char state_memory[sizeof(RankState)];
  alignas(16) char far_memory[16];  // of FarRanks
  LaunchParams params;
  ProgramHeader header;
  uint32_t block_number;  // of the launch's: see device/core/worker_index.cuh
  bool waiter_hands_out;  // what its own scheduler would
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

DISTMK_FN Places own_places() { return shared().places[own_warp()]; }
// By a consumer warp, which is done with what the loader brought for a task, a slab mostly.
DISTMK_FN void keep_places(const Places& places) {
  const uint32_t warp = own_warp();
  __syncwarp();
  if (threadIdx.x % 32) return;
  shared().places[warp] = places;
  shared().num_slabs[warp].set(shared().num_slabs[warp].get() + 1);
}

DISTMK_FN uint32_t task_number() { return shared().task_numbers[own_warp()]; }

DISTMK_FN bool StartSignal::wait() const {
  if (!announced) return true;
  Handoff& handoff = shared().handoff;
  return handoff.wait_until_ready(task_number(), shared().params.trace_capacity) &&
         !(expected && handoff.is_taken_back(task_number()));
}
DISTMK_FN bool StartSignal::confirm() const {
  return !announced || shared().handoff.wait_until_ready(task_number(), false);
}
DISTMK_FN void StartSignal::await_last() const {
  if (announced) shared().handoff.await_last(task_number());
}
DISTMK_FN bool StartSignal::given() const { return !announced || shared().handoff.is_ready(task_number()); }
DISTMK_FN void StartSignal::keep_time() const {
  if (threadIdx.x == 0 && announced && shared().params.trace_capacity) shared().handoff.keep_time(task_number());
}

}  // namespace distmk
