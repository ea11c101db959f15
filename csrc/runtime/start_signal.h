// Tells whoever runs a task that its waits are met, where tasks are announced before.
#pragma once
#include "runtime/platform.h"
#ifdef DISTMK_GPU
#include "device/start_signal.cuh"
#else
namespace distmk {

struct StartSignal {
  static constexpr bool EARLY = false;  // whether a task can be entered before its waits are met
  bool wait() const { return true; }    // a thread is given a task when it may run
  void await_last() const {}
  bool given() const { return true; }
  void keep_time() const {}
  bool confirm() const { return true; }
  bool keeps_time() const { return false; }
};

}  // namespace distmk
#endif
