// Measures how long a waiter takes to see an event while other work runs on its core (test_busy_core.py). Prints the
// median over many events, in microseconds. If the machine has two cores, waiter and sender have a core each; a third
// thread competes with the waiter for its core.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "platform/platform.h"

namespace {

constexpr uint64_t NUM_EVENTS = 100, GAP_NS = 1000000;
uint64_t event = 0, sent_ns = 0, seen = 0, ended = 0;

void pin(int core) {
  cpu_set_t allowed, one;
  sched_getaffinity(0, sizeof allowed, &allowed);
  CPU_ZERO(&one);
  for (int cpu = 0, number = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &allowed) && number++ == core % CPU_COUNT(&allowed)) CPU_SET(cpu, &one);
  sched_setaffinity(0, sizeof one, &one);
}

// Waits like Backoff::wait: some polls, then polls with a back-off in between.
void await(uint64_t want, uint32_t spin_polls) {
  uint64_t began = 0;
  for (uint32_t polls = 0; !distmk::has_reached(&event, want); ++polls) {
    if (polls == 0) began = distmk::now_ns();
    if (polls < spin_polls)
      distmk::pause();
    else
      distmk::back_off(distmk::now_ns() - began);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const uint32_t spin_polls = static_cast<uint32_t>(atoi(argv[1]));
  std::vector<uint64_t> delays_ns;
  std::thread other([] {
    pin(0);
    while (!distmk::load_relaxed(&ended)) distmk::pause();
  });
  std::thread sender([] {
    pin(1);
    for (uint64_t number = 1; number <= NUM_EVENTS; ++number) {
      while (distmk::load_acquire(&seen) + 1 < number) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::nanoseconds(GAP_NS));
      distmk::store_relaxed(&sent_ns, distmk::now_ns());
      distmk::add_release(&event, 1);
    }
  });
  pin(0);
  for (uint64_t number = 1; number <= NUM_EVENTS; ++number) {
    await(number, spin_polls);
    delays_ns.push_back(distmk::now_ns() - distmk::load_relaxed(&sent_ns));
    distmk::store_release(&seen, number);
  }
  distmk::store_relaxed(&ended, 1);
  sender.join();
  other.join();
  std::sort(delays_ns.begin(), delays_ns.end());
  printf("%.1f\n", static_cast<double>(delays_ns[NUM_EVENTS / 2]) / 1e3);
}
