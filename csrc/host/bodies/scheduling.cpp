// The tasks between two iterations on the host: the best token of each row, and the scheduler step.
#include "runtime/argmax.h"
#include "runtime/context.h"
#include "runtime/scheduler_step.h"

namespace distmk {

void body_sample(Context& context, const SampleArgs& args) {
  const auto& batch = *context.at<Batch>(args.batch);
  const auto* candidates = context.at<Candidate>(args.candidates);
  auto* best = context.at<Candidate>(args.out);  // in the heap, like on GPUs, where the transport sends from there
  for (uint32_t row = 0; row < args.num_rows; ++row) best[row] = {-__builtin_inff(), -1};
  for (uint32_t row = 0; row < batch.num_rows; ++row) {
    if (!batch.num_job_rows && !batch.rows[row].sample) continue;
    for (uint32_t t = 0; t < args.num_tasks; ++t) best[row] = better_of(best[row], candidates[t * args.num_rows + row]);
  }
  if (context.rank() != 0) context.push(0, args.out, best, args.num_rows * sizeof(Candidate));
}

namespace {
BatcherMemory batcher_memory(const Context& context, const SchedulerStepArgs& args) {
  return {context.at<BatcherState>(args.state), context.at<Batch>(args.batch), context.at<Candidate>(args.candidates),
          far_sequences(context, args)};
}
}  // namespace

void body_scheduler_step(Context& context, const SchedulerStepArgs& args) {
  prepare_batch(context, args, batcher_memory(context, args));
}
void body_draft_step(Context& context, const SchedulerStepArgs& args) {
  prepare_batch<DraftBatcher>(context, args, batcher_memory(context, args));
}
void body_job_step(Context& context, const SchedulerStepArgs& args) {
  TokenEvent events[HostRings::NUM_NEAR];
  prepare_batch_together(context, args, batcher_memory(context, args), events);
}

}  // namespace distmk
