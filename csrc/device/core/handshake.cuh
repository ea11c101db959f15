// How the roles of a worker hand tasks to each other: mbarriers and flags in shared memory, in slots that successive
// tasks take in rotation.
//   issued    dispatcher -> consumers    The task may be entered; its code path is known.
//   ready     dispatcher -> all          Its waits are met.
//   done      consumers  -> signaler     All consumer warps have left its body.
//   signaled  signaler   -> dispatcher   Its triggers are signaled, so its slot is free.
// Lookahead: the dispatcher issues task n while earlier tasks run, once task n - 2 is ready and all tasks before n - 2
// are signaled. If task n allows deep lookahead, n - 3 takes the place of n - 2.
#pragma once
#include "runtime/worker.h"

namespace distmk {

// A worker's tasks are numbered from 0 at the beginning of the launch. Task n takes slot n % NUM_HANDSHAKE_SLOTS.
constexpr uint32_t NUM_HANDSHAKE_SLOTS = 4;
DISTMK_FN uint32_t handshake_slot(uint32_t n) { return n % NUM_HANDSHAKE_SLOTS; }
DISTMK_FN uint32_t handshake_phase(uint32_t n) { return n / NUM_HANDSHAKE_SLOTS % 2; }

// The code that the consumers run for a task. The dispatcher chooses it (hot_path.cuh), so that the consumers look
// nothing up. It is a hot path, TaskTraits::CODE_PATH + the variant, or the cold path, COLD + the task's type.
enum CodePath : uint32_t { LEAVE, COLD = NUM_HOT_PATHS + 1 };

struct TaskHandshake {
  uint64_t issued[NUM_HANDSHAKE_SLOTS], ready[NUM_HANDSHAKE_SLOTS], done[NUM_HANDSHAKE_SLOTS],
      signaled[NUM_HANDSHAKE_SLOTS];
  Action action[NUM_HANDSHAKE_SLOTS];
  Flag code_path[NUM_HANDSHAKE_SLOTS];     // loaded wherever it is needed, because no register is left for it
  uint64_t pushed[NUM_HANDSHAKE_SLOTS];    // ranks whose triggers the body itself has signaled (Context::pushed)
  uint64_t ready_ns[NUM_HANDSHAKE_SLOTS];  // only if the launch is traced
  Flag end_at;                             // tasks from this number on never run, because the launch is over
  Flag revoked;                            // the last task that was issued speculatively and then revoked

  DISTMK_FN void init() {
    for (uint32_t i = 0; i < NUM_HANDSHAKE_SLOTS; ++i) {
      barrier_init(&issued[i], WARP_ARRIVALS);
      barrier_init(&ready[i], WARP_ARRIVALS);
      barrier_init(&done[i], NUM_WARPS * WARP_ARRIVALS);
      barrier_init(&signaled[i], WARP_ARRIVALS);
    }
    end_at = revoked = {~0u};
  }
  DISTMK_FN void issue(const Team& team, uint32_t n, const Action& what, uint32_t path) {
    if (team.leader()) action[handshake_slot(n)] = what, code_path[handshake_slot(n)].set(path);
    warp_arrive(&issued[handshake_slot(n)]);
  }
  // Takes the last issued task back. Consumers and signaler skip its number.
  DISTMK_FN void revoke(const Team& team, uint32_t n) {
    if (team.leader()) revoked.set(n);
    warp_arrive(&ready[handshake_slot(n)]);
  }
  // Valid only for a task that is ready. `revoked` keeps its value until the signaler has passed this task.
  DISTMK_FN bool is_revoked(uint32_t n) const { return revoked.get() == n; }
  // Called by the consumers. Waits until task n is ready and all warps have left the previous task, whose shared memory
  // is then free. False: the launch is over.
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
  // Valid only for a task that is ready: whether it was made ready only because the launch is over.
  DISTMK_FN bool is_ended(uint32_t n) const { return end_at.get() <= n; }
  DISTMK_FN void record_time(uint32_t n) {
    if (opaque(threadIdx.x) == 0) ready_ns[handshake_slot(n)] = now_ns();
  }
};

}  // namespace distmk
