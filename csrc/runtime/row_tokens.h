// Helpers of the scheduler step for tokens and requests: the token that a row gave, what a row is sampled for, and the
// sampling parameters of a slot.
#pragma once
#include "runtime/argmax.h"
#include "runtime/context.h"

namespace distmk {

// The best token of a row, over the candidates of all ranks. Each rank has `num_rows` candidates.
DISTMK_FN int32_t best_token_of_row(const Candidate* candidates, uint32_t row, uint32_t num_ranks, uint32_t num_rows) {
  Candidate best = candidates[row];
  DISTMK_NO_UNROLL
  for (uint32_t rank = 1; rank < num_ranks; ++rank) best = better_of(best, candidates[rank * num_rows + row]);
  return best.token;
}

// A drawn token. The load is volatile, because another SM has written it.
DISTMK_FN int32_t load_drawn(const Candidate* drawn) {
  return *reinterpret_cast<const volatile int32_t*>(&drawn->token);
}

DISTMK_FN bool is_end_token(const LaunchParams& params, int32_t token) {
  const auto* ids = reinterpret_cast<const int32_t*>(params.eos_ids);
  DISTMK_NO_UNROLL
  for (uint32_t i = 0; i < params.num_eos; ++i)
    if (ids[i] == token) return true;
  return false;
}

// What the row of a token at `position` is sampled for. The last token of the prompt and every later one give the next
// token. The row of an earlier one may be scored: for the token at the next position.
DISTMK_FN RowSample row_sample(const RequestEntry& request, uint32_t position) {
  if (position + 1 >= request.prompt_len)
    return request.sample == static_cast<uint32_t>(RowSample::DRAW) ? RowSample::DRAW : RowSample::GREEDY;
  // Not positive for tokens generated before a preemption. The unsigned difference below is then large.
  const uint32_t num_behind = request.prompt_len - request.num_output - (position + 1);
  return num_behind - 1 < request.num_scores ? RowSample::SCORE : RowSample::NONE;
}

// Whether the tokens of a request come from masks, which the host writes one after another.
DISTMK_FN bool is_constrained(const RequestEntry& request) { return request.sampling.mask; }

DISTMK_FN const RequestEntry& request_of(const LaunchParams& params, const Sequence& sequence) {
  return reinterpret_cast<const RequestEntry*>(params.requests)[sequence.request];
}
DISTMK_FN const int32_t* prompt_row(const LaunchParams& params, const Sequence& sequence) {
  return reinterpret_cast<const int32_t*>(params.prompts) + uint64_t{params.prompt_stride} * sequence.request;
}

// What decides whether a sequence finishes with a token. It is read before anything is stored, so that the loads share
// one round trip to memory.
struct TokenLimits {
  uint32_t id, position, num_new, max_new;  // num_new: output tokens, this one included
  bool ignore_eos, reports_logprobs;

  DISTMK_FN TokenLimits(const Sequence& sequence, const RequestEntry& request)
      : id(request.id),
        position(sequence.position),
        num_new(sequence.position + 1 - sequence.prompt_len),
        max_new(request.max_new),
        ignore_eos(request.ignore_eos),
        reports_logprobs(request.reports_logprobs) {}
};

// Stores a slot's sampling parameters, at the admission of a request that draws or scores.
DISTMK_FN void store_sampling(SlotSampling* slot, const LaunchParams& params, const RequestEntry& request,
                              uint32_t entry) {
  SlotSampling sampling = request.sampling;
  sampling.tokens = params.prompts + uint64_t{params.prompt_stride} * entry * sizeof(int32_t);
  sampling.prompt_len = request.prompt_len - request.num_output;
  sampling.num_counted = 0;
  *slot = sampling;
}

}  // namespace distmk
