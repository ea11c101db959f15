// The body of the scheduler step: runs the batcher, and sends its batch to every rank.
#pragma once
#include "runtime/draft_batcher.h"
#include "runtime/team_batcher.h"

namespace distmk {

// While the batcher waits for the host, tells all ranks that the launch is alive, so that no wait expires (wait.h).
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
template <class AnyBatcher>
DISTMK_FN void postpone(Context& context, const SchedulerStepArgs& args, const BatcherMemory& memory,
                        const AnyBatcher& batcher) {
  const Team& team = context.team;
  beat(context, *memory.state, args.num_ranks);
  team.sync();
  if (memory.batch != context.at<Batch>(args.batch))
    copy_bytes(team, context.at<BatcherState>(args.state), memory.state, sizeof(BatcherState));
  if (AnyBatcher::TOGETHER || team.leader()) batcher.publish();
  context.postpone();
}

DISTMK_FN void put_to_all(const Context& context, uint64_t operand, uint64_t num_bytes) {
  DISTMK_NO_UNROLL
  for (uint32_t rank = 0; rank < context.num_ranks(); ++rank)
    if (rank != context.rank()) context.put(rank, operand, context.at<void>(operand), num_bytes);
}

// put_to_all() of a job program, whose ranks mostly reach each other by pointers. Each thread loads 16 bytes for all
// ranks, and several times before it stores, because stores that may alias loads would keep them from overlapping.
DISTMK_FN void store_to_all(const Context& context, uint64_t operand, uint32_t num_bytes) {
  if (context.rank_state.transport) return put_to_all(context, operand, num_bytes);
  struct alignas(16) Vector {
    uint64_t words[2];
  };
  constexpr uint32_t IN_FLIGHT = 4;
  const Team& team = context.team;
  const auto* own = context.at<const Vector>(operand);
  const uint32_t num = num_bytes / sizeof(Vector);
  DISTMK_NO_UNROLL
  for (uint32_t first = team.index; context.num_ranks() > 1 && first < num; first += IN_FLIGHT * team.size) {
    Vector loaded[IN_FLIGHT];
    DISTMK_UNROLL
    for (uint32_t i = 0; i < IN_FLIGHT; ++i) loaded[i] = load_vector(own + min(first + i * team.size, num - 1));
    DISTMK_NO_UNROLL
    for (uint32_t rank = 0; rank < context.num_ranks(); ++rank) {
      if (rank == context.rank()) continue;
      auto* other = context.peer<Vector>(rank, operand);
      DISTMK_UNROLL
      for (uint32_t i = 0; i < IN_FLIGHT; ++i)
        if (first + i * team.size < num) other[first + i * team.size] = loaded[i];
    }
  }
}

// Sends the batch to every rank, as the batch of `program`. If that is not the running program, it also sends the
// running program a last batch whose `stop` names the next one.
template <class AnyBatcher>
DISTMK_FN void store_batch(Context& context, const SchedulerStepArgs& args, const BatcherMemory& memory,
                           uint32_t program) {
  const ProgramChoice choice(context, args);
  const Team& team = context.team;
  auto* batch = context.at<Batch>(choice.batch(program));
  if (memory.batch != batch) copy_bytes(team, batch, memory.batch, sizeof(Batch));
  if (choice.has_jobs(program))
    store_job_tokens<AnyBatcher::HAS_DRAFTS>(context, Sequences(*memory.state, memory.far), *memory.batch,
                                             *context.at<JobBatch>(choice.batch(program)));
  team.sync();  // the transport reads the heap's copy
  if constexpr (AnyBatcher::TOGETHER)
    store_to_all(context, choice.batch(program), static_cast<uint32_t>(choice.batch_bytes(program)));
  else
    put_to_all(context, choice.batch(program), choice.batch_bytes(program));
  if (program == args.program) return;
  auto* last = context.at<Batch>(args.batch);
  if (team.leader()) last->stop = static_cast<uint16_t>(ENDS_TURN + program);
  team.sync();
  put_to_all(context, args.batch, offsetof(Batch, runs));
}

// Ends a step in which the batcher has done what the bits of `step` say. What no rank waits for comes last: the host's
// tokens, and the state from which the next launch starts.
template <class AnyBatcher>
DISTMK_FN void end_step(Context& context, const SchedulerStepArgs& args, const BatcherMemory& memory,
                        const AnyBatcher& batcher, uint32_t step) {
  const Team& team = context.team;
  if (step & HAS_RECORDS) batcher.copy_records();
  if (!(step & HAS_BATCH)) return postpone(context, args, memory, batcher);
  team.sync();  // from_leader() does not order memory
  const bool copied = memory.batch != context.at<Batch>(args.batch);
  store_batch<AnyBatcher>(context, args, memory, team.from_leader(batcher.program()));
  const Sequences sequences(*memory.state, memory.far);
  if (AnyBatcher::TOGETHER && step & HAS_PAGES)
    store_page_table(context, args, sequences);
  else if (step & HAS_PAGES)
    put_page_table(context, args, sequences);
  context.finish();  // signals all ranks after one fence
  if (copied) copy_bytes(team, context.at<BatcherState>(args.state), memory.state, sizeof(BatcherState));
  if (AnyBatcher::TOGETHER || team.leader()) batcher.publish();
}

// The body of the scheduler step: builds the batch and sends it to every rank. Without a batch to build, the step is
// postponed. `AnyBatcher`: Batcher, or DraftBatcher in a program with drafts.
template <class AnyBatcher = Batcher>
DISTMK_FN void prepare_batch(Context& context, const SchedulerStepArgs& args, const BatcherMemory& memory) {
  const Team& team = context.team;
  TokenEvent events[HostRings::NUM_NEAR];
  AnyBatcher batcher(context, args, memory, events);
  uint32_t step = 0;
  if (team.leader()) step = batcher.advance();
  end_step(context, args, memory, batcher, team.from_leader(step));
}

// prepare_batch() for the scheduler step of a job program, with all threads of the team. They share the memory of
// `events`, which has room for HostRings::NUM_NEAR.
DISTMK_FN void prepare_batch_together(Context& context, const SchedulerStepArgs& args, const BatcherMemory& memory,
                                      TokenEvent* events) {
  TeamBatcher batcher(context, args, memory, events);
  const uint32_t step = batcher.advance();
  Sequence* far = far_sequences(context, args);
  if (memory.far != far) copy_bytes(context.team, far, memory.far, far_bytes(args));
  end_step(context, args, memory, batcher, step);
}

}  // namespace distmk
