// The scheduler step of rank 0, between two iterations: takes the sampled tokens, finishes and admits requests, and
// builds the next batch (continuous batching with chunked prefill).
#pragma once
#include "runtime/argmax.h"
#include "runtime/context.h"

namespace distmk {

// What the batcher works on: the originals in the heap, or copies in shared memory.
struct BatcherMemory {
  BatcherState* state;
  Batch* batch;
  const Candidate* candidates;
};

class Batcher {
 public:
  DISTMK_FN Batcher(Context& context, const SchedulerStepArgs& args, const BatcherMemory& memory)
      : context_(context),
        args_(args),
        state_(*memory.state),
        batch_(*memory.batch),
        candidates_(memory.candidates),
        page_table_(context.at<int32_t>(args.page_table)),
        free_pages_(reinterpret_cast<int32_t*>(context.at<BatcherState>(args.state) + 1)) {}

  // Turns the batch of the last iteration into that of this one; returns whether page tables changed. publish() then
  // tells the host the tokens that were taken.
  DISTMK_FN bool advance() {
    if (context_.iteration == 0) {
      reset();
    } else if (take_tokens()) {
      advance_rows();
      return false;
    }
    const bool admitted = admit();
    build_batch();
    return admitted;
  }

  // Writes the taken tokens to the host's token ring.
  DISTMK_FN void publish() {
    const LaunchParams& params = context_.params();
    if (!num_taken_) return;
    DISTMK_NO_UNROLL
    for (uint32_t i = 0; i < num_taken_; ++i)
      reinterpret_cast<TokenEvent*>(params.tokens)[(num_published_ + i) % params.token_capacity] = taken_[i];
    store_release(reinterpret_cast<uint64_t*>(params.token_count), num_published_ + num_taken_, Scope::SYSTEM);
  }

 private:
  Context& context_;
  const SchedulerStepArgs& args_;
  BatcherState& state_;
  Batch& batch_;
  const Candidate* candidates_;
  int32_t* page_table_;
  int32_t* free_pages_;
  TokenEvent taken_[MAX_ROWS];
  uint32_t num_taken_ = 0;
  uint64_t num_published_ = 0;  // before this step

  DISTMK_FN const Request& request_of(const Sequence& sequence) const {
    return reinterpret_cast<const Request*>(context_.params().requests)[sequence.request];
  }

  DISTMK_FN void reset() {
    state_.next_request = state_.num_running = state_.first_slot = state_.num_published = 0;
    state_.num_free_pages = args_.num_pages;
    DISTMK_NO_UNROLL
    for (uint32_t slot = 0; slot < MAX_ROWS; ++slot) state_.slots[slot].request = -1;
    DISTMK_NO_UNROLL
    for (uint32_t page = 0; page < args_.num_pages; ++page)
      free_pages_[page] = static_cast<int32_t>(args_.num_pages - 1 - page);
  }

  DISTMK_FN int32_t best_token(uint32_t row) const {
    Candidate best = candidates_[row];
    DISTMK_NO_UNROLL
    for (uint32_t rank = 1; rank < args_.num_ranks; ++rank) best = better_of(best, candidates_[rank * MAX_ROWS + row]);
    return best.token;
  }

  DISTMK_FN bool is_eos(int32_t token) const {
    const auto* ids = reinterpret_cast<const int32_t*>(context_.params().eos_ids);
    DISTMK_NO_UNROLL
    for (uint32_t i = 0; i < context_.params().num_eos; ++i)
      if (ids[i] == token) return true;
    return false;
  }

  // Returns whether the next batch has the same rows: each row gave a token and no sequence finished, so that no
  // waiting request can take a slot.
  DISTMK_FN bool take_tokens() {
    const uint32_t num_running = state_.num_running;
    num_published_ = state_.num_published;
    DISTMK_NO_UNROLL
    for (uint32_t row = 0; row < batch_.num_rows; ++row) {
      if (!batch_.rows[row].sample) continue;
      const auto slot = static_cast<uint32_t>(batch_.rows[row].slot);
      Sequence& sequence = state_.slots[slot];
      const Request& request = request_of(sequence);
      const int32_t token = best_token(row);
      sequence.last_token = token;
      ++sequence.num_generated;
      FinishReason finish = FinishReason::NONE;
      if (!request.ignore_eos && is_eos(token))
        finish = FinishReason::STOP;
      else if (sequence.num_generated == request.max_new || sequence.position == args_.max_positions)
        finish = FinishReason::LENGTH;
      taken_[num_taken_++] = {static_cast<uint32_t>(sequence.request), token, static_cast<uint32_t>(finish),
                              static_cast<uint32_t>(context_.iteration - 1)};
      if (finish != FinishReason::NONE) release(slot);
    }
    state_.num_published += num_taken_;
    return state_.num_running == num_running && num_taken_ == batch_.num_rows;
  }

  // The common case: the same rows, one position further. build_batch() could only change their order.
  DISTMK_FN void advance_rows() {
    batch_.num_reset_rows = batch_.num_rows;
    DISTMK_NO_UNROLL
    for (uint32_t i = 0; i < batch_.num_rows; ++i) {
      BatchRow& row = batch_.rows[i];
      Sequence& sequence = state_.slots[row.slot];
      row.token = sequence.last_token;
      row.position = static_cast<int32_t>(sequence.position++);
      ++batch_.runs[i].kv_len;
    }
  }

  DISTMK_FN void release(uint32_t slot) {
    Sequence& sequence = state_.slots[slot];
    DISTMK_NO_UNROLL
    for (uint32_t page = 0; page < sequence.num_pages; ++page)
      free_pages_[state_.num_free_pages++] = page_table_[slot * args_.max_pages + page];
    sequence.request = -1;
    --state_.num_running;
  }

  // Requests start in order. Each reserves all the pages that it can ever need, so that none is preempted.
  DISTMK_FN bool admit() {
    const LaunchParams& params = context_.params();
    bool admitted = false;
    DISTMK_NO_UNROLL
    for (uint32_t slot = 0; slot < args_.max_slots && state_.next_request < params.num_requests; ++slot) {
      Sequence& sequence = state_.slots[slot];
      if (sequence.request >= 0) continue;
      const Request& request = reinterpret_cast<const Request*>(params.requests)[state_.next_request];
      uint32_t positions = request.prompt_len + request.max_new;
      if (positions > args_.max_positions) positions = args_.max_positions;
      const uint32_t num_pages = (positions + args_.page_size - 1) / args_.page_size;
      if (num_pages > state_.num_free_pages) break;
      DISTMK_NO_UNROLL
      for (uint32_t page = 0; page < num_pages; ++page)
        page_table_[slot * args_.max_pages + page] = free_pages_[--state_.num_free_pages];
      sequence = {static_cast<int32_t>(state_.next_request++), 0, 0, 0, num_pages, 0};
      ++state_.num_running;
      admitted = true;
    }
    return admitted;
  }

  DISTMK_FN void add_run(uint32_t slot, uint32_t num_rows) {
    Sequence& sequence = state_.slots[slot];
    const Request& request = request_of(sequence);
    const auto* prompt = reinterpret_cast<const int32_t*>(context_.params().prompts) + request.prompt_begin;
    batch_.runs[batch_.num_runs++] = {static_cast<int32_t>(batch_.num_rows), static_cast<int32_t>(num_rows),
                                      static_cast<int32_t>(slot), static_cast<int32_t>(sequence.position + num_rows)};
    DISTMK_NO_UNROLL
    for (uint32_t i = 0; i < num_rows; ++i, ++sequence.position) {
      const bool in_prompt = sequence.position < request.prompt_len;
      const bool sample = sequence.position + 1 >= request.prompt_len;
      batch_.rows[batch_.num_rows++] = {in_prompt ? prompt[sequence.position] : sequence.last_token,
                                        static_cast<int32_t>(sequence.position), static_cast<int32_t>(slot), sample};
    }
  }

  // One row for every sequence that decodes, then prompt chunks in the remaining rows.
  DISTMK_FN void build_batch() {
    batch_.num_reset_rows = context_.iteration ? batch_.num_rows : 0;
    batch_.num_rows = batch_.num_runs = 0;
    DISTMK_NO_UNROLL
    for (uint32_t slot = 0; slot < args_.max_slots; ++slot) {
      const Sequence& sequence = state_.slots[slot];
      if (sequence.request >= 0 && sequence.position >= request_of(sequence).prompt_len) add_run(slot, 1);
    }
    DISTMK_NO_UNROLL
    for (uint32_t i = 0; i < args_.max_slots && batch_.num_rows < MAX_ROWS; ++i) {
      const uint32_t slot = (state_.first_slot + i) % args_.max_slots;
      const Sequence& sequence = state_.slots[slot];
      if (sequence.request < 0 || sequence.position >= request_of(sequence).prompt_len) continue;
      const uint32_t left = request_of(sequence).prompt_len - sequence.position;
      const uint32_t room = MAX_ROWS - batch_.num_rows;
      add_run(slot, left < room ? left : room);
      if (left > room) state_.first_slot = slot;  // the next batch continues this prompt first
    }
    batch_.stop = batch_.num_rows == 0;
    if (batch_.num_reset_rows < batch_.num_rows) batch_.num_reset_rows = batch_.num_rows;
  }
};

// The body of the scheduler step: builds the batch, sends it to every rank, and does last what no rank waits for: the
// host's tokens, and the state from which the next launch starts.
DISTMK_FN void prepare_batch(Context& context, const SchedulerStepArgs& args, const BatcherMemory& memory) {
  const Team& team = context.team;
  Batcher batcher(context, args, memory);
  bool pages_changed = false;
  if (team.leader()) pages_changed = batcher.advance();
  if (args.num_ranks > 1) pages_changed = !team.all(!pages_changed);  // needed for the puts only
  team.sync();                                                        // a warp vote orders no memory
  const bool copied = memory.batch != context.at<Batch>(args.batch);
  if (copied) {
    copy_bytes(team, context.at<Batch>(args.batch), memory.batch, sizeof(Batch));
    team.sync();  // the transport reads the heap's copy
  }
  const uint64_t table_bytes = uint64_t{MAX_ROWS} * args.max_pages * sizeof(int32_t);
  DISTMK_NO_UNROLL
  for (uint32_t rank = 0; rank < args.num_ranks; ++rank) {
    if (rank == context.rank()) continue;
    if (pages_changed) context.put(rank, args.page_table, context.at<void>(args.page_table), table_bytes);
    context.put(rank, args.batch, context.at<void>(args.batch), sizeof(Batch));
  }
  context.finish();  // signals all ranks after one fence
  if (copied) copy_bytes(team, context.at<BatcherState>(args.state), memory.state, sizeof(BatcherState));
  if (team.leader()) batcher.publish();
}

}  // namespace distmk
