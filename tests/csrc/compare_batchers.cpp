// The scheduler step of job programs by one thread and by a team (test_batchers.py): from the same memory, Batcher and
// TeamBatcher must make the same memory, byte by byte. A simulated host sends requests, cancels some, and reads tokens
// at times; tokens are drawn at random. Each step of a job program runs three times: by the leader of a warp, by all
// lanes, and by a team of one thread. Arguments: a seed and a number of scenarios. Prints how often each event came.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "device/core/scheduler.cuh"
#include "emulator/fibers.h"

namespace distmk {
// All ranks are reached by pointers, so there is no transport.
class Transport {};
DISTMK_BODY bool is_remote(const Transport&, uint32_t) { return false; }
DISTMK_BODY void transport_put(Transport&, const Team&, uint32_t, uint64_t, const void*, uint64_t) {}
DISTMK_BODY void transport_signal(Transport&, uint32_t, uint32_t, uint64_t) {}
DISTMK_BODY void transport_send(Transport&, uint32_t) {}
DISTMK_BODY void transport_send_all(Transport&) {}
DISTMK_BODY void transport_quiet(Transport&) {}
DISTMK_BODY void transport_abort(Transport&, uint32_t, uint64_t) {}
}  // namespace distmk

using namespace distmk;

namespace {

constexpr uint32_t MAX_ENTRIES = 1 << 11, MAX_STEPS = 600, NUM_TOKENS = 50;

std::mt19937 rng;
uint32_t draw(uint32_t least, uint32_t most) { return least + static_cast<uint32_t>(rng() % (most - least + 1)); }
bool chance(uint32_t percent) { return draw(1, 100) <= percent; }
std::map<std::string, uint32_t> seen;  // events, by name

struct Request {
  uint32_t entry = 0;  // its last one
  uint32_t max_new = 0;
  bool is_over = false;
};

class Scenario {
 public:
  Scenario() {
    draw_sizes();
    lay_out();
    draw_requests();
  }

  // Returns whether all steps agreed.
  bool run() {
    const RankState state(&params_, nullptr, &header_, bases_.data());
    uint32_t program = 0;
    bool resumed = false;
    uint64_t iteration = 0;
    for (uint32_t step = 0; step < MAX_STEPS && num_entries_ + 300 < MAX_ENTRIES; ++step) {
      send();
      params_.first_iteration = iteration;
      const SchedulerStepArgs& args = steps_[program];
      draw_tokens(args);
      const bool has_run =
          has_jobs(args) ? run_all(state, args, iteration, resumed) : run_step(LEADER, state, args, iteration, resumed);
      if (!has_run) return false;
      if (chance(reads_percent_)) take_tokens();
      resumed = postponed_;
      seen["postponed"] += resumed;
      if (resumed) continue;
      ++iteration;
      note(state, args);
      const uint32_t stop = at<Batch>(args.batch)->stop;
      if (stop == ENDS_LAUNCH) return true;
      if (stop >= ENDS_TURN) program = stop - ENDS_TURN;
      seen["turn"] += stop >= ENDS_TURN;
    }
    return true;
  }

 private:
  enum Who { LEADER, LANES, ONE_THREAD };
  std::vector<SchedulerStepArgs> steps_;  // by program
  std::vector<uint64_t> memory_;          // all that a step may write
  uint64_t heap_bytes_ = sizeof(Control), local_bytes_ = 0, pages_offset_ = 0, commands_offset_ = 0, counts_offset_ = 0;
  uint32_t num_ranks_ = 1, num_sampled_ = 0, page_stride_ = 0;
  std::vector<RequestEntry> requests_ = std::vector<RequestEntry>(MAX_ENTRIES);
  std::vector<int32_t> prompts_, end_tokens_;
  std::vector<uint64_t> bases_;
  std::deque<Request> all_;  // by id
  std::deque<RequestEntry> waiting_;
  uint32_t num_entries_ = 0, reads_percent_ = 0, arrival_percent_ = 0, cancel_percent_ = 0, pending_percent_ = 0;
  bool is_large_ = false, finished_ = false, postponed_ = false;
  LaunchParams params_{};
  ProgramHeader header_{};

  template <class T>
  T* at(uint64_t operand) {
    const uint64_t offset = operand & ((1ull << SPACE_SHIFT) - 1);
    const bool in_heap = operand >> SPACE_SHIFT == static_cast<uint64_t>(Space::HEAP);
    return reinterpret_cast<T*>(reinterpret_cast<char*>(memory_.data()) + offset +
                                (in_heap ? 0 : num_ranks_ * heap_bytes_));
  }
  HostCounts& counts() { return *at<HostCounts>(counts_offset_); }
  Command& command(uint64_t index) { return at<Command>(commands_offset_)[index % params_.command_capacity]; }
  static uint64_t grow(uint64_t& end, uint64_t num_bytes, Space space) {
    const uint64_t offset = end;
    end += (num_bytes + 63) / 64 * 64;
    return (static_cast<uint64_t>(space) << SPACE_SHIFT) + offset;
  }
  uint64_t take(uint64_t num_bytes) { return grow(local_bytes_, num_bytes, Space::LOCAL); }
  uint64_t take_of_heap(uint64_t num_bytes) { return grow(heap_bytes_, num_bytes, Space::HEAP); }

  void draw_sizes() {
    SchedulerStepArgs args{};
    const uint16_t buckets[] = {MAX_ROWS, 20, 33, 70, 130, 300};
    for (const uint16_t rows : buckets)
      if (chance(rows == 130 ? 80 : 40)) args.max_rows[args.num_programs++] = rows;
    is_large_ = chance(40);
    if (args.num_programs == MAX_PROGRAMS) --args.num_programs;
    if (is_large_ || !args.num_programs) args.max_rows[args.num_programs++] = 400;
    const uint32_t most = args.max_rows[args.num_programs - 1];
    args.max_slots = draw(1, most < MAX_SEQUENCES ? most : MAX_SEQUENCES);
    if (is_large_ || chance(50)) args.max_slots = most < MAX_SEQUENCES ? most : MAX_SEQUENCES;
    args.page_size = 1u << draw(0, 4);
    args.max_pages = draw(2, 12);
    args.num_pages =
        chance(30) ? draw(args.max_pages, 3 * args.max_pages) : draw(args.max_pages, args.max_pages * args.max_slots);
    if (is_large_) args.num_pages = draw(2, args.max_pages) * args.max_slots;
    num_ranks_ = args.num_ranks = chance(50) ? 1 : draw(2, 3);
    args.max_positions = args.page_size * args.max_pages;
    steps_.assign(args.num_programs, args);
    reads_percent_ = chance(80) ? 100 : 40;
    arrival_percent_ = is_large_ ? 100 : draw(5, 100);
    cancel_percent_ = chance(50) ? 0 : 5;
    pending_percent_ = chance(50) ? 0 : draw(1, 60);
  }

  void lay_out() {
    SchedulerStepArgs args = steps_[0];
    const uint32_t num_slots = distmk::num_slots(args);
    num_sampled_ = num_slots;
    args.candidates = take(num_ranks_ * num_slots * sizeof(Candidate));
    args.state = take(sizeof(BatcherState) + sizeof(PagePoolState) + args.num_pages * sizeof(KvPage) +
                      (num_slots - MAX_ROWS) * (sizeof(Sequence) + EVENTS_PER_ROW * sizeof(TokenEvent)));
    if (chance(70)) {
      args.drawn = take(num_slots * sizeof(Candidate));
      args.slots = take(num_slots * sizeof(SlotSampling));
      args.logprobs = take(num_slots * sizeof(LogprobRecord));
    }
    args.page_table = take_of_heap(num_slots * args.max_pages * sizeof(int32_t));
    for (uint32_t i = 0; i < args.num_programs; ++i) args.batches[i] = take_of_heap(sizeof(JobBatch));
    for (uint32_t i = 0; i < args.num_programs; ++i) {
      args.program = i;
      args.batch = args.batches[i];
      steps_[i] = args;
    }
    params_.token_capacity = EVENTS_PER_ROW * num_slots + draw(0, 100);
    params_.command_capacity = 2 * MAX_ENTRIES;
    page_stride_ = 1 + args.max_pages;
    const uint64_t tokens = take(params_.token_capacity * sizeof(TokenEvent));
    const uint64_t records = take(params_.token_capacity * sizeof(LogprobRecord));
    commands_offset_ = take(params_.command_capacity * sizeof(Command));
    counts_offset_ = take(sizeof(HostCounts));
    pages_offset_ = take(MAX_ENTRIES * page_stride_ * sizeof(PageRef));
    memory_.resize((num_ranks_ * heap_bytes_ + local_bytes_) / sizeof(uint64_t));
    for (uint64_t& word : memory_) word = 0;
    for (uint32_t rank = 0; rank < num_ranks_; ++rank)
      bases_.push_back(reinterpret_cast<uint64_t>(memory_.data()) + rank * heap_bytes_);
    prompts_.resize(MAX_ENTRIES + args.max_positions);  // a stride of 1: requests have different prompts
    for (int32_t& token : prompts_) token = static_cast<int32_t>(draw(0, NUM_TOKENS - 1));
    for (uint32_t i = draw(0, 2); i > 0; --i) end_tokens_.push_back(static_cast<int32_t>(draw(0, NUM_TOKENS - 1)));
    params_.local_base = reinterpret_cast<uint64_t>(at<char>(static_cast<uint64_t>(Space::LOCAL) << SPACE_SHIFT));
    params_.requests = reinterpret_cast<uint64_t>(requests_.data());
    params_.prompts = reinterpret_cast<uint64_t>(prompts_.data());
    params_.prompt_stride = 1;
    params_.commands = reinterpret_cast<uint64_t>(at<char>(commands_offset_));
    params_.tokens = reinterpret_cast<uint64_t>(at<char>(tokens));
    params_.logprobs = args.logprobs ? reinterpret_cast<uint64_t>(at<char>(records)) : 0;
    params_.host_counts = reinterpret_cast<uint64_t>(&counts());
    params_.eos_ids = reinterpret_cast<uint64_t>(end_tokens_.data());
    params_.num_eos = static_cast<uint16_t>(end_tokens_.size());
    params_.deadline_ns = ~0ull;
    header_.num_ranks = num_ranks_;
  }

  void draw_requests() {
    const SchedulerStepArgs& args = steps_[0];
    const uint32_t seeded = chance(50) ? 0 : draw(1, 100), ignores = draw(0, 100),
                   longest = draw(2, args.max_positions);
    for (uint32_t left = draw(1, 3 * args.max_slots + 10); left > 0; --left) {
      RequestEntry request{};
      request.id = static_cast<uint32_t>(all_.size());
      request.prompt_len = draw(1, longest - 1);
      const uint32_t max_new = draw(1, args.max_positions - request.prompt_len);
      request.max_new = chance(50) ? max_new : draw(1, max_new);
      request.ignore_eos = chance(ignores);
      request.sample = static_cast<uint32_t>(args.drawn && chance(40) ? RowSample::DRAW : RowSample::GREEDY);
      if (args.drawn && chance(10)) request.num_scores = draw(0, request.prompt_len - 1);
      request.reports_logprobs = args.drawn && chance(20);
      request.sampling.flags = chance(seeded) * static_cast<uint32_t>(SamplingFlag::SEEDED);
      all_.push_back({0, request.max_new, false});
      waiting_.push_back(request);
    }
  }

  void send() {
    for (uint32_t most = is_large_ || chance(30) ? 100 : 2; most && !waiting_.empty() && chance(arrival_percent_);
         --most) {
      add(waiting_.front());
      waiting_.pop_front();
    }
    if (!all_.empty() && chance(cancel_percent_)) {
      const uint32_t id = draw(0, static_cast<uint32_t>(all_.size()) - 1);
      command(counts().commands++) = {static_cast<uint32_t>(CommandKind::CANCEL), 0, id, 0};
    }
    bool is_over = waiting_.empty();
    for (const Request& request : all_) is_over &= request.is_over;
    if (!is_over || finished_) return;
    command(counts().commands++).kind = static_cast<uint32_t>(CommandKind::FINISH);
    finished_ = true;
  }
  // Offers the pages of an earlier request, some of which may be taken again.
  void add(RequestEntry request) {
    PageRef* pages = at<PageRef>(pages_offset_);
    if (num_entries_ && chance(30)) {
      request.prefix = reinterpret_cast<uint64_t>(pages + draw(0, num_entries_ - 1) * page_stride_ + 1);
      request.num_prefix_pages = draw(0, page_stride_ - 1);
    }
    request.pages = chance(80) ? reinterpret_cast<uint64_t>(pages + num_entries_ * page_stride_) : 0;
    all_[request.id].entry = num_entries_;
    requests_[num_entries_] = request;
    command(counts().commands++) = {static_cast<uint32_t>(CommandKind::ADD), num_entries_++, request.id, 0};
  }

  // The candidates of all ranks, of which several may be the best, drawn tokens, some of which are none, and records.
  void draw_tokens(const SchedulerStepArgs& args) {
    for (uint32_t i = 0; i < num_ranks_ * num_sampled_; ++i)
      at<Candidate>(args.candidates)[i] = {static_cast<float>(draw(0, 3)),
                                           static_cast<int32_t>(draw(0, NUM_TOKENS - 1))};
    for (uint32_t i = 0; args.drawn && i < num_sampled_; ++i) {
      auto token = static_cast<int32_t>(draw(0, NUM_TOKENS - 1));
      if (pending_percent_ && chance(1)) token = NO_TOKEN_ALLOWED;
      if (chance(pending_percent_)) token = PENDING_TOKEN;
      at<Candidate>(args.drawn)[i].token = token;
      at<LogprobRecord>(args.logprobs)[i].token = static_cast<int32_t>(rng());
    }
  }

  void take_tokens() {
    for (; counts().tokens_read != counts().tokens; ++counts().tokens_read) {
      const TokenEvent event =
          reinterpret_cast<const TokenEvent*>(params_.tokens)[counts().tokens_read % params_.token_capacity];
      Request& request = all_[event.request];
      RequestEntry again = requests_[request.entry];
      const auto finish = static_cast<FinishReason>(event.finish);
      if (event.token >= 0) requests_[request.entry].sampling.reserved++;  // tokens since the last admission
      seen["record"] += event.has_logprobs;
      seen["score"] += event.token < 0 && finish == FinishReason::NONE;
      if (finish == FinishReason::NONE) continue;
      seen["end"] += event.token >= 0;
      seen["preempted"] += finish == FinishReason::PREEMPTED;
      seen["cancelled"] += finish == FinishReason::ABORT;
      seen["no token"] += finish == FinishReason::ERROR;
      request.is_over = finish != FinishReason::PREEMPTED;
      if (request.is_over) continue;
      // Its tokens become part of its prompt.
      again.num_output += again.sampling.reserved;
      again.prompt_len += again.sampling.reserved;
      again.max_new = request.max_new - again.num_output;
      again.sampling.reserved = again.num_prefix_pages = 0;
      if (again.num_scores) again.num_scores = draw(0, again.num_scores);
      add(again);
    }
  }

  // Runs a step on this thread's emulated warp. `reserved` of the requests is the host's, and not to be seen.
  bool run_step(Who who, const RankState& state, const SchedulerStepArgs& args, uint64_t iteration, bool resumed) {
    const TaskDesc desc{};
    emulator::run_grid(1, 32, sizeof(Shared), rng(), [&] {
      const uint32_t lane = threadIdx.x;
      if (who == ONE_THREAD && lane) return;
      Context context(state, who == ONE_THREAD ? Team{0, 1} : Team{lane, 32});
      context.task.desc = &desc;
      context.iteration = iteration;
      context.resumed = resumed;
      if (who == LEADER)
        body_scheduler_step(context, args);
      else
        body_job_step(context, args);
      if (!lane) postponed_ = context.postponed();
    });
    return true;
  }
  bool run_all(const RankState& state, const SchedulerStepArgs& args, uint64_t iteration, bool resumed) {
    const std::vector<uint64_t> before = memory_;
    run_step(LEADER, state, args, iteration, resumed);
    const std::vector<uint64_t> expected = memory_;
    const bool was_postponed = postponed_;
    for (const Who who : {LANES, ONE_THREAD}) {
      memcpy(memory_.data(), before.data(), before.size() * sizeof(uint64_t));
      run_step(who, state, args, iteration, resumed);
      if (memory_ == expected && postponed_ == was_postponed) continue;
      report(who, args, expected);
      return false;
    }
    return true;
  }
  void report(Who who, const SchedulerStepArgs& args, const std::vector<uint64_t>& expected) {
    uint64_t word = 0;
    while (word < memory_.size() && memory_[word] == expected[word]) ++word;
    const char* of = who == LANES ? "lanes" : "one thread";
    const uint64_t local = word * sizeof(uint64_t) - num_ranks_ * heap_bytes_;
    printf("%s differ at word %llu of %llu (heaps %llu x %llu; local byte %lld): want %llx, got %llx\n", of,
           static_cast<unsigned long long>(word), static_cast<unsigned long long>(memory_.size()),
           static_cast<unsigned long long>(num_ranks_), static_cast<unsigned long long>(heap_bytes_),
           static_cast<long long>(local), static_cast<unsigned long long>(word < memory_.size() ? expected[word] : 0),
           static_cast<unsigned long long>(word < memory_.size() ? memory_[word] : 0));
    const uint64_t mask = (1ull << SPACE_SHIFT) - 1;
    printf("candidates %llu state %llu tokens %lld commands %llu counts %llu pages %llu\n",
           static_cast<unsigned long long>(args.candidates & mask), static_cast<unsigned long long>(args.state & mask),
           static_cast<long long>(params_.tokens - params_.local_base),
           static_cast<unsigned long long>(commands_offset_ & mask),
           static_cast<unsigned long long>(counts_offset_ & mask),
           static_cast<unsigned long long>(pages_offset_ & mask));
  }

  void note(const RankState&, const SchedulerStepArgs& args) {
    const auto& state = *at<BatcherState>(args.state);
    if (!has_jobs(args)) return;
    const auto& batch = *at<JobBatch>(args.batch);
    ++seen["job step"];
    seen["more than a warp"] += batch.batch.num_rows > 32;
    seen["more than 96 rows"] += batch.batch.num_rows > 96;
    seen["repeated"] += counts().num_repeated_rows > 0;
    seen["prompt"] += batch.batch.num_job_rows > batch.batch.num_rows;
    seen["new page"] += state.pages_changed;
    seen["seeded"] += state.num_seeded > 0;
    const auto& pool = *reinterpret_cast<const PagePoolState*>(&state + 1);
    seen["page taken again"] += state.pages_changed && pool.num_touched == args.num_pages;
    seen["waiting"] += state.num_admitted != state.num_commands;
  }
};

}  // namespace

int main(int, char** argv) {
  const auto seed = static_cast<uint32_t>(strtoul(argv[1], nullptr, 10));
  for (uint32_t i = 0; i < strtoul(argv[2], nullptr, 10); ++i) {
    rng.seed(seed + i);
    Scenario scenario;
    if (scenario.run()) continue;
    printf("scenario %u\n", seed + i);
    return 1;
  }
  for (const auto& [name, count] : seen) printf("%s: %u\n", name.c_str(), count);
  return 0;
}
