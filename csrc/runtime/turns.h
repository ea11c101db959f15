// Programs that take turns in a launch, as the scheduler step sees them: how many rows an iteration of each carries,
// where its batch is, and which one runs next.
#pragma once
#include "runtime/sequences.h"

namespace distmk {

// Values of Batch::stop beside ENDS_TURN + p: program p has the next turn.
constexpr uint32_t GOES_ON = 0, ENDS_LAUNCH = 1;

// Turns `params` of a launch into those of the next turn, that of `program`, whose first batch is there.
DISTMK_FN void begin_turn(LaunchParams& params, uint32_t program) {
  params.program = reinterpret_cast<const uint64_t*>(params.programs)[program];
  const auto* header = reinterpret_cast<const ProgramHeader*>(params.program);
  const uint64_t heap = reinterpret_cast<const uint64_t*>(params.heap_bases)[header->rank];
  // Signaled at the end of the program's last turn, for the iteration that its next turn begins with (once in the
  // beginning).
  const uint64_t started = header->events_heap_offset + header->iteration_event * EVENT_STRIDE_BYTES;
  params.first_iteration = load_relaxed(reinterpret_cast<const uint64_t*>(heap + started)) - 1;
  params.prepared = 1;
}

class Turns {
 public:
  DISTMK_FN Turns(const Context& context, const SchedulerStepArgs& args)
      : args_(args), may_change_(args.other_batch && !context.rank_state.transport) {}

  DISTMK_FN uint32_t own() const { return args_.program; }
  // Whether there is another program.
  DISTMK_FN bool may_change() const { return may_change_; }

  // The program for an iteration of `num_rows`: of those that carry so many the one that carries fewest, or else the
  // one that carries most. Wide iterations reach all ranks by pointers, so with a transport the first program has all
  // turns.
  DISTMK_FN uint32_t program_for(uint32_t num_rows) const {
    if (!may_change_) return args_.program;
    return num_rows <= max_rows(narrowest()) ? narrowest() : 1 - narrowest();
  }
  // More rows than these are all the same to program_for().
  DISTMK_FN uint32_t least_rows() const { return may_change_ ? max_rows(narrowest()) : 0; }
  DISTMK_FN uint32_t max_rows(uint32_t program) const {
    return program == args_.program ? args_.max_rows : args_.other_rows;
  }
  DISTMK_FN bool is_wide(uint32_t program) const { return max_rows(program) > MAX_ROWS; }
  // Rows of an iteration that are sampled at most.
  DISTMK_FN uint32_t max_sampled(uint32_t program) const { return is_wide(program) ? num_slots(args_) : MAX_ROWS; }
  // Sequences that run at once: no more than an iteration has rows.
  DISTMK_FN uint32_t max_sequences() const {
    const uint32_t max_rows = may_change_ && args_.other_rows > args_.max_rows ? args_.other_rows : args_.max_rows;
    return args_.max_slots < max_rows ? args_.max_slots : max_rows;
  }
  DISTMK_FN uint64_t batch(uint32_t program) const {
    return program == args_.program ? args_.batch : args_.other_batch;
  }
  DISTMK_FN uint64_t batch_bytes(uint32_t program) const {
    return is_wide(program) ? sizeof(WideBatch) : sizeof(Batch);
  }

 private:
  const SchedulerStepArgs& args_;
  const bool may_change_;

  // Of two programs, the one that carries fewer rows.
  DISTMK_FN uint32_t narrowest() const { return args_.max_rows < args_.other_rows ? args_.program : 1 - args_.program; }
};

}  // namespace distmk
