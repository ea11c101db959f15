// The two rings in host memory between the host and rank 0's batcher: commands in, token events out. Each side writes
// only the count of its own end, and only after the elements that the count covers.
#pragma once
#include "runtime/context.h"

namespace distmk {

class HostRings {
 public:
  static constexpr uint32_t NUM_NEAR = EVENTS_PER_ROW * MAX_ROWS;

  // A step first publishes a token or a score for each of up to `max_rows` sampled rows. Cancelled requests follow, as
  // far as may_cancel() allows, and then preempted sequences. `near` has room for NUM_NEAR events; `far` takes the
  // others, which only steps with more than MAX_ROWS sampled rows have.
  DISTMK_FN HostRings(const LaunchParams& params, BatcherState& state, uint32_t max_rows, TokenEvent* near,
                      TokenEvent* far)
      : params_(params),
        state_(state),
        counts_(*reinterpret_cast<HostCounts*>(params.host_counts)),
        max_rows_(max_rows),
        near_(near),
        far_(far) {}

  // Called before a step, by the team's leader alone. The constructor, which all threads run, must not read the state:
  // a thread that lags behind would race with the leader's writes.
  DISTMK_FN void begin() {
    num_done_before_ = num_done_ = state_.num_admitted;
    sent_ = load_relaxed(&counts_.commands);
  }

  // Whether the token ring has room for every event that a step may publish. The host's count is fetched only if the
  // last known count leaves too little room, because a read of host memory is slow.
  DISTMK_FN bool has_room() const {
    if (!fits()) state_.tokens_read = load_acquire(&counts_.tokens_read, Scope::SYSTEM);
    return fits();
  }

  // Number of commands that the host has sent. begin() loads the count while other work hides the latency. If
  // there are new commands, it is loaded again with acquire order.
  DISTMK_FN uint64_t num_sent() const {
    return sent_ == state_.num_commands ? sent_ : load_acquire(&counts_.commands, Scope::SYSTEM);
  }
  DISTMK_FN Command& command(uint64_t index) const {
    return reinterpret_cast<Command*>(params_.commands)[index % params_.command_capacity];
  }

  DISTMK_FN void add(uint32_t request, int32_t token, FinishReason finish, uint64_t iteration,
                     bool has_logprobs = false) {
    add({request, token, static_cast<uint16_t>(finish), has_logprobs, static_cast<uint32_t>(iteration)});
  }
  DISTMK_FN void add(const TokenEvent& event) {
    set(num_events_, event);
    ++num_events_;
  }
  // The threads of a team add `num` events: each thread calls set() for some of them, and all call add_set().
  DISTMK_FN void set(uint32_t index, const TokenEvent& event) {
    // Two stores instead of one through a selected pointer, which would make the compiler address a thread's own memory
    // by generic loads and stores.
    if (index < NUM_NEAR)
      near_[index] = event;
    else
      far_[index - NUM_NEAR] = event;
  }
  DISTMK_FN void add_set(uint32_t num) { num_events_ += num; }
  // Counts a row that the next iteration repeats.
  DISTMK_FN void count_repeated() { ++num_repeated_; }
  DISTMK_FN const TokenEvent& event(uint32_t index) const {
    return index < NUM_NEAR ? near_[index] : far_[index - NUM_NEAR];
  }
  // Whether the step may report one more cancelled request.
  DISTMK_FN bool may_cancel() const { return num_events_ < (EVENTS_PER_ROW - 1) * max_rows_; }
  // Index in the ring of this step's first event; valid after count().
  DISTMK_FN uint32_t first_place() const { return static_cast<uint32_t>(num_before_ % params_.token_capacity); }

  // Counts the added events as published. The caller may then store the batcher's state, and calls publish().
  DISTMK_FN void count() {
    num_before_ = state_.num_published;
    state_.num_published += num_events_;
    num_done_ = state_.num_admitted;
  }
  DISTMK_FN void publish(uint64_t iteration) const {
    DISTMK_NO_UNROLL
    for (uint32_t i = 0, place = first_place(); i < num_events_; ++i) {
      reinterpret_cast<TokenEvent*>(params_.tokens)[place] = event(i);
      if (++place == params_.token_capacity) place = 0;  // no modulo: integer division is slow on a GPU
    }
    publish_counts(iteration);
  }
  // publish() for all threads of the team, which share the memory of `near`. The leader has called count().
  DISTMK_FN void publish(const Team& team, uint64_t iteration) const {
    const uint32_t num_events = team.from_leader(num_events_), first = team.from_leader(first_place());
    DISTMK_NO_UNROLL
    for (uint32_t i = team.index; i < num_events; i += team.size) {
      const uint32_t place = first + i;
      reinterpret_cast<TokenEvent*>(
          params_.tokens)[place < params_.token_capacity ? place : place - params_.token_capacity] = event(i);
    }
    team.sync();
    if (team.leader()) publish_counts(iteration);
  }

 private:
  const LaunchParams& params_;
  BatcherState& state_;
  HostCounts& counts_;
  const uint32_t max_rows_;
  TokenEvent *const near_, *const far_;
  uint32_t num_events_ = 0, num_repeated_ = 0;
  uint64_t num_before_ = 0;  // events published before this step
  uint64_t sent_ = 0;        // commands sent, as loaded by begin()
  uint64_t num_done_before_ = 0, num_done_ = 0;

  DISTMK_FN void publish_counts(uint64_t iteration) const {
    if (num_repeated_)
      store_relaxed(&counts_.num_repeated_rows, load_relaxed(&counts_.num_repeated_rows) + num_repeated_);
    if (num_events_) {
      counts_.iterations = iteration;
      counts_.num_running = state_.num_running;
      counts_.num_free_pages = state_.num_free_pages;
      store_release(&counts_.tokens, num_before_ + num_events_, Scope::SYSTEM);
    }
    if (num_done_ != num_done_before_) store_release(&counts_.commands_done, num_done_, Scope::SYSTEM);
  }

  DISTMK_FN bool fits() const {
    return state_.num_published + EVENTS_PER_ROW * max_rows_ <= state_.tokens_read + params_.token_capacity;
  }
};

}  // namespace distmk
