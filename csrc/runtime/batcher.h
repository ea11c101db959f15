// The scheduler step of rank 0, between two iterations: takes the sampled tokens, finishes and admits requests, and
// builds the next batch (continuous batching with chunked prefill).
#pragma once
#include "runtime/argmax.h"
#include "runtime/context.h"
#include "runtime/host_rings.h"

namespace distmk {

// What the batcher works on: the originals in the heap, or copies in shared memory.
struct BatcherMemory {
  BatcherState* state;
  Batch* batch;
  const Candidate* candidates;
};

// How a scheduler step ends: postponed while there is nothing to run, or while the host has left no room for tokens.
enum class Step : uint32_t { POSTPONED, DONE, DONE_WITH_PAGES };

class Batcher {
 public:
  DISTMK_FN Batcher(Context& context, const SchedulerStepArgs& args, const BatcherMemory& memory)
      : context_(context),
        args_(args),
        state_(*memory.state),
        batch_(*memory.batch),
        candidates_(memory.candidates),
        page_table_(context.at<int32_t>(args.page_table)),
        free_pages_(reinterpret_cast<int32_t*>(context.at<BatcherState>(args.state) + 1)) {}

  // Turns the batch of the last iteration into that of this one. Afterwards publish() tells the host about it.
  DISTMK_FN Step advance() {
    if (!context_.resumed && context_.iteration == 0) reset();
    if (!rings_.has_room()) return Step::POSTPONED;
    const bool same_rows = state_.num_taken != context_.iteration && take_tokens();
    const bool cancelled = read_commands();
    const bool admitted = admit();
    rings_.count();
    if (same_rows && !cancelled && !admitted) {
      advance_rows();
      return Step::DONE;
    }
    if (!state_.num_running && !is_over()) return Step::POSTPONED;
    build_batch();
    return admitted ? Step::DONE_WITH_PAGES : Step::DONE;
  }

  DISTMK_FN void publish() const { rings_.publish(context_.iteration); }

 private:
  Context& context_;
  const SchedulerStepArgs& args_;
  BatcherState& state_;
  Batch& batch_;
  const Candidate* candidates_;
  int32_t* page_table_;
  int32_t* free_pages_;
  HostRings rings_{context_.params(), state_};

  DISTMK_FN const Request& request_of(const Sequence& sequence) const {
    return reinterpret_cast<const Request*>(context_.params().requests)[sequence.request];
  }

  DISTMK_FN void reset() {
    state_.num_running = state_.first_slot = state_.finishing = 0;
    state_.num_commands = state_.num_admitted = state_.num_published = state_.num_taken = state_.tokens_read = 0;
    state_.beat_ns = now_ns();
    state_.num_free_pages = args_.num_pages;
    DISTMK_NO_UNROLL
    for (uint32_t slot = 0; slot < MAX_ROWS; ++slot) state_.slots[slot].request = -1;
    DISTMK_NO_UNROLL
    for (uint32_t page = 0; page < args_.num_pages; ++page)
      free_pages_[page] = static_cast<int32_t>(args_.num_pages - 1 - page);
  }

  DISTMK_FN int32_t best_token(uint32_t row) const {
    Candidate best = candidates_[row];
    DISTMK_NO_UNROLL
    for (uint32_t rank = 1; rank < args_.num_ranks; ++rank) best = better_of(best, candidates_[rank * MAX_ROWS + row]);
    return best.token;
  }

  // A drawn row's token, or the best.
  DISTMK_FN int32_t token_of_row(uint32_t row) const {
    const bool is_drawn = args_.drawn && batch_.rows[row].sample == static_cast<int32_t>(RowSample::DRAW);
    return is_drawn ? load_drawn(context_.at<Candidate>(args_.drawn) + row) : best_token(row);
  }
  // Written by another SM.
  DISTMK_FN static int32_t load_drawn(const Candidate* drawn) {
    return *reinterpret_cast<const volatile int32_t*>(&drawn->token);
  }

  DISTMK_FN bool is_eos(int32_t token) const {
    const auto* ids = reinterpret_cast<const int32_t*>(context_.params().eos_ids);
    DISTMK_NO_UNROLL
    for (uint32_t i = 0; i < context_.params().num_eos; ++i)
      if (ids[i] == token) return true;
    return false;
  }

  // Returns whether each row gave a token and no sequence finished.
  DISTMK_FN bool take_tokens() {
    const uint32_t num_running = state_.num_running;
    state_.num_taken = context_.iteration;
    DISTMK_NO_UNROLL
    for (uint32_t row = 0; row < batch_.num_rows; ++row) {
      if (!batch_.rows[row].sample) continue;
      const auto slot = static_cast<uint32_t>(batch_.rows[row].slot);
      Sequence& sequence = state_.slots[slot];
      const Request& request = request_of(sequence);
      const int32_t token = token_of_row(row);
      sequence.last_token = token;
      ++sequence.num_generated;
      FinishReason finish = FinishReason::NONE;
      if (!request.ignore_eos && is_eos(token))
        finish = FinishReason::STOP;
      else if (sequence.num_generated == request.max_new || sequence.position == args_.max_positions)
        finish = FinishReason::LENGTH;
      rings_.add(request.id, token, finish, context_.iteration - 1);
      if (finish != FinishReason::NONE) release(slot);
    }
    return state_.num_running == num_running && rings_.num_events() == batch_.num_rows;
  }

  // The common case: the same rows, one position further. build_batch() could only change their order.
  DISTMK_FN void advance_rows() {
    batch_.num_reset_rows = batch_.num_rows;
    DISTMK_NO_UNROLL
    for (uint32_t i = 0; i < batch_.num_rows; ++i) {
      BatchRow& row = batch_.rows[i];
      Sequence& sequence = state_.slots[row.slot];
      row.token = sequence.last_token;
      row.position = static_cast<int32_t>(sequence.position++);
      ++batch_.runs[i].kv_len;
    }
  }

  DISTMK_FN void release(uint32_t slot) {
    Sequence& sequence = state_.slots[slot];
    DISTMK_NO_UNROLL
    for (uint32_t page = 0; page < sequence.num_pages; ++page)
      free_pages_[state_.num_free_pages++] = page_table_[slot * args_.max_pages + page];
    sequence.request = -1;
    --state_.num_running;
  }

  // Whether the launch ends: the host sends no more, and nothing waits.
  DISTMK_FN bool is_over() const { return state_.finishing && state_.num_admitted == state_.num_commands; }

  // Reads what the host has sent. Requests stay in the ring until they are admitted. Returns whether a slot was freed.
  DISTMK_FN bool read_commands() {
    bool freed = false;
    const uint64_t sent = rings_.num_sent();
    DISTMK_NO_UNROLL
    for (; state_.num_commands != sent && rings_.may_cancel(); ++state_.num_commands) {
      const Command& command = rings_.command(state_.num_commands);
      if (command.kind == static_cast<uint32_t>(CommandKind::FINISH)) state_.finishing = 1;
      if (command.kind == static_cast<uint32_t>(CommandKind::CANCEL)) freed |= cancel(command.id);
    }
    return freed;
  }

  // A request that is not found is over already: the host has not read its last token yet.
  DISTMK_FN bool cancel(uint32_t id) {
    DISTMK_NO_UNROLL
    for (uint32_t slot = 0; slot < args_.max_slots; ++slot) {
      const Sequence& sequence = state_.slots[slot];
      if (sequence.request < 0 || request_of(sequence).id != id) continue;
      rings_.add(id, -1, FinishReason::ABORT, context_.iteration);
      release(slot);
      return true;
    }
    DISTMK_NO_UNROLL
    for (uint64_t index = state_.num_admitted; index != state_.num_commands; ++index) {
      Command& waiting = rings_.command(index);
      if (waiting.id != id || waiting.kind != static_cast<uint32_t>(CommandKind::ADD)) continue;
      waiting.kind = static_cast<uint32_t>(CommandKind::CANCEL);  // admit() passes it by
      rings_.add(id, -1, FinishReason::ABORT, context_.iteration);
    }
    return false;
  }

  // Requests start in order. Each reserves all the pages that it can ever need, so that none is preempted.
  DISTMK_FN bool admit() {
    bool admitted = false;
    DISTMK_NO_UNROLL
    for (uint32_t slot = 0; state_.num_admitted != state_.num_commands; ++state_.num_admitted) {
      const Command& command = rings_.command(state_.num_admitted);
      if (command.kind != static_cast<uint32_t>(CommandKind::ADD)) continue;
      while (slot < args_.max_slots && state_.slots[slot].request >= 0) ++slot;
      if (slot == args_.max_slots || !start(slot, command.entry)) break;
      admitted = true;
    }
    return admitted;
  }

  // Starts a request in a free slot. False: too few pages are free.
  DISTMK_FN bool start(uint32_t slot, uint32_t entry) {
    const Request& request = reinterpret_cast<const Request*>(context_.params().requests)[entry];
    uint32_t positions = request.prompt_len + request.max_new;
    if (positions > args_.max_positions) positions = args_.max_positions;
    const uint32_t num_pages = (positions + args_.page_size - 1) / args_.page_size;
    if (num_pages > state_.num_free_pages) return false;
    DISTMK_NO_UNROLL
    for (uint32_t page = 0; page < num_pages; ++page)
      page_table_[slot * args_.max_pages + page] = free_pages_[--state_.num_free_pages];
    state_.slots[slot] = {static_cast<int32_t>(entry), 0, 0, 0, num_pages, 0};
    ++state_.num_running;
    if (args_.slots && request.sample == static_cast<uint32_t>(RowSample::DRAW)) {
      const LaunchParams& params = context_.params();
      SlotSampling sampling = request.sampling;
      sampling.tokens = params.prompts + uint64_t{params.prompt_stride} * entry * sizeof(int32_t);
      sampling.num_counted = 0;
      context_.at<SlotSampling>(args_.slots)[slot] = sampling;
    }
    return true;
  }

  DISTMK_FN void add_run(uint32_t slot, uint32_t num_rows) {
    Sequence& sequence = state_.slots[slot];
    const Request& request = request_of(sequence);
    const LaunchParams& params = context_.params();
    const auto* prompt =
        reinterpret_cast<const int32_t*>(params.prompts) + uint64_t{params.prompt_stride} * sequence.request;
    batch_.runs[batch_.num_runs++] = {static_cast<int32_t>(batch_.num_rows), static_cast<int32_t>(num_rows),
                                      static_cast<int32_t>(slot), static_cast<int32_t>(sequence.position + num_rows)};
    DISTMK_NO_UNROLL
    for (uint32_t i = 0; i < num_rows; ++i, ++sequence.position) {
      const bool in_prompt = sequence.position < request.prompt_len;
      const bool samples = sequence.position + 1 >= request.prompt_len;
      const RowSample how =
          request.sample == static_cast<uint32_t>(RowSample::DRAW) ? RowSample::DRAW : RowSample::GREEDY;
      const auto sample = static_cast<int32_t>(samples ? how : RowSample::NONE);
      batch_.rows[batch_.num_rows++] = {in_prompt ? prompt[sequence.position] : sequence.last_token,
                                        static_cast<int32_t>(sequence.position), static_cast<int32_t>(slot), sample};
    }
  }

  // One row for every sequence that decodes, then prompt chunks in the remaining rows.
  DISTMK_FN void build_batch() {
    batch_.num_reset_rows = context_.iteration ? batch_.num_rows : 0;
    batch_.num_rows = batch_.num_runs = 0;
    DISTMK_NO_UNROLL
    for (uint32_t slot = 0; slot < args_.max_slots; ++slot) {
      const Sequence& sequence = state_.slots[slot];
      if (sequence.request >= 0 && sequence.position >= request_of(sequence).prompt_len) add_run(slot, 1);
    }
    DISTMK_NO_UNROLL
    for (uint32_t i = 0; i < args_.max_slots && batch_.num_rows < MAX_ROWS; ++i) {
      const uint32_t slot = (state_.first_slot + i) % args_.max_slots;
      const Sequence& sequence = state_.slots[slot];
      if (sequence.request < 0 || sequence.position >= request_of(sequence).prompt_len) continue;
      const uint32_t left = request_of(sequence).prompt_len - sequence.position;
      const uint32_t room = MAX_ROWS - batch_.num_rows;
      add_run(slot, left < room ? left : room);
      if (left > room) state_.first_slot = slot;  // the next batch continues this prompt first
    }
    batch_.stop = batch_.num_rows == 0;
    if (batch_.num_reset_rows < batch_.num_rows) batch_.num_reset_rows = batch_.num_rows;
  }
};

// While the batcher waits for the host, tells the waits of all ranks that the launch is alive (wait.h).
DISTMK_FN void beat(Context& context, BatcherState& state, uint32_t num_ranks) {
  const Team& team = context.team;
  bool due = false;
  if (team.leader()) due = now_ns() - state.beat_ns > context.params().deadline_ns / 8;
  if (team.all(team.leader() ? !due : true)) return;
  constexpr uint64_t operand = (static_cast<uint64_t>(Space::HEAP) << SPACE_SHIFT) + offsetof(Control, beat);
  auto* own = context.at<uint64_t>(operand);
  if (team.leader()) {
    state.beat_ns = now_ns();
    store_relaxed(own, load_relaxed(own) + 1);
  }
  team.sync();
  DISTMK_NO_UNROLL
  for (uint32_t rank = 0; rank < num_ranks; ++rank)
    if (rank != context.rank()) context.put_now(rank, operand, own, sizeof(uint64_t));
}

// Ends a step without a batch. The scheduler calls the body again.
DISTMK_FN void postpone(Context& context, const SchedulerStepArgs& args, const BatcherMemory& memory,
                        const Batcher& batcher) {
  const Team& team = context.team;
  beat(context, *memory.state, args.num_ranks);
  team.sync();
  if (memory.batch != context.at<Batch>(args.batch))
    copy_bytes(team, context.at<BatcherState>(args.state), memory.state, sizeof(BatcherState));
  if (team.leader()) batcher.publish();
  context.postpone();
}

// The body of the scheduler step: builds the batch, sends it to every rank, and does last what no rank waits for: the
// host's tokens, and the state from which the next launch starts. While there is no batch to build it is postponed.
DISTMK_FN void prepare_batch(Context& context, const SchedulerStepArgs& args, const BatcherMemory& memory) {
  const Team& team = context.team;
  Batcher batcher(context, args, memory);
  Step step = Step::DONE;
  if (team.leader()) step = batcher.advance();
  const bool pages_changed = !team.all(step != Step::DONE_WITH_PAGES);
  if (!team.all(step != Step::POSTPONED)) return postpone(context, args, memory, batcher);
  team.sync();  // a warp vote orders no memory
  const bool copied = memory.batch != context.at<Batch>(args.batch);
  if (copied) {
    copy_bytes(team, context.at<Batch>(args.batch), memory.batch, sizeof(Batch));
    team.sync();  // the transport reads the heap's copy
  }
  const uint64_t table_bytes = uint64_t{MAX_ROWS} * args.max_pages * sizeof(int32_t);
  DISTMK_NO_UNROLL
  for (uint32_t rank = 0; rank < args.num_ranks; ++rank) {
    if (rank == context.rank()) continue;
    if (pages_changed) context.put(rank, args.page_table, context.at<void>(args.page_table), table_bytes);
    context.put(rank, args.batch, context.at<void>(args.batch), sizeof(Batch));
  }
  context.finish();  // signals all ranks after one fence
  if (copied) copy_bytes(team, context.at<BatcherState>(args.state), memory.state, sizeof(BatcherState));
  if (team.leader()) batcher.publish();
}

}  // namespace distmk
