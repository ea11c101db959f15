// Tells whoever runs a task that its waits are met, where tasks are announced before.
#pragma once
#include "platform/platform.h"
#ifdef DISTMK_GPU
namespace distmk {

// The consumers' view of a task that was announced. Its number lies in shared memory: on the stack it would cost a trip
// to the second-level cache.
struct StartSignal {
  static constexpr bool EARLY = true;
  bool issued = false;
  bool expected = false;  // before it was known that it would come, perhaps

  // False: the launch is over, or it was taken back.
  DISTMK_FN bool wait() const;
  // For a body that looks for its inputs by itself, see Context: waits until the task before is done; whether wait()
  // would return at once; writes down, where the launch is traced, that it has found them; wait() without writing it
  // down.
  DISTMK_FN void wait_previous() const;
  DISTMK_FN bool given() const;
  DISTMK_FN void record_time() const;
  DISTMK_FN bool confirm() const;
  // Whether wait() itself writes down when that was, where a launch is traced.
  DISTMK_FN bool records_time() const { return issued; }
};

}  // namespace distmk
#else
namespace distmk {

struct StartSignal {
  static constexpr bool EARLY = false;  // whether a task can be entered before its waits are met
  bool wait() const { return true; }    // a thread is given a task when it may run
  void wait_previous() const {}
  bool given() const { return true; }
  void record_time() const {}
  bool confirm() const { return true; }
  bool records_time() const { return false; }
};

}  // namespace distmk
#endif
