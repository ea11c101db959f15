// The scheduler step of rank 0, between two iterations: it takes the sampled tokens, finishes and admits requests, and
// builds the next batch (continuous batching with chunked prefill).
#pragma once
#include "runtime/batch_builder.h"
#include "runtime/host_rings.h"
#include "runtime/logprob_ring.h"

namespace distmk {

// What the batcher works on: the originals, or copies in shared memory.
struct BatcherMemory {
  BatcherState* state;
  Batch* batch;
  const Candidate* candidates;
  Sequence* far;  // see Sequences
};

// What a scheduler step has produced, in bits. A step without a batch is postponed: nothing can run, or the host has
// left no room for tokens.
enum Step : uint32_t { HAS_BATCH = 1, HAS_PAGES = 2, HAS_RECORDS = 4 };

// `DRAFTS`: the program has drafts (DraftBatcher).
template <bool DRAFTS>
class BasicBatcher {
 public:
  static constexpr bool TOGETHER = false;  // see TeamBatcher
  static constexpr bool HAS_DRAFTS = DRAFTS;

  // `events` is memory for HostRings. It is no member, and no member points to another one: a GPU keeps the batcher in
  // registers only if nothing needs its address.
  DISTMK_FN BasicBatcher(Context& context, const SchedulerStepArgs& args, const BatcherMemory& memory,
                         TokenEvent* events)
      : context_(context),
        args_(args),
        state_(*memory.state),
        batch_(*memory.batch),
        candidates_(memory.candidates),
        sequences_(*memory.state, memory.far),
        rings_(context.params(), state_, num_slots(args), events, far_events(context, args)) {}

  // Turns the batch of the last iteration into the next one. Returns bits of Step. Afterwards publish() informs the
  // host.
  DISTMK_FN uint32_t advance() {
    if (!begin()) return 0;
    pages_.changes_were_put();
    const bool has_batch = next_batch();
    rings_.count();
    return step_bits(has_batch);
  }

  // If the rows have records, all threads of the team call this before publish() announces the rows' tokens.
  DISTMK_FN void copy_records() const {
    distmk::copy_records(context_.team, context_.params(), context_.at<LogprobRecord>(args_.logprobs), reported_,
                         rings_.first_place());
  }
  DISTMK_FN void publish() const { rings_.publish(iteration_); }
  // The program that the batch is for.
  DISTMK_FN uint32_t program() const { return program_; }

 protected:
  using Builder = BatchBuilder<DRAFTS>;
  Context& context_;
  const SchedulerStepArgs& args_;
  BatcherState& state_;
  Batch& batch_;
  const Candidate* candidates_;
  const Sequences sequences_;
  HostRings rings_;
  PageTable pages_{context_, args_, state_, sequences_};
  ReportedRows reported_;
  Builder builder_{context_, args_, state_, sequences_, batch_, pages_};
  uint64_t iteration_ = 0;  // counted over all programs
  uint32_t program_ = args_.program;

  DISTMK_FN const RequestEntry& request_of(const Sequence& sequence) const {
    return distmk::request_of(context_.params(), sequence);
  }

  DISTMK_FN void reset() {
    state_.num_running = state_.first_slot = state_.finishing = state_.num_admissions = 0;
    state_.num_commands = state_.num_admitted = state_.num_published = state_.tokens_read = 0;
    state_.beat_ns = state_.num_iterations = state_.last_rows = state_.end_slot = 0;
    state_.num_seeded = 0;
    pages_.reset();
  }

  // Begins a step. Returns whether the host has room for its tokens.
  DISTMK_FN bool begin() {
    if (!context_.resumed && context_.iteration == 0) reset();
    if (!context_.resumed) state_.tokens_taken = 0;
    iteration_ = state_.num_iterations;
    rings_.begin();
    return rings_.has_room();
  }
  DISTMK_FN uint32_t step_bits(bool has_batch) const {
    return has_batch * HAS_BATCH + (has_batch && state_.pages_changed) * HAS_PAGES +
           reported_.with_record.any() * HAS_RECORDS;
  }

  // Returns whether there is a batch.
  DISTMK_FN bool next_batch() {
    const bool is_near = !batch_.num_job_rows && sequences_.all_near();
    const bool same_rows = iteration_ && !state_.tokens_taken && (is_near ? take_tokens<true>() : take_tokens<false>());
    state_.tokens_taken = 1;
    const bool cancelled = read_commands();
    const bool preempted = make_room();
    const bool admitted = admit();
    if (same_rows && !cancelled && !preempted && !admitted && is_for_own(batch_.num_rows)) {
      is_near ? advance_rows<true>() : advance_rows<false>();
      begin_iteration(batch_.num_rows);
      return true;
    }
    if (!state_.num_running && !is_over()) return false;
    do {
      program_ = builder_.choose_program();
      builder_.build(program_);
    } while (!builder_.num_rows() && state_.num_running && preempt_youngest());
    if (!builder_.num_rows() && !is_over()) return false;  // all were put back: the host sends them again
    end_batch(builder_.num_rows());
    return true;
  }
  DISTMK_FN void end_batch(uint32_t num_rows) {
    batch_.stop = num_rows ? GOES_ON : ENDS_LAUNCH;
    if (batch_.stop) program_ = args_.program;
    begin_iteration(num_rows);
  }

  // Counts an iteration of `num_rows` rows, whose batch is complete. Only slab iterations have Lamport rows to reset.
  DISTMK_FN void begin_iteration(uint32_t num_rows) {
    ++state_.num_iterations;
    if (num_rows > MAX_ROWS) return;
    batch_.num_reset_rows = num_rows < state_.last_rows ? state_.last_rows : static_cast<uint16_t>(num_rows);
    if (!batch_.num_job_rows) state_.last_rows = static_cast<uint8_t>(num_rows);
  }
  // Whether this program continues with an iteration of `num_rows` rows, one for every running sequence.
  DISTMK_FN bool is_for_own(uint32_t num_rows) const {
    return !batch_.num_job_rows && num_rows == state_.num_running &&
           ProgramChoice(context_, args_).program_for(num_rows) == args_.program;
  }

  // `NEAR`: the last iteration was a slab iteration, and all its sequences are in the first MAX_ROWS slots. The
  // compiler then knows that they are in shared memory on a GPU.
  template <bool NEAR>
  DISTMK_FN Sequence& sequence_of(const BatchRow& row) const {
    return NEAR ? sequences_.near(row.slot) : sequences_[row.slot];
  }

  // The token that was drawn for the row, or else its best token. A row of a constrained sequence may have none.
  template <bool NEAR>
  DISTMK_FN int32_t token_of_row(uint32_t index, const BatchRow& row) const {
    if (args_.drawn && row.sample == static_cast<int32_t>(RowSample::DRAW))
      return load_drawn(context_.at<Candidate>(args_.drawn) + index);
    const uint32_t num_rows = NEAR || !batch_.num_job_rows ? MAX_ROWS : num_slots(args_);
    return best_token_of_row(candidates_, index, args_.num_ranks, num_rows);
  }

  // The sampled rows of the last iteration.
  template <bool NEAR>
  DISTMK_FN const BatchRow* last_rows() const {
    return NEAR || !batch_.num_job_rows ? batch_.rows : context_.at<const JobBatch>(args_.batch)->rows;
  }
  // Gives its sequence the token of a row, if it has one. Returns the row's event, with PENDING_TOKEN if the row has
  // none.
  template <bool NEAR>
  DISTMK_FN TokenEvent take_row(uint32_t index, const BatchRow& row) const {
    Sequence& sequence = sequence_of<NEAR>(row);
    const TokenLimits limits(sequence, request_of(sequence));
    const bool is_score = row.sample == static_cast<int32_t>(RowSample::SCORE);
    const int32_t token = is_score ? -1 : token_of_row<NEAR>(index, row);
    const FinishReason finish = finish_reason(limits, token);
    if (token >= 0) sequence.last_token = token;
    const bool has_record = (token >= 0 ? limits.reports_logprobs : is_score) && context_.params().logprobs;
    return {limits.id, token, static_cast<uint16_t>(finish), has_record, static_cast<uint32_t>(iteration_ - 1)};
  }
  static DISTMK_FN bool has_ended(const TokenEvent& event) {
    return event.finish != static_cast<uint16_t>(FinishReason::NONE);
  }
  // Returns whether each row gave a token and no sequence finished.
  template <bool NEAR>
  DISTMK_FN bool take_tokens() {
    const uint32_t num_running = state_.num_running;
    const BatchRow* rows = last_rows<NEAR>();
    uint32_t num_tokens = 0;
    DISTMK_NO_UNROLL
    for (uint32_t index = 0; index < batch_.num_rows; ++index) {
      const BatchRow row = rows[index];
      if (!row.sample) continue;
      const TokenEvent event = take_row<NEAR>(index, row);
      if (event.token == PENDING_TOKEN) {
        repeat(row);
        continue;
      }
      num_tokens += event.token >= 0;
      reported_.add(index, event.has_logprobs);
      rings_.add(event);
      if (has_ended(event)) release(static_cast<uint32_t>(row.slot));
    }
    return state_.num_running == num_running && num_tokens == batch_.num_rows;
  }
  DISTMK_FN FinishReason finish_reason(const TokenLimits& limits, int32_t token) const {
    if (token < 0) return token == NO_TOKEN_ALLOWED ? FinishReason::ERROR : FinishReason::NONE;
    if (!limits.ignore_eos && is_end_token(context_.params(), token)) return FinishReason::STOP;
    const bool is_full = limits.num_new == limits.max_new || limits.position == args_.max_positions;
    return is_full ? FinishReason::LENGTH : FinishReason::NONE;
  }

  // The common case: the same rows, one position further. Building the batch anew could only change their order.
  template <bool NEAR>
  DISTMK_FN void advance_rows() {
    DISTMK_NO_UNROLL
    for (uint32_t i = 0; i < batch_.num_rows; ++i) {
      BatchRow& row = batch_.rows[i];
      Sequence& sequence = sequence_of<NEAR>(row);
      pages_.grow(static_cast<uint32_t>(row.slot), sequence);
      row.token = sequence.last_token;
      row.position = static_cast<int32_t>(sequence.position++);
      ++batch_.runs[i].kv_len;
    }
  }

  // The next iteration computes a row again that was not drawn. It overwrites keys and values with the same values.
  DISTMK_FN void repeat(const BatchRow& row) {
    pages_.shrink(static_cast<uint32_t>(row.slot), static_cast<uint32_t>(row.position));
    rings_.count_repeated();
  }

  DISTMK_FN void release(uint32_t slot) {
    pages_.release(slot);
    sequences_.free(slot);
  }

  // Pages that the running sequences take in any case: for the next token and, `with_prompts`, for the rest of a
  // prompt.
  DISTMK_FN uint32_t num_claimed(bool with_prompts) const {
    uint32_t num_pages = 0;
    DISTMK_NO_UNROLL
    for (uint32_t slot = 0; slot < sequences_.end(); ++slot) {
      const Sequence& sequence = sequences_[slot];
      if (sequence.request < 0) continue;
      if (Builder::is_decoding(sequence))
        num_pages += pages_.needs_page(sequence);
      else if (with_prompts)
        num_pages += pages_.pages_of(sequence.prompt_len) - pages_.pages_of(sequence.position);
    }
    return num_pages;
  }

  // Preempts the youngest sequences until every decoding sequence can have a page for its next token. The oldest
  // sequence always can, because the cache has room for the longest one. Returns whether any was preempted.
  DISTMK_FN bool make_room() {
    bool preempted = false;
    while (pages_.num_free() < state_.num_running && num_claimed(false) > pages_.num_free())
      preempted = preempt_youngest();
    return preempted;
  }

  // Frees the youngest sequence. The host sends its request again, with all tokens so far as the prompt.
  DISTMK_FN bool preempt_youngest() {
    uint32_t youngest = 0, least_behind = ~0u;
    DISTMK_NO_UNROLL
    for (uint32_t slot = 0; slot < sequences_.end(); ++slot) {
      const Sequence& sequence = sequences_[slot];
      const uint32_t behind = num_admitted_since(state_.num_admissions, sequence);
      if (sequence.request < 0 || behind >= least_behind) continue;
      youngest = slot;
      least_behind = behind;
    }
    rings_.add(request_of(sequences_[youngest]).id, -1, FinishReason::PREEMPTED, iteration_);
    release(youngest);
    return true;
  }

  // Whether the launch ends: the host sends no more requests, and none is waiting.
  DISTMK_FN bool is_over() const { return state_.finishing && state_.num_admitted == state_.num_commands; }

  // Reads the commands that the host has sent. Requests stay in the ring until they are admitted. Returns whether a
  // slot was freed.
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

  // A request that is not found is over already; the host has only not read its last token yet.
  DISTMK_FN bool cancel(uint32_t id) {
    DISTMK_NO_UNROLL
    for (uint32_t slot = 0; slot < sequences_.end(); ++slot) {
      const Sequence& sequence = sequences_[slot];
      if (sequence.request < 0 || request_of(sequence).id != id) continue;
      rings_.add(id, -1, FinishReason::ABORT, iteration_);
      release(slot);
      return true;
    }
    DISTMK_NO_UNROLL
    for (uint64_t index = state_.num_admitted; index != state_.num_commands; ++index) {
      Command& waiting = rings_.command(index);
      if (waiting.id != id || waiting.kind != static_cast<uint32_t>(CommandKind::ADD)) continue;
      waiting.kind = static_cast<uint32_t>(CommandKind::CANCEL);  // admit() skips it
      rings_.add(id, -1, FinishReason::ABORT, iteration_);
    }
    return false;
  }

  // Starts the waiting requests in the order of the ring. No slot below `slot` is free. Returns whether any started.
  DISTMK_FN bool admit(uint32_t slot = 0) {
    bool admitted = false;
    const uint32_t max_sequences = ProgramChoice(context_, args_).max_sequences();
    DISTMK_NO_UNROLL
    for (; state_.num_admitted != state_.num_commands; ++state_.num_admitted) {
      const Command& command = rings_.command(state_.num_admitted);
      if (command.kind != static_cast<uint32_t>(CommandKind::ADD)) continue;
      while (!sequences_.is_free(slot)) ++slot;
      if (slot >= max_sequences || !start(slot, command.entry)) break;
      admitted = true;
    }
    return admitted;
  }

  // Starts a request in a free slot. Returns false if too few pages are free.
  DISTMK_FN bool start(uint32_t slot, uint32_t entry) {
    const RequestEntry& request = reinterpret_cast<const RequestEntry*>(context_.params().requests)[entry];
    Sequence& sequence = sequences_[slot];
    const uint32_t num_claimed = this->num_claimed(true);
    sequence = {static_cast<int32_t>(entry), 0, request.prompt_len, 0, 0, admission_of(state_.num_admissions, request)};
    if (!pages_.begin(slot, request, num_claimed)) {
      sequence.request = -1;
      return false;
    }
    ++state_.num_admissions;
    sequences_.take(slot);
    if (args_.slots && (request.sample == static_cast<uint32_t>(RowSample::DRAW) || request.num_scores))
      store_sampling(context_.at<SlotSampling>(args_.slots) + slot, context_.params(), request, entry);
    if constexpr (DRAFTS) begin_drafts(context_, args_, slot, sequence);
    return true;
  }
};
using Batcher = BasicBatcher<false>;

}  // namespace distmk
