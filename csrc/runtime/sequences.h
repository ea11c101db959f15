// The running sequences, by slot. Behind the batcher's state, in memory, lie the page pool, the pages, and then the
// sequences and events that the slots from MAX_ROWS on need.
#pragma once
#include "runtime/context.h"

namespace distmk {

// Number of slots of a program, and the most rows that a job iteration samples (distmk/tasks/slots.py).
DISTMK_FN uint32_t num_slots(const SchedulerStepArgs& args) {
  return args.max_slots > MAX_ROWS ? args.max_slots : MAX_ROWS;
}

// Whether the step's program is a job program. Schedulers then run body_job_step(), which does what the body of the
// task type would do, in less time if there are many sequences.
DISTMK_FN bool has_jobs(const SchedulerStepArgs& args) { return args.max_rows[args.program] > MAX_ROWS; }
DISTMK_BODY void body_job_step(Context& context, const SchedulerStepArgs& args);
// Whether sequences have drafts. Schedulers then run body_draft_step(), in slab and job programs.
DISTMK_FN bool has_drafts(const SchedulerStepArgs& args) { return args.drafts; }
DISTMK_BODY void body_draft_step(Context& context, const SchedulerStepArgs& args);

DISTMK_FN PagePoolState* page_pool(const Context& context, const SchedulerStepArgs& args) {
  return reinterpret_cast<PagePoolState*>(context.at<BatcherState>(args.state) + 1);
}
// Sequences in the slots from MAX_ROWS on.
DISTMK_FN Sequence* far_sequences(const Context& context, const SchedulerStepArgs& args) {
  return reinterpret_cast<Sequence*>(reinterpret_cast<KvPage*>(page_pool(context, args) + 1) + args.num_pages);
}
DISTMK_FN uint32_t far_bytes(const SchedulerStepArgs& args) { return (num_slots(args) - MAX_ROWS) * sizeof(Sequence); }
// Events of a step beyond the NUM_NEAR that HostRings keeps in near memory.
DISTMK_FN TokenEvent* far_events(const Context& context, const SchedulerStepArgs& args) {
  return reinterpret_cast<TokenEvent*>(far_sequences(context, args) + num_slots(args) - MAX_ROWS);
}

// Value of Sequence::admission: twice the admission's number, plus 1 if the request has a seed.
DISTMK_FN uint32_t admission_of(uint32_t number, const RequestEntry& request) {
  return 2 * number + !!(request.sampling.flags & static_cast<uint32_t>(SamplingFlag::SEEDED));
}
DISTMK_FN bool has_seed(const Sequence& sequence) { return sequence.admission & 1; }
// Number of admissions from this sequence's on, its own included, when `num_admissions` have happened in all.
DISTMK_FN uint32_t num_admitted_since(uint32_t num_admissions, const Sequence& sequence) {
  return (2 * num_admissions - (sequence.admission & ~1u)) / 2;
}

// The first MAX_ROWS sequences are part of the batcher's state, which a GPU keeps in shared memory. Low slots are taken
// first, so up to MAX_ROWS sequences never touch the others.
class Sequences {
 public:
  DISTMK_FN Sequences(BatcherState& state, Sequence* far) : state_(state), far_(far) {}

  DISTMK_FN Sequence& operator[](uint32_t slot) const {
    return slot < MAX_ROWS ? state_.slots[slot] : far_[slot - MAX_ROWS];
  }
  // operator[] for callers that know all_near() to hold.
  DISTMK_FN Sequence& near(uint32_t slot) const { return state_.slots[slot]; }
  DISTMK_FN bool all_near() const { return state_.end_slot <= MAX_ROWS; }

  // Whether a fixed program must compute each row of the sequence in a slot, because it has a seed (batch_builder.h).
  DISTMK_FN bool is_kept(uint32_t slot) const { return (*this)[slot].request >= 0 && has_seed((*this)[slot]); }
  DISTMK_FN bool any_kept() const { return state_.num_seeded; }

  // One past the last slot in use.
  DISTMK_FN uint32_t end() const { return state_.end_slot; }
  DISTMK_FN bool is_free(uint32_t slot) const { return slot >= end() || (*this)[slot].request < 0; }
  DISTMK_FN void take(uint32_t slot) const {
    if (has_seed((*this)[slot])) ++state_.num_seeded;
    if (slot >= end()) state_.end_slot = static_cast<uint8_t>(slot + 1);
    ++state_.num_running;
  }
  DISTMK_FN void free(uint32_t slot) const {
    if (has_seed((*this)[slot])) --state_.num_seeded;
    (*this)[slot].request = -1;
    --state_.num_running;
    while (end() && (*this)[end() - 1].request < 0) --state_.end_slot;
  }

 private:
  BatcherState& state_;
  Sequence* far_;
};

}  // namespace distmk
