// The scheduler step with a simulated host and no model (test_batches.py): which rows each iteration computes, and what
// becomes of the requests. Reads the row buckets of the programs, sizes, and requests with the step in which they come.
// Prints a line for each iteration: its program and, for every running sequence, the request, first position and number
// of rows. Prints another line for each sequence that is preempted or ends.
#include <cstdio>
#include <deque>
#include <vector>

#include "runtime/scheduler_step.h"

namespace distmk {
// There are no other ranks, so no transport.
bool is_remote(const Transport&, uint32_t) { return false; }
void transport_put(Transport&, const Team&, uint32_t, uint64_t, const void*, uint64_t) {}
void transport_signal(Transport&, uint32_t, uint32_t, uint64_t) {}
void transport_send(Transport&, uint32_t) {}
void transport_send_all(Transport&) {}
void transport_quiet(Transport&) {}
void transport_abort(Transport&, uint32_t, uint64_t) {}
}  // namespace distmk

using namespace distmk;

namespace {

constexpr uint32_t MAX_ENTRIES = 1 << 14, MAX_STEPS = 100000;

struct Wanted {
  RequestEntry request;
  uint32_t step, max_new;
};

class Simulation {
 public:
  bool read() {
    uint32_t num_programs = 0, num_requests = 0;
    if (scanf("%u", &num_programs) != 1 || num_programs > MAX_PROGRAMS) return false;
    SchedulerStepArgs args{};
    for (uint32_t i = 0; i < num_programs; ++i)
      if (scanf("%hu", &args.max_rows[i]) != 1) return false;
    if (scanf("%u %u %u %u", &args.max_slots, &args.num_pages, &args.page_size, &args.max_pages) != 4) return false;
    args.num_programs = num_programs;
    args.num_ranks = 1;
    args.max_positions = args.page_size * args.max_pages;
    args.candidates = take(MAX_SEQUENCES * sizeof(Candidate));
    args.page_table = take(MAX_SEQUENCES * args.max_pages * sizeof(int32_t));
    args.state = take(sizeof(BatcherState) + sizeof(PagePoolState) + args.num_pages * sizeof(KvPage) +
                      MAX_SEQUENCES * (sizeof(Sequence) + EVENTS_PER_ROW * sizeof(TokenEvent)));
    for (uint32_t i = 0; i < num_programs; ++i) args.batches[i] = take(sizeof(JobBatch));
    for (uint32_t i = 0; i < num_programs; ++i) {
      steps_.push_back(args);
      steps_[i].program = i;
      steps_[i].batch = args.batches[i];
    }
    if (scanf("%u", &num_requests) != 1) return false;
    for (uint32_t id = 0; id < num_requests; ++id) {
      Wanted wanted{};
      uint32_t is_seeded = 0;
      if (scanf("%u %u %u %u", &wanted.step, &wanted.request.prompt_len, &wanted.max_new, &is_seeded) != 4)
        return false;
      wanted.request.id = id;
      wanted.request.ignore_eos = 1;
      wanted.request.sample = static_cast<uint32_t>(RowSample::GREEDY);
      wanted.request.sampling.flags = is_seeded * static_cast<uint32_t>(SamplingFlag::SEEDED);
      waiting_.push_back(wanted);
      every_.push_back(wanted);
    }
    num_left_ = num_requests;
    return true;
  }

  // Returns whether all requests ended.
  bool run() {
    arena_.resize(end_);
    LaunchParams params{};
    params.local_base = reinterpret_cast<uint64_t>(arena_.data());
    params.requests = reinterpret_cast<uint64_t>(requests_.data());
    params.prompts = reinterpret_cast<uint64_t>(prompt_.data());  // a stride of 0: all requests have the same tokens
    params.commands = reinterpret_cast<uint64_t>(commands_.data());
    params.command_capacity = MAX_ENTRIES;
    params.tokens = reinterpret_cast<uint64_t>(tokens_.data());
    params.token_capacity = static_cast<uint32_t>(tokens_.size());
    params.host_counts = reinterpret_cast<uint64_t>(&counts_);
    params.deadline_ns = ~0ull;
    ProgramHeader header{};
    uint64_t heap = reinterpret_cast<uint64_t>(&control_);
    const RankState state(&params, nullptr, &header, &heap);
    const TaskDesc step{};
    uint32_t program = 0;
    bool resumed = false;
    for (uint64_t iteration = 0, number = 0; number < MAX_STEPS && num_entries_ < MAX_ENTRIES / 2; ++number) {
      send(number);
      Context context(state, Team{});
      context.task.desc = &step;
      context.iteration = iteration;
      context.resumed = resumed;
      const SchedulerStepArgs& args = steps_[program];
      auto* batcher = context.at<BatcherState>(args.state);
      const BatcherMemory memory{batcher, context.at<Batch>(args.batch), context.at<Candidate>(args.candidates),
                                 far_sequences(context, args)};
      TokenEvent events[HostRings::NUM_NEAR];
      if (has_jobs(args))
        prepare_batch_together(context, args, memory, events);
      else
        prepare_batch(context, args, memory);
      take_tokens();
      resumed = context.postponed();
      if (resumed) continue;
      ++iteration;
      const uint32_t stop = context.at<Batch>(args.batch)->stop;
      if (stop == ENDS_LAUNCH) return !num_left_;
      if (stop >= ENDS_TURN) program = stop - ENDS_TURN;
      show(context, program, Sequences(*batcher, far_sequences(context, args)));
    }
    return false;
  }

 private:
  std::vector<SchedulerStepArgs> steps_;  // by program
  std::deque<Wanted> waiting_;
  std::vector<Wanted> every_;  // by id
  uint32_t num_left_ = 0, num_entries_ = 0;
  bool finished_ = false;
  uint64_t end_ = 64;
  std::vector<uint64_t> arena_;  // in words, of which there are more than enough
  std::vector<RequestEntry> requests_ = std::vector<RequestEntry>(MAX_ENTRIES);
  std::vector<int32_t> prompt_ = std::vector<int32_t>(MAX_ENTRIES);
  std::vector<Command> commands_ = std::vector<Command>(MAX_ENTRIES);
  std::vector<TokenEvent> tokens_ = std::vector<TokenEvent>(1 << 12);
  HostCounts counts_{};
  Control control_{};

  uint64_t take(uint64_t num_bytes) {
    const uint64_t offset = end_;
    end_ += (num_bytes + 63) / 64 * 64;
    return (static_cast<uint64_t>(Space::LOCAL) << SPACE_SHIFT) + offset;
  }

  void add(const RequestEntry& request) {
    requests_[num_entries_] = request;
    commands_[counts_.commands++] = {static_cast<uint32_t>(CommandKind::ADD), num_entries_++, request.id, 0};
  }
  void send(uint64_t step) {
    for (; !waiting_.empty() && waiting_.front().step <= step; waiting_.pop_front()) {
      waiting_.front().request.max_new = waiting_.front().max_new;
      add(waiting_.front().request);
    }
    if (num_left_ || finished_) return;
    commands_[counts_.commands++].kind = static_cast<uint32_t>(CommandKind::FINISH);
    finished_ = true;
  }
  void take_tokens() {
    for (; counts_.tokens_read != counts_.tokens; ++counts_.tokens_read) {
      const TokenEvent& event = tokens_[counts_.tokens_read % tokens_.size()];
      RequestEntry& request = every_[event.request].request;
      if (event.finish == static_cast<uint16_t>(FinishReason::PREEMPTED)) {  // its tokens become part of its prompt
        request.max_new = every_[event.request].max_new - request.num_output;
        printf("put_back %u\n", event.request);
        RequestEntry again = request;
        again.prompt_len += request.num_output;
        add(again);
        continue;
      }
      ++request.num_output;
      if (event.finish == static_cast<uint16_t>(FinishReason::NONE)) continue;
      --num_left_;
      printf("end %u %u\n", event.request, request.num_output);
    }
  }

  void show(const Context& context, uint32_t program, const Sequences& sequences) const {
    const auto& batch = *context.at<JobBatch>(steps_[program].batch);
    const bool has_jobs = steps_[program].max_rows[program] > MAX_ROWS;
    const uint32_t num_runs = has_jobs ? batch.batch.num_job_runs : batch.batch.num_runs;
    const BatchRun* runs = has_jobs ? batch.runs : batch.batch.runs;
    std::vector<bool> has_rows(sequences.end());
    const auto id_of = [&](uint32_t slot) { return requests_[sequences[slot].request].id; };
    printf("%u", program);
    for (uint32_t i = 0; i < num_runs; ++i) {
      has_rows[runs[i].slot] = true;
      printf(" %u %d %d", id_of(runs[i].slot), runs[i].kv_len - runs[i].num_rows, runs[i].num_rows);
    }
    for (uint32_t slot = 0; slot < sequences.end(); ++slot)
      if (!sequences.is_free(slot) && !has_rows[slot]) printf(" %u %u 0", id_of(slot), sequences[slot].position);
    printf("\n");
  }
};

}  // namespace

int main() {
  Simulation simulation;
  if (!simulation.read()) return 2;
  return simulation.run() ? 0 : 1;
}
