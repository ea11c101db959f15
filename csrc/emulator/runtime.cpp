// The host runtime's interface (csrc/host/runtime.cpp) with the GPU's kernel behind it: a thread of its own plays the
// GPU.
#include <cuda_runtime.h>
// CUDA's names first
#include <atomic>
#include <cstdlib>
#include <thread>

#include "device/bodies/attention.cuh"
#include "device/bodies/basic.cuh"
#include "device/bodies/linear.cuh"
#include "device/bodies/merge.cuh"
#include "device/megakernel.cuh"

namespace distmk {
namespace {

class Launch {
 public:
  explicit Launch(LaunchParams* params) : params_(params) {
    params->self = reinterpret_cast<uint64_t>(params);
    params->faults_seen = reinterpret_cast<uint64_t>(&faults_seen_);
    start();
  }

  bool idle() const { return !running_.load(std::memory_order_acquire); }

  // Waits for the launch's end, or goes on with its next piece. False: it was the end.
  bool go_on() {
    if (thread_.joinable()) thread_.join();
    const auto* header = reinterpret_cast<const ProgramHeader*>(params_->program);
    const auto* bases = reinterpret_cast<const uint64_t*>(params_->heap_bases);
    const bool aborted = reinterpret_cast<const Control*>(bases[header->rank])->abort;
    if (aborted || params_->iterations_done < end_iteration(*params_)) return false;
    params_->first_iteration = params_->iterations_done;
    start();
    return true;
  }

 private:
  LaunchParams* params_;
  uint64_t faults_seen_ = 0;
  std::thread thread_;
  std::atomic<bool> running_{false};

  void start() {
    running_ = true;
    thread_ = std::thread([this] {
      const auto* header = reinterpret_cast<const ProgramHeader*>(params_->program);
      const char* seed = getenv("DISTMK_EMULATOR_SEED");
      emulator::run_grid(header->num_workers + (params_->scheduler_threads ? 1 : 0), NUM_THREADS, sizeof(Shared),
                         seed ? strtoull(seed, nullptr, 10) : now_ns(), [this] { distmk_megakernel(params_); });
      running_.store(false, std::memory_order_release);
    });
  }
};

}  // namespace
}  // namespace distmk

extern "C" {

uint64_t distmk_abi_hash() { return distmk::ABI_HASH; }

void* distmk_start(distmk::LaunchParams* params) { return new distmk::Launch(params); }

int distmk_wait(void* launch, uint64_t seen, uint64_t timeout_us, const uint64_t* token_count) {
  auto* running = static_cast<distmk::Launch*>(launch);
  const uint64_t until = distmk::now_ns() + timeout_us * 1000;
  for (;;) {
    if (running->idle() && !running->go_on()) return 1;
    if (token_count && __atomic_load_n(token_count, __ATOMIC_ACQUIRE) > seen) return 0;
    if (distmk::now_ns() >= until) return 0;
    const timespec nap{0, 500000};
    nanosleep(&nap, nullptr);
  }
}

void distmk_join(void* launch) {
  auto* running = static_cast<distmk::Launch*>(launch);
  while (running->go_on()) {
  }
  delete running;
}

void distmk_abort(const uint64_t* heap_bases, uint32_t num_ranks, uint64_t reason) {
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    uint64_t* flag = &reinterpret_cast<distmk::Control*>(heap_bases[rank])->abort;
    if (!__atomic_load_n(flag, __ATOMIC_RELAXED)) __atomic_store_n(flag, reason, __ATOMIC_RELEASE);
  }
}

}  // extern "C"
