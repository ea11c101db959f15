// A launch of one rank by threads of this process: the workers and schedulers of the host twin (host/runtime.cpp), or
// the thread that emulates a GPU (emulator/runtime.cpp). The C interface (interface.cpp) drives either.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "abi.h"

namespace distmk {

class Launch {
 public:
  virtual ~Launch() = default;

  // Spawns the threads of the launch, or of its next piece (LaunchParams::max_iterations).
  virtual void start() = 0;

  // Whether all threads have left.
  bool idle() const { return running_.load(std::memory_order_acquire) == 0; }

  // Sleeps until all threads have left or the time is up.
  void await_idle(std::chrono::steady_clock::time_point until) {
    std::unique_lock<std::mutex> lock(leaving_);
    left_.wait_until(lock, until, [this] { return idle(); });
  }

  // Waits until all threads have left, and starts the next piece of the launch. Returns false if there is none.
  bool go_on() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    const bool cut =
        params_->max_iterations && params_->iterations_done >= params_->first_iteration + params_->max_iterations;
    if (!cut || aborted()) return false;
    params_->first_iteration = params_->iterations_done;
    start();
    return true;
  }

 protected:
  LaunchParams* const params_;
  const ProgramHeader& program_;

  explicit Launch(LaunchParams* params)
      : params_(params), program_(*reinterpret_cast<const ProgramHeader*>(params->program)) {}

  template <class Run>
  void spawn(Run run) {
    running_.fetch_add(1, std::memory_order_relaxed);
    threads_.emplace_back([this, run = std::move(run)] {
      run();
      const std::lock_guard<std::mutex> lock(leaving_);
      running_.fetch_sub(1, std::memory_order_release);
      left_.notify_all();
    });
  }

 private:
  std::vector<std::thread> threads_;
  std::atomic<uint32_t> running_{0};
  std::mutex leaving_;
  std::condition_variable left_;  // a thread has left

  bool aborted() const {
    const uint64_t own_heap = reinterpret_cast<const uint64_t*>(params_->heap_bases)[program_.rank];
    return __atomic_load_n(&reinterpret_cast<const Control*>(own_heap)->abort, __ATOMIC_RELAXED);
  }
};

// Makes a launch that is not started yet. Each library defines this for its own kind of launch.
std::unique_ptr<Launch> make_launch(LaunchParams* params);

}  // namespace distmk
