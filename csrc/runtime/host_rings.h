// The two rings between the host and rank 0's batcher, in host memory: commands in, tokens out. Each side writes its
// own end's count only, after the elements that the count covers.
#pragma once
#include "runtime/context.h"

namespace distmk {

class HostRings {
 public:
  // That a step publishes: a token or a score of each row, then cancelled requests, then sequences put back.
  static constexpr uint32_t MAX_EVENTS = 3 * MAX_ROWS;

  DISTMK_FN HostRings(const LaunchParams& params, BatcherState& state)
      : params_(params), state_(state), counts_(*reinterpret_cast<HostCounts*>(params.host_counts)) {}

  // Before a step, by the thread that runs it: other threads of the team may be behind, and must not read the state.
  DISTMK_FN void begin() { num_done_before_ = num_done_ = state_.num_admitted; }

  // Whether the token ring has room for all that a step may publish. The host's count is read only if the last known
  // one leaves too little, as that takes a trip to its memory.
  DISTMK_FN bool has_room() const {
    if (!fits()) state_.tokens_read = load_acquire(&counts_.tokens_read, Scope::SYSTEM);
    return fits();
  }

  DISTMK_FN uint64_t num_sent() const { return load_acquire(&counts_.commands, Scope::SYSTEM); }
  DISTMK_FN Command& command(uint64_t index) const {
    return reinterpret_cast<Command*>(params_.commands)[index % params_.command_capacity];
  }

  DISTMK_FN void add(uint32_t request, int32_t token, FinishReason finish, uint64_t iteration,
                     bool has_logprobs = false) {
    events_[num_events_++] = {request, token, static_cast<uint16_t>(finish), has_logprobs,
                              static_cast<uint32_t>(iteration)};
  }
  // Whether another cancelled request may be added.
  DISTMK_FN bool may_cancel() const { return num_events_ < 2 * MAX_ROWS; }
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
    for (uint32_t i = 0; i < num_events_; ++i)
      reinterpret_cast<TokenEvent*>(params_.tokens)[(num_before_ + i) % params_.token_capacity] = events_[i];
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
  TokenEvent events_[MAX_EVENTS];
  uint32_t num_events_ = 0;
  uint64_t num_before_ = 0;  // published before this step
  uint64_t num_done_before_ = 0, num_done_ = 0;

  DISTMK_FN bool fits() const {
    return state_.num_published + MAX_EVENTS <= state_.tokens_read + params_.token_capacity;
  }
};

}  // namespace distmk
