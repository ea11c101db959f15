// Exact sampling of a row over the whole vocabulary, and the row's logprobs, in vLLM's order:
//   mask of allowed tokens; biases, and tokens banned before a minimum length; penalties; temperature; min-p; top-k;
//   top-p; a draw from the softmax of what is left.
// Written once, for a block of threads on a GPU and for one thread on the host. `Block` (device/sampling/block.cuh,
// host/bodies/sample_row.cpp) has the differences.
#pragma once
#include "runtime/context.h"
#include "runtime/row_sample.h"
#include "runtime/token_selector.h"

namespace distmk {

constexpr float MIN_TEMPERATURE = 1e-5f;  // below this, sampling is greedy, as in vLLM

DISTMK_FN bool has_flag(const SlotSampling& slot, SamplingFlag flag) {
  return slot.flags & static_cast<uint32_t>(flag);
}

// The logit of a token with this count (see COUNT_IN_PROMPT), after penalties.
DISTMK_FN float penalize(float x, const SlotSampling& slot, uint32_t count) {
  if (!count) return x;
  const uint32_t in_output = count & ~COUNT_IN_PROMPT;
  x = x > 0.0f ? x / slot.repetition_penalty : x * slot.repetition_penalty;
  if (!in_output) return x;
  return x - slot.frequency_penalty * static_cast<float>(in_output) - slot.presence_penalty;
}

// `VERIFIES`: the token of the row may be a draft, like those of the rows before it (RowSample::VERIFY).
template <class Block, bool VERIFIES>
class RowSampler {
 public:
  DISTMK_FN RowSampler(Block& block, Context& context, const SampleRowArgs& args, const BatchRow& row)
      : block_(block),
        context_(context),
        args_(args),
        row_(row),
        slot_(block.slot(context.at<SlotSampling>(args.slots) + row.slot)),
        raw_(logits_in(args.logits, args.row)),
        adjusted_(logits_in(args.adjusted, 0)) {}

  DISTMK_FN void run() {
    const bool draws = row_.sample == static_cast<int32_t>(RowSample::DRAW) || is_draft(row_);
    Candidate chosen = draws ? draw() : Candidate{0.0f, next_in_prompt()};
    if (draws && block_.index() == 0) *context_.at<Candidate>(args_.drawn) = chosen;
    const int32_t num_best = draws ? slot_.num_logprobs : slot_.num_prompt_logprobs;
    if (num_best >= 0 && chosen.token >= 0)
      report(static_cast<uint32_t>(chosen.token), min_of(static_cast<uint32_t>(num_best), MAX_LOGPROBS));
  }

 private:
  Block& block_;
  Context& context_;
  const SampleRowArgs& args_;
  const BatchRow& row_;
  const SlotSampling& slot_;
  const RowLogits raw_, adjusted_;

  DISTMK_FN static bool is_draft(const BatchRow& row) {
    return VERIFIES && row.sample == static_cast<int32_t>(RowSample::VERIFY);
  }
  DISTMK_FN static uint32_t min_of(uint32_t a, uint32_t b) { return a < b ? a : b; }
  DISTMK_FN RowLogits logits_in(uint64_t operand, uint32_t row) const {
    auto* logits = context_.at<float>(operand) + uint64_t{row} * args_.num_ranks * args_.section_stride;
    return {logits, args_.vocab, args_.num_ranks, args_.section_stride};
  }

  // The prompt's token at the next position, or -1 if there is none.
  DISTMK_FN int32_t next_in_prompt() const {
    const uint32_t next = static_cast<uint32_t>(row_.position) + 1;
    if (!slot_.tokens || next >= slot_.prompt_len) return -1;
    const int32_t token = Block::load(context_.at<int32_t>(slot_.tokens) + next);
    return static_cast<uint32_t>(token) < args_.vocab ? token : -1;
  }

  // Adjusted logits: after mask, biases, penalties and bans.

  DISTMK_FN uint32_t num_biases() const { return slot_.biases ? min_of(slot_.num_biases, MAX_BIASES) : 0; }
  DISTMK_FN uint32_t num_banned() const {
    const uint32_t num_tokens = static_cast<uint32_t>(row_.position) + 1 - slot_.prompt_len;
    return slot_.biases && num_tokens < slot_.min_tokens ? min_of(slot_.num_banned, MAX_BANNED) : 0;
  }
  DISTMK_FN bool is_adjusted() const {
    const bool by_table = has_flag(slot_, SamplingFlag::PENALTIES) || slot_.mask;
    return by_table || num_biases() || num_banned();
  }
  // Adjusts single logits by everything but bans.
  struct Adjustment {
    const SlotSampling& slot;
    const uint32_t *counts, *mask;  // null: not in use

    // `num_drafts`: how often the token is among the drafts of the row and of those before it.
    DISTMK_FN float operator()(uint32_t token, float x, float bias, uint32_t num_drafts = 0) const {
      if (mask && !(Block::load(mask + token / 32) >> token % 32 & 1)) return -INFINITY;
      return counts ? penalize(x + bias, slot, Block::load(counts + token) + num_drafts) : x + bias;
    }
    // Adjusts a vector of tokens without biases. Few tokens have been counted, so most vectors do not change.
    DISTMK_FN void operator()(uint32_t first, const float* x, uint32_t count, float* y) const {
      uint32_t counted[LOGITS_PER_VECTOR], any = mask != nullptr;
      DISTMK_UNROLL
      for (uint32_t i = 0; i < LOGITS_PER_VECTOR; ++i)
        any |= counted[i] = counts && i < count ? Block::load(counts + first + i) : 0;
      DISTMK_UNROLL
      for (uint32_t i = 0; i < LOGITS_PER_VECTOR; ++i) y[i] = x[i];
      if (!any) return;
      DISTMK_UNROLL
      for (uint32_t i = 0; i < LOGITS_PER_VECTOR; ++i)
        if (i < count) y[i] = (*this)(first + i, x[i], 0.0f);
    }
  };
  DISTMK_FN void adjust() {
    const uint64_t slot = static_cast<uint32_t>(row_.slot);
    const Adjustment adjusted{
        slot_,
        has_flag(slot_, SamplingFlag::PENALTIES) ? context_.at<uint32_t>(args_.counts) + slot * args_.vocab : nullptr,
        slot_.mask ? context_.at<uint32_t>(args_.mask) : nullptr};
    using Vector = typename Block::Vector;
    auto* out = reinterpret_cast<Vector*>(adjusted_.logits);
    for_each_vector<Block>(raw_, [&](uint32_t token, const float* x, uint32_t count, uint64_t place) {
      if (!count) return;
      float y[LOGITS_PER_VECTOR];
      adjusted(token, x, count, y);
      out[place] = {y[0], y[1], y[2], y[3]};
    });
    block_.sync();
    const Bias* biases = context_.at<Bias>(slot_.biases);
    for (uint32_t i = block_.index(); i < num_biases(); i += block_.size()) {
      const auto token = static_cast<uint32_t>(Block::load(&biases[i].token));
      if (token < args_.vocab)
        *adjusted_.at(token) =
            adjusted(token, finite_logit(Block::load(raw_.at(token))), Block::load(&biases[i].value));
    }
    block_.sync();
    if constexpr (VERIFIES) adjust_drafts(adjusted);
    for (uint32_t i = block_.index(); i < num_banned(); i += block_.size()) {
      const auto token = static_cast<uint32_t>(Block::load(&biases[num_biases() + i].token));
      if (token < args_.vocab) *adjusted_.at(token) = -INFINITY;
    }
    block_.sync();
  }

  // The counts end at the token before the first draft.
  DISTMK_FN void adjust_drafts(const Adjustment& adjusted) {
    if (!is_draft(row_) || !adjusted.counts) return;
    const SampledRows rows(context_.rank_state, args_);
    uint32_t num = 1;
    while (num <= args_.row && rows[args_.row - num].slot == row_.slot && is_draft(rows[args_.row - num])) ++num;
    const Bias* biases = context_.at<Bias>(slot_.biases);
    for (uint32_t i = block_.index(); i < num; i += block_.size()) {
      const int32_t draft = rows[args_.row - i].token;
      const auto token = static_cast<uint32_t>(draft);
      if (token >= args_.vocab) continue;
      uint32_t times = 0;
      for (uint32_t j = 0; j < num; ++j) times += rows[args_.row - j].token == draft;
      float bias = 0.0f;
      for (uint32_t j = 0; j < num_biases(); ++j)
        if (Block::load(&biases[j].token) == draft) bias = Block::load(&biases[j].value);
      *adjusted_.at(token) = adjusted(token, finite_logit(Block::load(raw_.at(token))), bias, times);
    }
    block_.sync();
  }

  // Copies the mask of the token at the next position from the host's memory. Returns false if the host has not written
  // it yet. It is copied, because each lane of a warp would wait for the host's memory for every vector of logits.
  DISTMK_FN bool take_mask() {
    const auto* mask = context_.at<TokenMask>(slot_.mask);
    const uint64_t stamp = block_.index() ? 0 : load_acquire(&mask->position, Scope::SYSTEM);
    const uint64_t found = block_.reduce(stamp, [](uint64_t a, uint64_t b) { return a | b; });
    if (found != static_cast<uint64_t>(row_.position) + 1) return false;
    const auto* words = reinterpret_cast<const uint64_t*>(mask + 1);
    auto* copy = context_.at<uint64_t>(args_.mask);
    const uint32_t num = (args_.vocab + 127) / 128 * 2;  // pairs of words, in whole vectors of 16 bytes
    constexpr uint32_t IN_FLIGHT = Block::LOADS_IN_FLIGHT;
    DISTMK_NO_UNROLL
    for (uint32_t first = block_.index(); first < num; first += IN_FLIGHT * block_.size()) {
      uint64_t loaded[IN_FLIGHT];
      DISTMK_UNROLL
      for (uint32_t i = 0; i < IN_FLIGHT; ++i)
        loaded[i] = load_relaxed(words + min_of(first + i * block_.size(), num - 1));
      DISTMK_UNROLL
      for (uint32_t i = 0; i < IN_FLIGHT; ++i)
        if (first + i * block_.size() < num) copy[first + i * block_.size()] = loaded[i];
    }
    block_.sync();
    return true;
  }

  DISTMK_FN Candidate draw() {
    if (slot_.mask && !take_mask()) return {0.0f, PENDING_TOKEN};
    if (is_adjusted()) adjust();
    const RowLogits& row = is_adjusted() ? adjusted_ : raw_;
    TokenSelector<Block> selector(block_, row);
    const Candidate best = selector.find_best();
    if (slot_.mask && best.value == -INFINITY) return {0.0f, NO_TOKEN_ALLOWED};
    if (slot_.temperature < MIN_TEMPERATURE || best.value == -INFINITY) return best;
    selector.set(slot_.temperature, slot_.min_p > 0.0f ? logf(slot_.min_p) : -INFINITY);
    if (slot_.top_k && slot_.top_k < args_.vocab) selector.keep_count(slot_.top_k);
    const TokenNumbers numbers{slot_.seed, static_cast<uint32_t>(row_.position)};
    return {best.value, selector.draw(slot_.top_p, numbers)};
  }

  DISTMK_FN void report(uint32_t chosen, uint32_t num_best) {
    TokenSelector<Block> selector(block_, raw_);
    const Candidate best = selector.find_best();
    const float logit = finite_logit(Block::load(raw_.at(chosen)));
    const float log_sum = best.value + logf(static_cast<float>(selector.weigh(best.value, 0).all) / MASS_SCALE);
    uint32_t at_least = 0;
    for_each_vector<Block>(raw_, [&](uint32_t, const float* x, uint32_t count, uint64_t) {
      DISTMK_UNROLL
      for (uint32_t i = 0; i < LOGITS_PER_VECTOR; ++i) at_least += (i < count) & (x[i] >= logit);
    });
    at_least = block_.reduce(at_least, [](uint32_t a, uint32_t b) { return a + b; });
    if (num_best) {
      selector.keep_count(num_best);
      num_best = selector.num_listed();
    }
    auto& record = *context_.at<LogprobRecord>(args_.record);
    for (uint32_t i = block_.index(); i < num_best; i += block_.size()) {
      record.tokens[i] = static_cast<int32_t>(token_of(selector.listed(i)));
      record.logprobs[i] = logit_of(selector.listed(i)) - log_sum;
    }
    if (block_.index()) return;
    record.token = static_cast<int32_t>(chosen);
    record.logprob = logit - log_sum;
    record.rank = at_least;
    record.num = num_best;
  }
};

// Counts tokens for the penalties. For every row that is drawn with penalties, it counts the row's own token and, the
// first time, all tokens of the sequence before it. The draw of the row reads the counts afterwards.
template <class Block>
class TokenCounter {
 public:
  DISTMK_FN TokenCounter(Block& block, Context& context, const CountTokensArgs& args)
      : block_(block), context_(context), args_(args) {}

  // Whether a row is drawn with penalties.
  DISTMK_FN bool has_counts(const BatchRow& row) const {
    if (row.sample != static_cast<int32_t>(RowSample::DRAW)) return false;
    return Block::load(&stored(row)->flags) & static_cast<uint32_t>(SamplingFlag::PENALTIES);
  }
  DISTMK_FN void count(const BatchRow& row) {
    const SlotSampling& slot = block_.slot(stored(row));
    const auto position = static_cast<uint32_t>(row.position);
    const uint32_t num_counted = slot.num_counted;
    if (num_counted > position) return;  // a repeated row was counted before
    auto* counts = context_.at<uint32_t>(args_.counts) + uint64_t{static_cast<uint32_t>(row.slot)} * args_.vocab;
    if (!num_counted) {
      for (uint32_t token = block_.index(); token < args_.vocab; token += block_.size()) counts[token] = 0;
      block_.sync();
    }
    const auto* tokens = context_.at<int32_t>(slot.tokens);
    for (uint32_t i = num_counted + block_.index(); tokens && i < position; i += block_.size())
      add(counts, slot, Block::load(tokens + i), i);
    if (block_.index() == 0) {
      add(counts, slot, row.token, position);
      stored(row)->num_counted = position + 1;
    }
    block_.sync();
  }

 private:
  Block& block_;
  Context& context_;
  const CountTokensArgs& args_;

  DISTMK_FN SlotSampling* stored(const BatchRow& row) const {
    return context_.at<SlotSampling>(args_.slots) + row.slot;
  }
  DISTMK_FN void add(uint32_t* counts, const SlotSampling& slot, int32_t token, uint32_t position) const {
    if (static_cast<uint32_t>(token) >= args_.vocab) return;
    if (position < slot.prompt_len)
      Block::set_bits(counts + token, COUNT_IN_PROMPT);
    else
      Block::add(counts + token, 1);
  }
};

// Bodies of the three sampling tasks. is_idle() says that an iteration has nothing for a task (Task.may_idle).

DISTMK_FN void put_logits_row(Context& context, const SendLogitsArgs& args, uint32_t row) {
  const uint64_t offset = uint64_t{row} * args.stride * sizeof(float), from = args.logits + offset;
  context.put(0, from, context.at<void>(from), args.num_cols * sizeof(float));
}
DISTMK_FN void send_logits(Context& context, const SendLogitsArgs& args) {
  const SampledRows rows(context.rank_state, args);
  DISTMK_NO_UNROLL
  for (uint32_t row = 0; row < rows.count(); ++row)
    if (needs_logits(rows[row])) put_logits_row(context, args, row);
}
DISTMK_FN bool is_idle(const RankState& state, const Team& warp, const SendLogitsArgs& args) {
  return !SampledRows(state, args).any_needs_logits(warp);
}

template <class Block>
DISTMK_FN void count_tokens(Block& block, Context& context, const CountTokensArgs& args) {
  constexpr uint32_t AT_ONCE = 64;  // rows at a time: bits of a mask
  TokenCounter<Block> counter(block, context, args);
  const SampledRows rows(context.rank_state, args);
  DISTMK_NO_UNROLL
  for (uint32_t first = 0; first < rows.count(); first += AT_ONCE) {
    uint64_t mine = 0;
    DISTMK_NO_UNROLL
    for (uint32_t i = block.index(); i < AT_ONCE && first + i < rows.count(); i += block.size())
      mine |= uint64_t{counter.has_counts(rows[first + i])} << i;
    uint64_t counted = block.reduce(mine, [](uint64_t a, uint64_t b) { return a | b; });
    DISTMK_NO_UNROLL
    for (uint32_t i = first; counted; ++i, counted >>= 1)
      if (counted & 1) counter.count(rows[i]);
  }
}
DISTMK_FN bool is_idle(const RankState& state, const Team& warp, const CountTokensArgs& args) {
  return !SampledRows(state, args).any_needs_logits(warp);
}

DISTMK_FN bool is_idle(const RankState& state, const Team&, const SampleRowArgs& args) {
  const SampledRows rows(state, args);
  return args.row >= rows.count() || !needs_logits(rows[args.row]);
}
template <class Block, bool VERIFIES = false>
DISTMK_FN void sample_row(Block& block, Context& context, const SampleRowArgs& args) {
  if (is_idle(context.rank_state, context.team, args)) return;
  const BatchRow row = SampledRows(context.rank_state, args)[args.row];
  RowSampler<Block, VERIFIES>(block, context, args, row).run();
}

}  // namespace distmk
