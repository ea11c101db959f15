// The two rings between the host and rank 0's batcher, in host memory: commands in, tokens out. Each side writes its
// own end's count only, after the elements that the count covers.
#pragma once
#include "runtime/context.h"

namespace distmk {

class HostRings {
 public:
  static constexpr uint32_t NUM_NEAR = EVENTS_PER_ROW * MAX_ROWS;

  // A step publishes tokens or scores of up to `max_rows` sampled rows, then as many cancelled requests at most, then
  // sequences put back. `near`: room for NUM_NEAR events, `far`: for those that more than MAX_ROWS rows have in
  // addition.
  DISTMK_FN HostRings(const LaunchParams& params, BatcherState& state, uint32_t max_rows, TokenEvent* near,
                      TokenEvent* far)
      : params_(params),
        state_(state),
        counts_(*reinterpret_cast<HostCounts*>(params.host_counts)),
        max_rows_(max_rows),
        near_(near),
        far_(far) {}

  // Before a step, by the thread that runs it: other threads of the team may be behind, and must not read the state.
  DISTMK_FN void begin() {
    num_done_before_ = num_done_ = state_.num_admitted;
    sent_ = load_relaxed(&counts_.commands);
  }

  // Whether the token ring has room for all that a step may publish. The host's count is read only if the last known
  // one leaves too little, as that takes a trip to its memory.
  DISTMK_FN bool has_room() const {
    if (!fits()) state_.tokens_read = load_acquire(&counts_.tokens_read, Scope::SYSTEM);
    return fits();
  }

  // Commands that the host has sent. What it had sent when the step began was read beside other work, as that takes a
  // trip to its memory, and is read again in order only if there are new ones.
  DISTMK_FN uint64_t num_sent() const {
    return sent_ == state_.num_commands ? sent_ : load_acquire(&counts_.commands, Scope::SYSTEM);
  }
  DISTMK_FN Command& command(uint64_t index) const {
    return reinterpret_cast<Command*>(params_.commands)[index % params_.command_capacity];
  }

  DISTMK_FN void add(uint32_t request, int32_t token, FinishReason finish, uint64_t iteration,
                     bool has_logprobs = false) {
    const TokenEvent event{request, token, static_cast<uint16_t>(finish), has_logprobs,
                           static_cast<uint32_t>(iteration)};
    // Not one store to either: then a thread's own memory would be addressed as any memory.
    if (num_events_ < NUM_NEAR)
      near_[num_events_] = event;
    else
      far_[num_events_ - NUM_NEAR] = event;
    ++num_events_;
  }
  // Whether another cancelled request may be added.
  DISTMK_FN bool may_cancel() const { return num_events_ < (EVENTS_PER_ROW - 1) * max_rows_; }
  // Place in the ring of the first event of this step, once they are counted.
  DISTMK_FN uint32_t first_place() const { return static_cast<uint32_t>(num_before_ % params_.token_capacity); }

  // Counts what was added as published. After this the caller may store its state, and then publish().
  DISTMK_FN void count() {
    num_before_ = state_.num_published;
    state_.num_published += num_events_;
    num_done_ = state_.num_admitted;
  }
  DISTMK_FN void publish(uint64_t iteration) const {
    DISTMK_NO_UNROLL
    for (uint32_t i = 0, place = first_place(); i < num_events_; ++i) {
      reinterpret_cast<TokenEvent*>(params_.tokens)[place] = event(i);
      if (++place == params_.token_capacity) place = 0;  // divisions are slow
    }
    if (num_events_) {
      counts_.iterations = iteration;
      counts_.num_running = state_.num_running;
      counts_.num_free_pages = state_.num_free_pages;
      store_release(&counts_.tokens, num_before_ + num_events_, Scope::SYSTEM);
    }
    if (num_done_ != num_done_before_) store_release(&counts_.commands_done, num_done_, Scope::SYSTEM);
  }

 private:
  const LaunchParams& params_;
  BatcherState& state_;
  HostCounts& counts_;
  const uint32_t max_rows_;
  TokenEvent *const near_, *const far_;
  uint32_t num_events_ = 0;
  uint64_t num_before_ = 0;  // published before this step
  uint64_t sent_ = 0;        // as num_sent(), when the step began
  uint64_t num_done_before_ = 0, num_done_ = 0;

  DISTMK_FN const TokenEvent& event(uint32_t index) const {
    return index < NUM_NEAR ? near_[index] : far_[index - NUM_NEAR];
  }
  DISTMK_FN bool fits() const {
    return state_.num_published + EVENTS_PER_ROW * max_rows_ <= state_.tokens_read + params_.token_capacity;
  }
};

}  // namespace distmk
