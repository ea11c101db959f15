// The programs of a launch, as the scheduler step sees them: the most rows of an iteration, the place of the batch, and
// which program runs next.
#pragma once
#include "runtime/sequences.h"

namespace distmk {

// Values of Batch::stop other than ENDS_TURN + p, which gives program p the next turn.
constexpr uint32_t GOES_ON = 0, ENDS_LAUNCH = 1;

// Rewrites the `params` of a launch for the next turn, which belongs to `program`. Its first batch has arrived.
DISTMK_FN void begin_turn(LaunchParams& params, uint32_t program) {
  params.program = reinterpret_cast<const uint64_t*>(params.programs)[program];
  const auto* header = reinterpret_cast<const ProgramHeader*>(params.program);
  const uint64_t heap = reinterpret_cast<const uint64_t*>(params.heap_bases)[header->rank];
  // This event was signaled at the end of the program's last turn, for the iteration that begins the next one. If the
  // program has had no turn yet, the event is 1 from the start of the launch.
  const uint64_t started = header->events_heap_offset + header->iteration_event * EVENT_STRIDE_BYTES;
  params.first_iteration = load_relaxed(reinterpret_cast<const uint64_t*>(heap + started)) - 1;
  params.has_first_batch = 1;
}

// Programs are numbered in ascending order of their row buckets, the most rows that an iteration carries.
class ProgramChoice {
 public:
  DISTMK_FN ProgramChoice(const Context& context, const SchedulerStepArgs& args)
      : args_(args), may_switch_(args.num_programs > 1 && !context.rank_state.transport) {}

  // Whether there is another program to switch to. Iterations of more than MAX_ROWS rows reach all ranks by pointers,
  // so with a transport one program has all turns.
  DISTMK_FN bool may_switch() const { return may_switch_; }

  // The program of the smallest bucket that holds `num_rows`, or of the largest bucket if none does.
  DISTMK_FN uint32_t program_for(uint32_t num_rows) const {
    if (!may_switch_) return args_.program;
    uint32_t program = 0;
    DISTMK_NO_UNROLL
    while (program + 1 < args_.num_programs && num_rows > max_rows(program)) ++program;
    return program;
  }
  // The program of the next iteration, out of a set of programs (a bit each, at least one): the first one after the
  // present program, in cyclic order. So each has a turn, however long the others are wanted.
  DISTMK_FN uint32_t next(uint32_t programs) const {
    uint32_t program = args_.program;
    do program = program + 1 < args_.num_programs ? program + 1 : 0;
    while (!(programs >> program & 1));
    return program;
  }
  // program_for() gives the same for all numbers of rows above this.
  DISTMK_FN uint32_t least_rows() const { return may_switch_ ? max_rows(args_.num_programs - 2) : 0; }
  DISTMK_FN uint32_t max_rows(uint32_t program) const { return args_.max_rows[program]; }
  DISTMK_FN bool has_jobs(uint32_t program) const { return max_rows(program) > MAX_ROWS; }
  // The most rows of an iteration that are sampled.
  DISTMK_FN uint32_t max_sampled(uint32_t program) const { return has_jobs(program) ? num_slots(args_) : MAX_ROWS; }
  // The most sequences that run at once: no more than an iteration has rows.
  DISTMK_FN uint32_t max_sequences() const {
    const uint32_t most = max_rows(may_switch_ ? args_.num_programs - 1 : args_.program);
    return args_.max_slots < most ? args_.max_slots : most;
  }
  DISTMK_FN uint64_t batch(uint32_t program) const { return args_.batches[program]; }
  DISTMK_FN uint64_t batch_bytes(uint32_t program) const {
    return has_jobs(program) ? sizeof(JobBatch) : sizeof(Batch);
  }

 private:
  const SchedulerStepArgs& args_;
  const bool may_switch_;
};

}  // namespace distmk
