// The batcher of programs with drafts. A run of a decoding sequence has the row of its last token, then rows of drafts.
// accept_drafts (accept_drafts.h) has found which of their tokens the sequence gets.
#pragma once
#include "runtime/batcher.h"

namespace distmk {

class DraftBatcher : public BasicBatcher<true> {
 public:
  DISTMK_FN DraftBatcher(Context& context, const SchedulerStepArgs& args, const BatcherMemory& memory,
                         TokenEvent* events)
      : BasicBatcher<true>(context, args, memory, events) {}

  // See Batcher.
  DISTMK_FN uint32_t advance() {
    const bool has_room = begin();
    if (!iteration_ && !context_.resumed) reset_drafts();
    DraftPace& pace = draft_pace(context_, args_, args_.program);
    const uint64_t begin_ns = pace.begin_ns, now = now_ns();
    pace.begin_ns = 0;
    if (!has_room) return 0;
    pages_.changes_were_put();
    const bool has_batch = next_batch();
    if (begin_ns && num_tokens_) Pace::add(pace, num_sequences_, num_rows_before_, num_tokens_, now - begin_ns);
    if (has_batch) draft_pace(context_, args_, program_).begin_ns = now;
    rings_.count();
    return step_bits(has_batch);
  }
  DISTMK_FN void publish() const {
    if (verified_) reinterpret_cast<HostCounts*>(context_.params().host_counts)->drafts = draft_totals(context_, args_);
    rings_.publish(iteration_);
  }

 private:
  bool verified_ = false;
  // Of the last iteration; no tokens if it had rows of prompts.
  uint32_t num_sequences_ = 0, num_rows_before_ = 0, num_tokens_ = 0;

  DISTMK_FN void reset_drafts() {
    draft_totals(context_, args_) = {};
    DISTMK_NO_UNROLL
    for (uint32_t program = 0; program < args_.num_programs; ++program) draft_pace(context_, args_, program) = {};
  }

  DISTMK_FN bool next_batch() {
    if (iteration_ && !state_.tokens_taken) take_tokens();
    state_.tokens_taken = 1;
    read_commands();
    make_room();
    admit();
    if (!state_.num_running && !is_over()) return false;
    do {
      program_ = builder_.choose_program();
      builder_.build(program_);
    } while (!builder_.num_rows() && state_.num_running && preempt_youngest());
    if (!builder_.num_rows() && !is_over()) return false;
    end_batch(builder_.num_rows());
    return true;
  }

  DISTMK_FN void take_tokens() {
    const BatchRow* rows = batch_.num_job_rows ? context_.at<const JobBatch>(args_.batch)->rows : batch_.rows;
    num_rows_before_ = batch_.num_job_rows ? batch_.num_job_rows : batch_.num_rows;
    bool reads = num_rows_before_ != batch_.num_rows;
    int32_t confirmed = -1;  // the slot of the present run, once it gives tokens
    DISTMK_NO_UNROLL
    for (uint32_t index = 0; index < batch_.num_rows; ++index) {
      const BatchRow row = rows[index];
      const bool is_score = row.sample == static_cast<int32_t>(RowSample::SCORE);
      reads |= is_score || !row.sample;
      if (!row.sample) continue;
      const auto slot = static_cast<uint32_t>(row.slot);
      if (!is_score && row.slot != confirmed) {
        confirm(rows, index);
        ++num_sequences_;
        confirmed = row.slot;
      }
      Sequence& sequence = sequences_[slot];
      if (sequence.request < 0) continue;                         // it ended with a token before this one
      const auto next = static_cast<uint32_t>(row.position) + 1;  // position of the row's token
      const RequestEntry& request = request_of(sequence);
      if (!is_score &&
          next >= draft_slots(context_, args_)[slot].num_tokens) {  // behind a rejected draft, or not drawn
        if (is_constrained(request)) take_undrawn(index, slot, request);
        continue;
      }
      TokenLimits limits(sequence, request);
      limits.position = next, limits.num_new = next + 1 - sequence.prompt_len;
      int32_t token = -1;
      FinishReason finish = FinishReason::NONE;
      if (!is_score) {
        sequence.last_token = token = prompt_row(context_.params(), sequence)[next];
        finish = finish_reason(limits, token);
        ++num_tokens_;
      }
      const bool has_record = (is_score || limits.reports_logprobs) && context_.params().logprobs;
      reported_.add(index, has_record);
      rings_.add(limits.id, token, finish, iteration_ - 1, has_record);
      if (finish != FinishReason::NONE) release(slot);
    }
    if (reads) num_tokens_ = 0;
  }

  // A row that was not drawn. Its sequence is back where it was, because it has confirmed no token.
  DISTMK_FN void take_undrawn(uint32_t index, uint32_t slot, const RequestEntry& request) {
    const int32_t token = load_drawn(context_.at<Candidate>(args_.drawn) + index);
    if (token == PENDING_TOKEN) return rings_.count_repeated();
    reported_.add(index, false);
    rings_.add(request.id, token, FinishReason::ERROR, iteration_ - 1);
    release(slot);
  }

  // The sequence of a run, whose first row with a token is `first`, keeps the positions of accepted tokens.
  DISTMK_FN void confirm(const BatchRow* rows, uint32_t first) {
    const BatchRow row = rows[first];
    const auto slot = static_cast<uint32_t>(row.slot);
    DraftSlot& drafts = draft_slots(context_, args_)[slot];
    uint32_t num = 0;
    while (first + num + 1 < batch_.num_rows && rows[first + num + 1].slot == row.slot) ++num;
    const uint32_t num_accepted = drafts.num_tokens - static_cast<uint32_t>(row.position) - 2;
    pages_.shrink(slot, drafts.num_tokens - 1);
    if (!num) return;
    drafts.acceptance = Acceptance::update(drafts.acceptance, num, num_accepted);
    DraftTotals& totals = draft_totals(context_, args_);
    ++totals.num_drafts;
    totals.num_draft_tokens += num;
    DISTMK_NO_UNROLL
    for (uint32_t i = 0; i < num_accepted; ++i) ++totals.num_accepted[i];
    verified_ = true;
  }
};

}  // namespace distmk
