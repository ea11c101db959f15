// A launch of one rank by threads of this process, whatever they play: the host twin's workers and schedulers
// (host/runtime.cpp), or the GPU (emulator/runtime.cpp). What the C interface (interface.cpp) is made of.
#pragma once
#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "abi.h"

namespace distmk {

class Launch {
 public:
  virtual ~Launch() = default;

  // Spawns the threads of the launch, or of its next piece.
  virtual void start() = 0;

  // All threads have left.
  bool idle() const { return running_.load(std::memory_order_acquire) == 0; }

  // Waits for that, and where they left before the end lets others go on. False: it was the end.
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
      running_.fetch_sub(1, std::memory_order_release);
    });
  }

 private:
  std::vector<std::thread> threads_;
  std::atomic<uint32_t> running_{0};

  bool aborted() const {
    const uint64_t own_heap = reinterpret_cast<const uint64_t*>(params_->heap_bases)[program_.rank];
    return __atomic_load_n(&reinterpret_cast<const Control*>(own_heap)->abort, __ATOMIC_RELAXED);
  }
};

// Each library's own kind, not started yet.
std::unique_ptr<Launch> make_launch(LaunchParams* params);

}  // namespace distmk
