// Builds the batch of the next iteration: a row for every sequence that decodes, then chunks of prompts. The program of
// a slab iteration carries up to MAX_ROWS rows; that of a job iteration carries more, and its batch is a JobBatch.
#pragma once
#include "runtime/draft_plan.h"
#include "runtime/job_batch.h"
#include "runtime/program_choice.h"
#include "runtime/row_tokens.h"

namespace distmk {

// For a job iteration `batch` gets the counts only. Its runs and sampled rows go into the JobBatch in the heap, and
// store_job_tokens() derives the tokens from them. `HAS_DRAFTS`: drafts of a decoding sequence follow its row.
template <bool HAS_DRAFTS>
class BatchBuilder {
 public:
  DISTMK_FN BatchBuilder(const Context& context, const SchedulerStepArgs& args, BatcherState& state,
                         const Sequences& sequences, Batch& batch, const PageTable& pages)
      : context_(context),
        args_(args),
        choice_(context, args),
        state_(state),
        sequences_(sequences),
        batch_(batch),
        pages_(pages) {}

  // The program that the next iteration is for. Programs with rows that no other program may compute take turns.
  DISTMK_FN uint32_t choose_program() {
    const uint32_t wanted = choice_.program_for(num_wanted_rows());
    keeps_ = sequences_.any_kept() && choice_.may_switch() && kept_rows_fit();
    if (!keeps_) return wanted;
    uint32_t programs = 0;
    DISTMK_NO_UNROLL
    for (uint32_t slot = 0; slot < sequences_.end(); ++slot)
      if (!sequences_.is_free(slot)) programs |= 1u << (sequences_.is_kept(slot) ? program_of(slot) : wanted);
    return choice_.next(programs);
  }

  // Adds one row for every sequence that decodes, then prompt chunks in the remaining rows, as far as there are pages.
  // Rows that keep to another program are left out; rows that keep to this program come first.
  // `HAS_DECODING`: build_together() has added the decoding rows, and prompts of `num_left` sequences are left to add.
  template <bool HAS_DECODING = false>
  DISTMK_FN void build(uint32_t program, uint32_t num_left = 0) {
    if constexpr (!HAS_DECODING) begin(program, true);
    if constexpr (HAS_DRAFTS)
      DraftPlan(context_, args_, sequences_, program)
          .choose(pages_, choice_.max_rows(program), max_sampled_,
                  [&](uint32_t slot) { return is_for(program, slot); });
    const uint32_t max_rows = choice_.max_rows(program), end = sequences_.end();
    uint32_t num_reading = num_left, num_kept = 0;  // num_kept: how many of them keep to programs
    if constexpr (!HAS_DECODING) {
      DISTMK_NO_UNROLL
      for (uint32_t slot = 0; slot < end; ++slot) {
        const Sequence& sequence = sequences_[slot];
        const bool reads = sequence.request >= 0 && !is_decoding(sequence) && is_for(program, slot);
        num_reading += reads;
        num_kept += keeps_ && reads && sequences_.is_kept(slot);
      }
      if (keeps_) add_decoding(program, max_rows, true);
      add_decoding(program, max_rows - num_kept, false);
    }
    const uint32_t first_slot = state_.first_slot < end ? state_.first_slot : 0;
    DISTMK_NO_UNROLL
    for (uint32_t i = 0; num_reading && num_rows_ < max_rows; ++i) {
      const uint32_t slot = first_slot + i < end ? first_slot + i : first_slot + i - end;
      const Sequence& sequence = sequences_[slot];
      if (sequence.request < 0 || is_decoding(sequence) || !is_for(program, slot)) continue;
      --num_reading;
      const uint32_t left = end_of_reading(slot) - sequence.position;
      uint32_t room = (pages_.pages_of(sequence.position) + pages_.num_free()) * args_.page_size - sequence.position;
      if (room > max_rows - num_rows_) room = max_rows - num_rows_;
      const uint32_t num_added = room ? add_run(slot, left < room ? left : room) : 0;
      if (num_added < left) state_.first_slot = static_cast<uint8_t>(slot);  // the next batch continues it first
    }
    batch_.num_job_rows = static_cast<uint16_t>(job_batch_ ? num_rows_ : 0);
    batch_.num_job_runs = static_cast<uint16_t>(job_batch_ ? num_runs_ : 0);
  }
  // build() by all threads of the team, which add the decoding rows of a job batch together, a sequence each. The
  // leader adds the chunks of prompts, and alone builds a batch of up to MAX_ROWS rows.
  DISTMK_FN void build_together(const Team& team, uint32_t program) {
    team.sync();  // all have chosen the program
    if (choice_.has_jobs(program)) {
      begin(program, team.leader());
      const uint32_t max_rows = choice_.max_rows(program), end = sequences_.end();
      uint32_t num_reading = 0, num_kept = 0;  // see build()
      DISTMK_NO_UNROLL
      for (uint32_t first = 0; first < end; first += team.size) {
        const uint32_t slot = first + team.index;
        const bool reads = slot < end && may_read(program, slot);
        num_reading += count_bits(team.votes(reads));
        num_kept += count_bits(team.votes(keeps_ && reads && sequences_.is_kept(slot)));
      }
      if (keeps_) add_decoding_together(team, program, max_rows, true);
      add_decoding_together(team, program, max_rows - num_kept, false);
      team.sync();
      if (team.leader()) {
        batch_.num_rows = num_runs_ = num_rows_;
        build<true>(program, num_reading);
      }
    } else if (team.leader()) {
      build(program);
    }
    team.sync();
    num_rows_ = team.from_leader(num_rows_);
  }
  DISTMK_FN uint32_t num_rows() const { return num_rows_; }

  DISTMK_FN static bool is_decoding(const Sequence& sequence) { return sequence.position >= sequence.prompt_len; }

 private:
  const Context& context_;
  const SchedulerStepArgs& args_;
  const ProgramChoice choice_;
  BatcherState& state_;
  const Sequences sequences_;
  Batch& batch_;
  PageTable pages_;
  JobBatch* job_batch_ = nullptr;
  uint32_t max_sampled_ = MAX_ROWS;
  uint32_t num_rows_ = 0, num_runs_ = 0;  // of the iteration
  bool keeps_ = false;                    // several programs exist, and some rows keep to one

  DISTMK_FN void begin(uint32_t program, bool is_leader) {
    job_batch_ = choice_.has_jobs(program) ? context_.at<JobBatch>(choice_.batch(program)) : nullptr;
    num_rows_ = num_runs_ = 0;
    if (is_leader) batch_.num_rows = batch_.num_runs = 0;
    max_sampled_ = choice_.max_sampled(program);
  }

  // Programs round differently. So a sequence with a seed keeps to programs: a row's position alone says which program
  // computes it. The tokens of the sequence then seldom depend on what else runs. The smallest bucket that holds the
  // prompt computes the prompt; the first program computes all other rows. Tokens that were generated before a
  // preemption do not count as prompt here.

  DISTMK_FN uint32_t own_prompt_len(const Sequence& sequence) const {
    return sequence.prompt_len - request_of(context_.params(), sequence).num_output;
  }
  // The program of the next rows of a sequence that keeps to programs.
  DISTMK_FN uint32_t program_of(uint32_t slot) const {
    const Sequence& sequence = sequences_[slot];
    if (is_decoding(sequence)) return 0;
    const uint32_t prompt_len = own_prompt_len(sequence);
    return sequence.position < prompt_len ? choice_.program_for(prompt_len) : 0;
  }
  // Whether a program may compute the next rows of the sequence in a slot.
  DISTMK_FN bool is_for(uint32_t program, uint32_t slot) const {
    return !keeps_ || !sequences_.is_kept(slot) || program_of(slot) == program;
  }
  // One past the last prompt row that may share a run with the sequence's next row.
  DISTMK_FN uint32_t end_of_reading(uint32_t slot) const {
    const Sequence& sequence = sequences_[slot];
    const uint32_t end = keeps_ && sequences_.is_kept(slot) ? own_prompt_len(sequence) : 0;
    return sequence.position < end ? end : sequence.prompt_len;
  }
  // Whether an iteration of the first program has room for a row of every sequence that keeps to programs. If it has
  // not, no sequence keeps to programs.
  DISTMK_FN bool kept_rows_fit() const {
    uint32_t num = 0;
    DISTMK_NO_UNROLL
    for (uint32_t slot = 0; slot < sequences_.end(); ++slot) num += sequences_.is_kept(slot);
    return num <= choice_.max_rows(0);
  }

  // Whether `program` may read more of the prompt of the sequence in a slot.
  DISTMK_FN bool may_read(uint32_t program, uint32_t slot) const {
    const Sequence& sequence = sequences_[slot];
    return sequence.request >= 0 && !is_decoding(sequence) && is_for(program, slot);
  }
  // Whether add_decoding() adds a row for the sequence in a slot, as far as there is room.
  DISTMK_FN bool may_decode(uint32_t program, uint32_t slot, bool kept) const {
    const Sequence& sequence = sequences_[slot];
    if (sequence.request < 0 || !is_decoding(sequence) || !is_for(program, slot)) return false;
    return !keeps_ || sequences_.is_kept(slot) == kept;
  }

  DISTMK_FN uint32_t num_drafts(uint32_t slot) const {
    if constexpr (HAS_DRAFTS) return draft_slots(context_, args_)[slot].num_drafts;
    return 0;
  }
  // Whether the row at `position` has a draft. Drafts are behind the tokens of the sequence, as these are in the
  // prompt.
  DISTMK_FN bool is_draft(uint32_t slot, uint32_t position) const {
    if constexpr (HAS_DRAFTS) return position >= draft_slots(context_, args_)[slot].num_tokens;
    return false;
  }
  DISTMK_FN RowSample sample_of(uint32_t slot, const RequestEntry& request, uint32_t position) const {
    const RowSample sample = row_sample(request, position);
    if constexpr (HAS_DRAFTS) return sample == RowSample::DRAW && is_draft(slot, position) ? RowSample::VERIFY : sample;
    return sample;
  }

  // Adds a row for every decoding sequence that keeps to programs (`kept`), or for every other decoding sequence. If no
  // sequence keeps to programs, adds a row for all.
  DISTMK_FN void add_decoding(uint32_t program, uint32_t max_rows, bool kept) {
    DISTMK_NO_UNROLL
    for (uint32_t slot = 0; slot < sequences_.end() && num_rows_ < max_rows; ++slot) {
      const Sequence& sequence = sequences_[slot];
      if (sequence.request < 0 || !is_decoding(sequence) || !is_for(program, slot)) continue;
      if (!keeps_ || sequences_.is_kept(slot) == kept) add_run(slot, 1 + num_drafts(slot));
    }
  }

  // add_decoding() for the first rows of a job batch, by all threads of the team. Each of these rows is a run.
  DISTMK_FN void add_decoding_together(const Team& team, uint32_t program, uint32_t max_rows, bool kept) {
    const uint32_t end = sequences_.end();
    DISTMK_NO_UNROLL
    for (uint32_t first = 0; first < end && num_rows_ < max_rows; first += team.size) {
      const uint32_t slot = first + team.index;
      const uint32_t votes = team.votes(slot < end && may_decode(program, slot, kept));
      const uint32_t row = num_rows_ + place_among(votes, team);
      const bool has_row = votes >> team.index & 1 && row < max_rows;
      pages_.grow_each(team, has_row, slot);
      if (has_row) add_decoding_row(slot, row);
      num_rows_ = min(num_rows_ + count_bits(votes), max_rows);
    }
  }
  DISTMK_FN void add_decoding_row(uint32_t slot, uint32_t row) {
    Sequence& sequence = sequences_[slot];
    const RowSample sample = row_sample(request_of(context_.params(), sequence), sequence.position);
    const auto position = static_cast<int32_t>(sequence.position++);
    job_batch_->sampled[row] = row;
    job_batch_->rows[row] = {sequence.last_token, position, static_cast<int32_t>(slot), static_cast<int32_t>(sample)};
    job_batch_->runs[row] = {static_cast<int32_t>(row), 1, static_cast<int32_t>(slot), position + 1};
  }

  // Rows that all sequences want. Stops counting once more rows would not change the choice of program.
  DISTMK_FN uint32_t num_wanted_rows() const {
    const uint32_t enough = choice_.least_rows();
    uint32_t wanted = 0;
    DISTMK_NO_UNROLL
    for (uint32_t slot = 0; slot < sequences_.end() && wanted <= enough; ++slot) {
      const Sequence& sequence = sequences_[slot];
      if (sequence.request >= 0) wanted += is_decoding(sequence) ? 1 : sequence.prompt_len - sequence.position;
    }
    return wanted;
  }

  // Adds the next `num_rows` rows of a sequence, or fewer if a job batch has no room for so many sampled rows. Returns
  // how many.
  DISTMK_FN uint32_t add_run(uint32_t slot, uint32_t num_rows) {
    Sequence& sequence = sequences_[slot];
    const RequestEntry& request = request_of(context_.params(), sequence);
    const uint32_t begin = num_rows_, first = sequence.position;
    if (!job_batch_)
      add_rows(slot, sequence, request, num_rows);
    else if (!add_job_rows(slot, sequence, request, num_rows))
      return 0;
    BatchRun& run = job_batch_ ? job_batch_->runs[num_runs_++] : batch_.runs[batch_.num_runs++];
    run = {static_cast<int32_t>(begin), static_cast<int32_t>(sequence.position - first), static_cast<int32_t>(slot),
           static_cast<int32_t>(sequence.position)};
    return sequence.position - first;
  }

  DISTMK_FN void add_rows(uint32_t slot, Sequence& sequence, const RequestEntry& request, uint32_t num_rows) {
    DISTMK_NO_UNROLL
    for (uint32_t i = 0; i < num_rows; ++i, ++sequence.position, ++num_rows_) {
      pages_.grow(slot, sequence);
      add_row(slot, sequence, sample_of(slot, request, sequence.position));
    }
  }

  // Goes page by page, because most rows of a prompt need nothing else from the single thread that runs this. Returns
  // whether any row was added.
  DISTMK_FN bool add_job_rows(uint32_t slot, Sequence& sequence, const RequestEntry& request, uint32_t num_rows) {
    const uint32_t end = sequence.position + num_rows, begin = num_rows_;
    while (sequence.position < end) {
      const RowSample sample = sample_of(slot, request, sequence.position);
      if (sample != RowSample::NONE && batch_.num_rows == max_sampled_) break;
      pages_.grow(slot, sequence);
      uint32_t count = 1;
      if (sample != RowSample::NONE) {
        job_batch_->sampled[batch_.num_rows] = num_rows_;
        add_row(slot, sequence, sample);
      } else {
        const uint32_t to_page_end = args_.page_size - (sequence.position & (args_.page_size - 1));
        const uint32_t unsampled_end = sequence.prompt_len - 1 - request.num_output - request.num_scores;
        count = sequence.position < unsampled_end ? unsampled_end - sequence.position : 1;
        if (count > to_page_end) count = to_page_end;
        if (count > end - sequence.position) count = end - sequence.position;
      }
      sequence.position += count;
      num_rows_ += count;
    }
    return num_rows_ > begin;
  }

  DISTMK_FN void add_row(uint32_t slot, const Sequence& sequence, RowSample sample) {
    const bool in_prompt = sequence.position < sequence.prompt_len || is_draft(slot, sequence.position);
    BatchRow* rows = job_batch_ ? job_batch_->rows : batch_.rows;
    rows[batch_.num_rows++] = {
        in_prompt ? prompt_row(context_.params(), sequence)[sequence.position] : sequence.last_token,
        static_cast<int32_t>(sequence.position), static_cast<int32_t>(slot), static_cast<int32_t>(sample)};
  }
};

// Fills in the tokens of a job batch. The threads of the team share the rows. `HAS_DRAFTS`: all tokens of a sequence
// are known by their positions.
template <bool HAS_DRAFTS>
DISTMK_FN void store_job_tokens(const Context& context, const Sequences& sequences, const Batch& batch,
                                JobBatch& jobs) {
  for (uint32_t row = context.team.index; row < batch.num_job_rows; row += context.team.size) {
    const JobRow found = job_row(jobs, batch.num_job_runs, row);
    const Sequence& sequence = sequences[found.slot];
    jobs.tokens[row] = HAS_DRAFTS || found.position < sequence.prompt_len
                           ? prompt_row(context.params(), sequence)[found.position]
                           : sequence.last_token;
  }
}

}  // namespace distmk
