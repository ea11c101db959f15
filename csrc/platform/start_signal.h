// How a body that is entered before its task's waits are met learns that they are. runtime/context.h wraps it.
#pragma once
#include "platform/platform.h"
#ifdef DISTMK_GPU
namespace distmk {

// A consumer thread's view of its task's handshake (device/core/handshake.cuh), defined in device/core/shared.cuh. The
// task's number is in shared memory, because a number on the stack would cost a trip to L2.
struct StartSignal {
  static constexpr bool EARLY = true;
  bool issued = false;          // the dispatcher issued the task; other roles run only tasks whose waits are met
  bool may_be_revoked = false;  // the task may have been issued speculatively

  // Waits until the task is ready. False: the launch is over, or the task was revoked.
  DISTMK_FN bool wait() const;
  // wait() for a body that has polled its inputs (see Context). It does not record the time.
  DISTMK_FN bool confirm() const;
  // Waits until all warps have left the previous task.
  DISTMK_FN void wait_previous() const;
  // Whether wait() would return at once.
  DISTMK_FN bool is_ready() const;
  // In a traced launch: records the time at which the inputs were there.
  DISTMK_FN void record_time() const;
  // Whether wait() itself records that time.
  DISTMK_FN bool records_time() const { return issued; }
};

}  // namespace distmk
#else
namespace distmk {

// A thread of the host twin starts a task only when the task's waits are met.
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
