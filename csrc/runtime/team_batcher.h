// The batcher of job programs, whose iterations may have a row for each of MAX_SEQUENCES sequences: all threads of the
// team go through a scheduler step together.
#pragma once
#include "runtime/batcher.h"

namespace distmk {

// Does what Batcher does, and leaves the same bytes. Each thread takes the tokens of some rows, and adds the next rows
// of some sequences that decode. What few steps need is left to the leader: commands, sequences that begin or end,
// preemption, and prompts. team.sync() shows the others what the leader has stored. The numbers that this class keeps
// for itself are the same in all threads, except those of the rings, which are the leader's.
class TeamBatcher : public Batcher {
 public:
  static constexpr bool TOGETHER = true;

  // `events` is memory of all threads.
  DISTMK_FN TeamBatcher(Context& context, const SchedulerStepArgs& args, const BatcherMemory& memory,
                        TokenEvent* events)
      : Batcher(context, args, memory, events), team_(context.team) {}

  // All threads call these functions. See Batcher.
  DISTMK_FN uint32_t advance() {
    bool has_room = false;
    if (team_.leader()) has_room = begin();
    if (!team_.from_leader(has_room)) return 0;
    team_.sync();
    iteration_ = state_.num_iterations;
    pages_.changes_were_put(team_);
    const bool has_batch = next_batch();
    if (team_.leader()) rings_.count();
    return step_bits(has_batch);
  }
  DISTMK_FN void publish() const { rings_.publish(team_, iteration_); }

 private:
  const Team& team_;

  DISTMK_FN bool next_batch() {
    if (iteration_ && !state_.tokens_taken) take_tokens();
    team_.sync();
    if (team_.leader()) {
      state_.tokens_taken = 1;
      read_commands();
      make_room();
    }
    team_.sync();
    admit_waiting();
    if (!state_.num_running && !is_over()) return false;
    do {
      program_ = builder_.choose_program();
      builder_.build_together(team_, program_);
    } while (!builder_.num_rows() && preempt_any());
    if (!builder_.num_rows() && !is_over()) return false;
    team_.sync();
    if (team_.leader()) end_batch(builder_.num_rows());
    program_ = team_.from_leader(program_);
    return true;
  }

  // Takes the tokens of the last iteration, which was one of this job program. All threads take rows; the leader does
  // what follows for sequences that end or get no token.
  DISTMK_FN void take_tokens() {
    const uint32_t num_rows = batch_.num_rows;
    const BatchRow* rows = last_rows<false>();
    uint32_t num_events = 0;
    DISTMK_NO_UNROLL
    for (uint32_t first = 0; first < num_rows; first += team_.size) {
      const uint32_t index = first + team_.index;
      const bool has_row = index < num_rows;
      TokenEvent event{};
      if (has_row) event = take_row<false>(index, rows[index]);
      const bool is_pending = event.token == PENDING_TOKEN;
      const uint32_t with_event = team_.votes(has_row && !is_pending), ended = team_.votes(has_ended(event));
      if (has_row && !is_pending) rings_.set(num_events + place_among(with_event, team_), event);
      num_events += count_bits(with_event);
      reported_.with_event.add(first, with_event);
      reported_.with_record.add(first, team_.votes(event.has_logprobs));
      uint32_t left = ended | team_.votes(is_pending);
      if (!left) continue;
      team_.sync();  // all have read their sequences
      for (; team_.leader() && left; left &= left - 1) {
        const BatchRow row = rows[first + lowest_bit(left)];
        if (ended >> lowest_bit(left) & 1)
          release(static_cast<uint32_t>(row.slot));
        else
          repeat(row);
      }
    }
    rings_.add_set(num_events);
  }

  // Starts waiting requests. All threads look for the first free slot, because requests mostly wait until there is one.
  DISTMK_FN void admit_waiting() {
    if (state_.num_admitted == state_.num_commands) return;
    uint32_t first = 0, votes = 0;
    while (!(votes = team_.votes(sequences_.is_free(first + team_.index)))) first += team_.size;
    team_.sync();
    if (team_.leader()) admit(first + lowest_bit(votes));
    team_.sync();
  }

  // Preempts a sequence, if any runs. Returns whether one ran.
  DISTMK_FN bool preempt_any() {
    const bool any = state_.num_running;
    team_.sync();
    if (any && team_.leader()) preempt_youngest();
    team_.sync();
    return any;
  }
};

}  // namespace distmk
