// How a task body learns that its task's waits are met, if it may be entered before that.
#pragma once
#include "platform/platform.h"
#ifdef DISTMK_GPU
namespace distmk {

// A consumer thread's view of its task's handshake (device/core/handshake.cuh); defined in device/core/shared.cuh. The
// task's number is in shared memory: on the stack it would cost a trip to the second-level cache.
struct StartSignal {
  static constexpr bool EARLY = true;
  bool issued = false;          // by the dispatcher; other roles run tasks whose waits are met
  bool may_be_revoked = false;  // it may have been issued speculatively

  // Waits until the task is ready. False: the launch is over, or the task was revoked.
  DISTMK_FN bool wait() const;
  // The same for a body that has polled its inputs (see Context): the time is not recorded.
  DISTMK_FN bool confirm() const;
  // Waits until all warps have left the previous task.
  DISTMK_FN void wait_previous() const;
  // Whether wait() would return at once.
  DISTMK_FN bool is_ready() const;
  // If the launch is traced: records that the inputs are there.
  DISTMK_FN void record_time() const;
  // Whether wait() does so itself.
  DISTMK_FN bool records_time() const { return issued; }
};

}  // namespace distmk
#else
namespace distmk {

// A thread of the host twin is given a task only when its waits are met.
struct StartSignal {
  static constexpr bool EARLY = false;
  bool wait() const { return true; }
  bool confirm() const { return true; }
  void wait_previous() const {}
  bool is_ready() const { return true; }
  void record_time() const {}
  bool records_time() const { return false; }
};

}  // namespace distmk
#endif
