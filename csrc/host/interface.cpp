// The C interface that Python calls. The host twin's library and the emulator's library share it.
#include <chrono>

#include "host/launch.h"

extern "C" {

uint64_t distmk_abi_hash() { return distmk::ABI_HASH; }

// Starts the rank's threads and returns at once. `params` must live, and not move, until distmk_join. The launch is
// stored to `*handle` before any thread runs, so that the caller cannot lose it.
void distmk_start(distmk::LaunchParams* params, void** handle) {
  distmk::Launch* launch = distmk::make_launch(params).release();
  *handle = launch;
  launch->start();
}

// Sleeps until there are tokens that the host has not read, the launch is over, or the timeout has passed. Returns 1 if
// the launch is over. A launch in pieces starts its next piece here. On ranks without tokens `counts` is null; an idle
// launch then costs its host nothing.
int distmk_wait(void* launch, uint64_t timeout_us, const distmk::HostCounts* counts) {
  using Clock = std::chrono::steady_clock;
  auto* running = static_cast<distmk::Launch*>(launch);
  const auto until = Clock::now() + std::chrono::microseconds(timeout_us);
  for (;;) {
    if (running->idle() && !running->go_on()) return 1;
    if (counts && __atomic_load_n(&counts->tokens, __ATOMIC_ACQUIRE) > counts->tokens_read) return 0;
    if (Clock::now() >= until) return 0;
    if (counts)
      std::this_thread::sleep_for(std::chrono::microseconds(500));
    else
      running->await_idle(until);
  }
}

// Waits until the launch is over, and frees it. Does nothing for a handle that is null or was joined before.
void distmk_join(void** handle) {
  const std::unique_ptr<distmk::Launch> running(static_cast<distmk::Launch*>(*handle));
  while (running && running->go_on()) {
  }
  *handle = nullptr;
}

// Sets the abort flag of every peer-mapped rank, so that its threads leave.
void distmk_abort(const uint64_t* heap_bases, uint32_t num_ranks, uint64_t reason) {
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    if (!heap_bases[rank]) continue;
    uint64_t* flag = &reinterpret_cast<distmk::Control*>(heap_bases[rank])->abort;
    if (!__atomic_load_n(flag, __ATOMIC_RELAXED)) __atomic_store_n(flag, reason, __ATOMIC_RELEASE);
  }
}

}  // extern "C"
