// Two ranks in one process, joined by sockets with small buffers (test_network.py). Threads of both ranks put blocks of
// random sizes at random offsets to each other, all at once, and check what has arrived. Prints what is wrong, and
// "ok".
#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <random>

#include "host/network_transport.h"

namespace distmk {
namespace {

constexpr uint32_t NUM_RANKS = 2, NUM_THREADS = 3, NUM_ROUNDS = 60, NUM_EVENTS = NUM_RANKS * NUM_THREADS;
constexpr uint64_t REGION_BYTES = 1 << 20;  // a thread's region, twice as large as its largest put
constexpr uint64_t EVENTS_OFFSET = 4096, DATA_OFFSET = EVENTS_OFFSET + NUM_EVENTS * EVENT_STRIDE_BYTES;
constexpr uint64_t HEAP_BYTES = DATA_OFFSET + NUM_THREADS * REGION_BYTES;

struct Rank {
  std::vector<char> heap = std::vector<char>(HEAP_BYTES);
  std::vector<uint64_t> bases = std::vector<uint64_t>(NUM_RANKS);
  ProgramHeader program{};
  LaunchParams params{};
  uint64_t faults_seen = 0;
  std::unique_ptr<Network> network;

  Rank(uint32_t rank, const std::vector<int>& sockets) {
    program.rank = rank;
    program.num_ranks = NUM_RANKS;
    program.num_events = NUM_EVENTS;
    program.events_heap_offset = EVENTS_OFFSET;
    program.heap_bytes = HEAP_BYTES;
    bases[rank] = reinterpret_cast<uint64_t>(heap.data());
    params.program = reinterpret_cast<uint64_t>(&program);
    params.heap_bases = reinterpret_cast<uint64_t>(bases.data());
    params.deadline_ns = 60000000000ull;
    params.spin_polls = 4;
    network = std::make_unique<Network>(heap.data(), program, sockets);
  }
};

bool holds(const char* begin, uint64_t num_bytes, char value) {
  for (uint64_t i = 0; i < num_bytes; ++i)
    if (begin[i] != value) return false;
  return true;
}

// Thread `thread` of `self` has a region and an event of its own on `peer`. If two puts go to one place, the later one
// counts. The event says how many rounds are over, and after quiet() everything has arrived.
uint32_t stress(NetworkTransport& transport, const Rank& self, const Rank& peer, uint32_t thread) {
  std::minstd_rand random(self.program.rank * NUM_THREADS + thread + 1);
  std::vector<char> source(REGION_BYTES / 2);
  const uint32_t event = self.program.rank * NUM_THREADS + thread, to = peer.program.rank;
  const char* region = peer.heap.data() + DATA_OFFSET + thread * REGION_BYTES;
  uint32_t wrong = 0;
  for (uint32_t round = 1; round <= NUM_ROUNDS; ++round) {
    const uint64_t offset = random() % (REGION_BYTES / 2), most = round % 8 ? 5000 : REGION_BYTES / 2;
    const uint64_t num_bytes = 1 + random() % most;
    for (const int value : {-1, static_cast<int>(round)}) {
      std::fill_n(source.begin(), num_bytes, static_cast<char>(value));
      transport.put(to, DATA_OFFSET + thread * REGION_BYTES + offset, source.data(), num_bytes);
      if (value < 0) transport.send(to);  // the source may be reused
    }
    transport.signal(to, event, 1);
    transport.send(to);
    std::fill_n(source.begin(), num_bytes, -1);
    if (round % 3) continue;
    transport.quiet();
    wrong += !holds(region + offset, num_bytes, static_cast<char>(round));
    const auto* count =
        reinterpret_cast<const uint64_t*>(peer.heap.data() + EVENTS_OFFSET + event * EVENT_STRIDE_BYTES);
    wrong += load_acquire(count) != round;
  }
  transport.quiet();
  return wrong;
}

int run() {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) return 1;
  const int small = 4096;
  for (const int fd : pair) setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
  Rank first(0, {-1, pair[0]}), second(1, {pair[1], -1});
  uint32_t wrong[NUM_RANKS][NUM_THREADS] = {};
  for (int launch = 0; launch < 2; ++launch) {
    RankState states[] = {{&first.params, &first.faults_seen}, {&second.params, &second.faults_seen}};
    NetworkTransport to_second(states[0], *first.network), to_first(states[1], *second.network);
    states[0].transport = &to_second, states[1].transport = &to_first;
    std::vector<std::thread> threads;
    for (uint32_t thread = 0; thread < NUM_THREADS; ++thread) {
      threads.emplace_back([&, thread] { wrong[0][thread] += stress(to_second, first, second, thread); });
      threads.emplace_back([&, thread] { wrong[1][thread] += stress(to_first, second, first, thread); });
    }
    for (std::thread& thread : threads) thread.join();
    for (Rank* rank : {&first, &second}) rank->network->send_fence();
    for (Rank* rank : {&first, &second}) {
      if (!rank->network->reached_fence(10000000000ull)) std::printf("no fence\n");
      std::fill(rank->heap.begin(), rank->heap.end(), 0);
    }
  }
  for (uint32_t rank = 0; rank < NUM_RANKS; ++rank)
    for (uint32_t thread = 0; thread < NUM_THREADS; ++thread)
      if (wrong[rank][thread]) std::printf("rank %u thread %u: %u wrong\n", rank, thread, wrong[rank][thread]);
  std::printf("ok\n");
  return 0;
}

}  // namespace
}  // namespace distmk

int main() { return distmk::run(); }
