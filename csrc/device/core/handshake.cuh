// How the roles of a worker hand a task to each other: mbarriers and flags in shared memory, in slots that successive
// tasks take in rotation.
//
//   issued    dispatcher -> consumers    the task may be entered; its code path is known
//   ready     dispatcher -> all          its waits are met
//   done      consumers  -> signaler     all consumer warps have left its body
//   signaled  signaler   -> dispatcher   its triggers are signaled, so its slot is free
//
// The dispatcher issues a task up to lookahead depth ahead: while others run, once the waits of the last task but one
// (or of the last but two, if the task allows deep lookahead) are met and the triggers of those before are signaled.
#pragma once
#include "runtime/worker.h"

namespace distmk {

// Tasks of a worker are counted from 0 at the beginning of the launch; task n takes slot n % NUM_HANDSHAKE_SLOTS.
constexpr uint32_t NUM_HANDSHAKE_SLOTS = 4;
DISTMK_FN uint32_t handshake_slot(uint32_t n) { return n % NUM_HANDSHAKE_SLOTS; }
DISTMK_FN uint32_t handshake_phase(uint32_t n) { return n / NUM_HANDSHAKE_SLOTS % 2; }

// The code that the consumers run for a task, decided by the dispatcher (hot_path.cuh) so that they look nothing up:
// a hot path, TaskTraits::CODE_PATH + the variant, or the cold path, COLD + the task's type.
enum CodePath : uint32_t { LEAVE, COLD = NUM_HOT_PATHS + 1 };

struct TaskHandshake {
  uint64_t issued[NUM_HANDSHAKE_SLOTS], ready[NUM_HANDSHAKE_SLOTS], done[NUM_HANDSHAKE_SLOTS],
      signaled[NUM_HANDSHAKE_SLOTS];
  Action action[NUM_HANDSHAKE_SLOTS];
  Flag code_path[NUM_HANDSHAKE_SLOTS];     // loaded wherever it is needed, as there is no register for it
  uint64_t pushed[NUM_HANDSHAKE_SLOTS];    // ranks whose triggers the body has signaled itself (Context::pushed)
  uint64_t ready_ns[NUM_HANDSHAKE_SLOTS];  // only if the launch is traced
  Flag end_at;                             // tasks from this number on never run, because the launch is over
  Flag revoked;                            // the last task that was issued speculatively and revoked

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
  // Takes the last issued task back: consumers and signaler skip its number.
  DISTMK_FN void revoke(const Team& team, uint32_t n) {
    if (team.leader()) revoked.set(n);
    warp_arrive(&ready[handshake_slot(n)]);
  }
  // Asked of a task that is ready. No other task is revoked before the signaler has passed this one.
  DISTMK_FN bool is_revoked(uint32_t n) const { return revoked.get() == n; }
  // By the consumers: waits until task n is ready and all warps have left the previous one, whose shared memory is then
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
  // Asked of a task that is ready: whether it is so only because the launch is over.
  DISTMK_FN bool is_ended(uint32_t n) const { return end_at.get() <= n; }
  DISTMK_FN void record_time(uint32_t n) {
    if (opaque(threadIdx.x) == 0) ready_ns[handshake_slot(n)] = now_ns();
  }
};

}  // namespace distmk
