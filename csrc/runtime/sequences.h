// The running sequences, by slot, and where the batcher keeps what does not fit into its state: behind that lie the
// page pool, the pages, and what the slots from MAX_ROWS on need.
#pragma once
#include "runtime/context.h"

namespace distmk {

// Slots of a program, and rows of a wide iteration that are sampled at most (distmk/tasks/slots.py).
DISTMK_FN uint32_t num_slots(const SchedulerStepArgs& args) {
  return args.max_slots > MAX_ROWS ? args.max_slots : MAX_ROWS;
}

DISTMK_FN PagePoolState* page_pool(const Context& context, const SchedulerStepArgs& args) {
  return reinterpret_cast<PagePoolState*>(context.at<BatcherState>(args.state) + 1);
}
// The sequences in the slots from MAX_ROWS on.
DISTMK_FN Sequence* far_sequences(const Context& context, const SchedulerStepArgs& args) {
  return reinterpret_cast<Sequence*>(reinterpret_cast<KvPage*>(page_pool(context, args) + 1) + args.num_pages);
}
// The events of a step that HostRings has no room for.
DISTMK_FN TokenEvent* far_events(const Context& context, const SchedulerStepArgs& args) {
  return reinterpret_cast<TokenEvent*>(far_sequences(context, args) + num_slots(args) - MAX_ROWS);
}

// Programs round differently. So a sequence whose request has a seed has its rows computed by a program that follows
// from their position alone: those of a prompt that fits no narrow iteration by the wide one, all others by the narrow
// one. Its tokens then seldom depend on its company. What it generated before it was put back is no part of the prompt.
constexpr uint32_t ANY_PROGRAM = ~0u;
DISTMK_FN uint32_t wide_end(const Request& request) {
  if (!(request.sampling.flags & static_cast<uint32_t>(SamplingFlag::SEEDED))) return ANY_PROGRAM;
  const uint32_t prompt_len = request.prompt_len - request.num_output;
  return prompt_len > MAX_ROWS ? prompt_len : 0;
}
DISTMK_FN bool keeps_program(const Sequence& sequence) { return sequence.wide_end != ANY_PROGRAM; }

// The first MAX_ROWS sequences are in the batcher's state, which a GPU keeps in shared memory. Low slots are taken
// first, so up to so many sequences never need the others.
class Sequences {
 public:
  DISTMK_FN Sequences(BatcherState& state, Sequence* far) : state_(state), far_(far) {}

  DISTMK_FN Sequence& operator[](uint32_t slot) const {
    return slot < MAX_ROWS ? state_.slots[slot] : far_[slot - MAX_ROWS];
  }
  // Where none of the others is in use.
  DISTMK_FN Sequence& near(uint32_t slot) const { return state_.slots[slot]; }
  DISTMK_FN bool all_near() const { return state_.end_slot <= MAX_ROWS; }

  // Slots from this one on are free.
  DISTMK_FN uint32_t end() const { return state_.end_slot; }
  DISTMK_FN bool is_free(uint32_t slot) const { return slot >= end() || (*this)[slot].request < 0; }
  DISTMK_FN void take(uint32_t slot) const {
    if (keeps_program((*this)[slot])) ++state_.num_kept;
    if (slot >= end()) state_.end_slot = static_cast<uint8_t>(slot + 1);
    ++state_.num_running;
  }
  DISTMK_FN void free(uint32_t slot) const {
    if (keeps_program((*this)[slot])) --state_.num_kept;
    (*this)[slot].request = -1;
    --state_.num_running;
    while (end() && (*this)[end() - 1].request < 0) --state_.end_slot;
  }

 private:
  BatcherState& state_;
  Sequence* far_;
};

}  // namespace distmk
