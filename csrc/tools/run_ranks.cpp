// Runs all ranks of a saved program as threads of one process, so that a race detector sees races between ranks.
//   run_ranks [OPTION ...] ITERATIONS PROGRAM_OF_RANK_0 ...
//   --ride             schedulers have no threads of their own
//   --cut N            launches in pieces of N iterations
//   --requests N       number of requests, instead of five
//   --tokens N         new tokens of each request, instead of 6 to 16
//   --longer N         the first prompt has N more tokens
//   --seed N           seed of the emulator's timing
//   --delay MAX_US,NODE_SIZE,SEED   delays puts (Fault in distmk/abi/launch.py)
//   --far NODE_SIZE    ranks of different nodes share no memory and reach each other over sockets (not in the emulator)
//   --constrained      every second request gets masks of allowed tokens while the launch runs
//   --early-stamp      plants a bug in these masks: each may be read before it is written
//   --missing-release  turns the planted bug on (needs a build with -DDISTMK_PLANTED_BUG)
// A decode program ends after its last request, whatever ITERATIONS is.
// Weights are zero and prompts arbitrary: only the order of accesses counts. Exit status 0: every rank finished.
#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "abi.h"
#include "platform/planted_bug.h"
#include "tools/host_masks.h"

extern "C" {
void distmk_start(distmk::LaunchParams* params, void** handle);
int distmk_wait(void* launch, uint64_t timeout_us, const distmk::HostCounts* counts);
void distmk_join(void** handle);
#ifndef DISTMK_EMULATED
uint32_t distmk_network_open(uint64_t heap, const distmk::ProgramHeader* program, const int* sockets);
void distmk_network_close(uint32_t network);
#endif
}

namespace {

using distmk::LaunchParams;
using distmk::ProgramHeader;

// Zeroed memory.
char* allocate(uint64_t num_bytes) {
  constexpr uint64_t PAGE_BYTES = 4096;
  return static_cast<char*>(std::calloc(1, num_bytes + PAGE_BYTES));
}

std::vector<char> read_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// More prompts than run at once, of different lengths, so that chunked prefill, admission and release all occur. Where
// pages are few, some requests are preempted. Some requests share the first pages that were filled, whatever their
// content is.
struct Requests {
  static constexpr uint32_t MAX_PAGES = 64;
  std::vector<distmk::RequestEntry> requests;
  std::vector<int32_t> prompts;
  std::vector<distmk::Command> commands;
  std::vector<distmk::TokenEvent> tokens;
  std::vector<distmk::PageRef> pages;
  const distmk::PageRef first_pages[2] = {{0, 1}, {1, 1}};
  distmk::HostCounts counts = {};
  uint32_t longest;
  int32_t eos = -1;

  // `max_tokens`: new tokens of each request, unless 0. `more`: additional tokens of the first prompt.
  Requests(uint32_t num_requests, uint32_t max_tokens, uint32_t more) : longest(23 + more) {
    uint32_t num_tokens = 0;
    pages.resize(num_requests * uint64_t{MAX_PAGES});
    for (uint32_t i = 0; i < num_requests; ++i) {
      const uint32_t length = 1 + (i * 7) % 23 + (i ? 0 : more), max_new = max_tokens ? max_tokens : 6 + (i * 3) % 11;
      requests.push_back({i, length, max_new, 1, 0, 0, i > 1 ? 2u : 0u, reinterpret_cast<uint64_t>(first_pages),
                          reinterpret_cast<uint64_t>(&pages[i * uint64_t{MAX_PAGES}])});
      commands.push_back({static_cast<uint32_t>(distmk::CommandKind::ADD), i, i, 0});
      prompts.insert(prompts.end(), longest, static_cast<int32_t>(i));
      num_tokens += max_new;
    }
    commands.push_back({static_cast<uint32_t>(distmk::CommandKind::FINISH), 0, 0, 0});
    counts.commands = commands.size();
    tokens.resize(num_tokens + 3 * distmk::MAX_SEQUENCES);  // room for a step in which all are put back
  }
};

struct Options {
  bool ride = false, constrained = false, early_stamp = false;
  distmk::Fault fault = {};
  uint32_t num_iterations = 0, cut = 0, num_requests = 5, max_tokens = 0, longer = 0, far = 0;
  std::vector<const char*> programs;

  bool parse(int argc, char** argv) {
    const std::map<std::string, uint32_t*> numbers = {{"--cut", &cut},           {"--requests", &num_requests},
                                                      {"--tokens", &max_tokens}, {"--longer", &longer},
                                                      {"--seed", &fault.seed},   {"--far", &far}};
    int i = 1;
    for (; i < argc && argv[i][0] == '-'; ++i) {
      const std::string name = argv[i];
      if (name == "--ride") {
        ride = true;
      } else if (name == "--constrained") {
        constrained = true;
      } else if (name == "--early-stamp") {
        early_stamp = true;
#ifdef DISTMK_PLANTED_BUG
      } else if (name == "--missing-release") {
        distmk::missing_release = true;
#endif
      } else if (++i == argc) {
        return false;
      } else if (const auto found = numbers.find(name); found != numbers.end()) {
        *found->second = static_cast<uint32_t>(std::atoi(argv[i]));
      } else {
        unsigned max_us = 0;
        if (name != "--delay" || std::sscanf(argv[i], "%u,%u,%u", &max_us, &fault.node_size, &fault.seed) != 3)
          return false;
        fault.delay_puts_ns = max_us * 1000ull;
      }
    }
    if (i < argc) num_iterations = static_cast<uint32_t>(std::atoi(argv[i++]));
    programs.assign(argv + i, argv + argc);
    return num_iterations && num_requests && !programs.empty();
  }
};

// How each rank reaches every other rank: by its heap's address or, on another node of `node_size` ranks, by a socket.
struct Routes {
  std::vector<std::vector<uint64_t>> bases;  // by rank; 0: far
  std::vector<std::vector<int>> sockets;     // by rank; -1: near
  std::vector<uint32_t> networks;            // by rank

  Routes(const std::vector<uint64_t>& heaps, uint32_t node_size)
      : bases(heaps.size(), heaps), sockets(heaps.size(), std::vector<int>(heaps.size(), -1)), networks(heaps.size()) {
    for (uint32_t rank = 0; node_size && rank < heaps.size(); ++rank)
      for (uint32_t other = 0; other < rank; ++other) {
        if (rank / node_size == other / node_size) continue;
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) std::abort();
        sockets[rank][other] = pair[0];
        sockets[other][rank] = pair[1];
        bases[rank][other] = bases[other][rank] = 0;
      }
  }

  void open(const std::vector<std::vector<char>>& programs, const std::vector<uint64_t>& heaps) {
#ifndef DISTMK_EMULATED
    for (uint32_t rank = 0; rank < networks.size(); ++rank)
      networks[rank] = distmk_network_open(heaps[rank], reinterpret_cast<const ProgramHeader*>(programs[rank].data()),
                                           sockets[rank].data());
#endif
  }

  void close() {
#ifndef DISTMK_EMULATED
    for (const uint32_t network : networks) distmk_network_close(network);
#endif
  }
};

// Tokens of the vocabulary that a program samples from; 0 if it samples none.
uint32_t vocabulary_of(const char* program) {
  const auto* header = reinterpret_cast<const ProgramHeader*>(program);
  const auto* tasks = reinterpret_cast<const distmk::TaskDesc*>(program + header->tasks_offset);
  for (uint32_t i = 0; i < header->num_tasks; ++i)
    if (tasks[i].type == static_cast<uint16_t>(distmk::TaskType::SAMPLE_ROW))
      return reinterpret_cast<const distmk::SampleRowArgs*>(tasks[i].args)->vocab;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!options.parse(argc, argv)) {
    std::fprintf(stderr, "usage: run_ranks [OPTION ...] ITERATIONS PROGRAM...; run_ranks.cpp has the options\n");
    return 2;
  }
  const auto num_ranks = static_cast<uint32_t>(options.programs.size());
  Requests requests(options.num_requests, options.max_tokens, options.longer);
  std::vector<std::vector<char>> programs;
  std::vector<uint64_t> heaps;
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    programs.push_back(read_file(options.programs[rank]));
    const auto* header = reinterpret_cast<const ProgramHeader*>(programs.back().data());
    if (programs.back().size() < sizeof(ProgramHeader) || header->abi_hash != distmk::ABI_HASH) {
      std::fprintf(stderr, "%s is not a program of this build\n", options.programs[rank]);
      return 2;
    }
    heaps.push_back(reinterpret_cast<uint64_t>(allocate(header->heap_bytes)));
  }
  distmk::HostMasks masks(vocabulary_of(programs[0].data()), options.early_stamp);
  for (uint32_t i = 0; options.constrained && i < options.num_requests; i += 2) masks.constrain(requests.requests[i]);
  Routes routes(heaps, options.far);
  if (options.far) routes.open(programs, heaps);
  std::vector<LaunchParams> params(num_ranks);
  std::vector<std::vector<distmk::WaitRecordABI>> records;
  std::vector<void*> launches;
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    const auto* header = reinterpret_cast<const ProgramHeader*>(programs[rank].data());
    records.emplace_back(header->num_workers + header->num_schedulers);
    LaunchParams& p = params[rank];
    p = {};
    p.program = reinterpret_cast<uint64_t>(header);
    p.heap_bases = reinterpret_cast<uint64_t>(routes.bases[rank].data());
    p.network = routes.networks[rank];
    p.local_base = reinterpret_cast<uint64_t>(allocate(header->local_bytes));
    p.records = reinterpret_cast<uint64_t>(records.back().data());
    p.requests = reinterpret_cast<uint64_t>(requests.requests.data());
    p.prompts = reinterpret_cast<uint64_t>(requests.prompts.data());
    p.tokens = reinterpret_cast<uint64_t>(requests.tokens.data());
    p.commands = reinterpret_cast<uint64_t>(requests.commands.data());
    p.host_counts = reinterpret_cast<uint64_t>(&requests.counts);
    p.eos_ids = reinterpret_cast<uint64_t>(&requests.eos);
    p.prompt_stride = requests.longest;
    p.command_capacity = static_cast<uint32_t>(requests.commands.size());
    p.token_capacity = static_cast<uint32_t>(requests.tokens.size());
    p.num_iterations = options.num_iterations;
    p.max_iterations = options.cut;
    p.deadline_ns = 60000000000ull;
    p.scheduler_threads = !options.ride;
    p.fault = options.fault;
    p.spin_polls = 4;
  }
  launches.resize(num_ranks);
  for (uint32_t rank = 0; rank < num_ranks; ++rank) distmk_start(&params[rank], &launches[rank]);
  masks.begin();
  // Polls all launches in rotation, because a launch starts its next piece only when it is polled.
  for (uint32_t num_over = 0, poll = 0; num_over < num_ranks; ++poll) {
    num_over = 0;
    for (void* launch : launches) num_over += distmk_wait(launch, 500, nullptr);
    if (poll % 16 == 15) masks.advance(requests.counts, requests.tokens);  // late, so that rows are repeated
  }
  for (void*& launch : launches) distmk_join(&launch);
  uint32_t num_preempted = 0;
  for (const distmk::TokenEvent& event : requests.tokens)
    num_preempted += event.finish == static_cast<uint32_t>(distmk::FinishReason::PREEMPTED);
  std::printf("put back: %u\n", num_preempted);
  std::printf("constrained tokens: %u, not allowed: %u, repeated rows: %llu\n", masks.num_tokens(), masks.num_wrong(),
              static_cast<unsigned long long>(requests.counts.num_repeated_rows));
  int status = 0;
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    const uint64_t aborted = reinterpret_cast<const distmk::Control*>(heaps[rank])->abort;
    std::printf("rank %u: %llu iterations, abort %llu\n", rank,
                static_cast<unsigned long long>(params[rank].iterations_done),
                static_cast<unsigned long long>(aborted));
    status |= aborted != 0;
  }
  routes.close();
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    std::free(reinterpret_cast<void*>(heaps[rank]));
    std::free(reinterpret_cast<void*>(params[rank].local_base));
  }
  return status;
}
