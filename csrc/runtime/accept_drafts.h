// The tokens that an iteration gives, and the drafts that follow them (distmk/tasks/drafting.py). Written once, for a
// block of threads on a GPU and for one thread on the host; `Block` is that of sample_row.h.
#pragma once
#include "runtime/argmax.h"
#include "runtime/context.h"
#include "runtime/row_sample.h"

namespace distmk {

// Loads a number that other SMs have written.
template <class T>
DISTMK_FN T load_fresh(const T* p) {
  return *const_cast<const volatile T*>(p);
}

DISTMK_FN bool gives_token(const BatchRow& row) {
  return row.sample != static_cast<int32_t>(RowSample::NONE) && row.sample != static_cast<int32_t>(RowSample::SCORE);
}
// Whether a sampled row is the first one of its sequence that gives a token. Rows of drafts follow it.
DISTMK_FN bool is_first_with_token(const SampledRows& rows, uint32_t index) {
  if (!gives_token(rows[index])) return false;
  if (!index) return true;
  const BatchRow before = rows[index - 1];
  return before.slot != rows[index].slot || !gives_token(before);
}

// Token of a row: the one that was drawn, or else the best one of all ranks; the lowest id wins ties.
DISTMK_FN int32_t token_given(const Context& context, const AcceptDraftsArgs& args, uint32_t index,
                              const BatchRow& row) {
  if (needs_logits(row)) return load_fresh(&context.at<Candidate>(args.drawn)[index].token);
  const auto* candidates = context.at<Candidate>(args.candidates) + index;
  const auto load = [&](uint32_t rank) {
    const Candidate* candidate = candidates + rank * args.num_rows;
    return Candidate{load_fresh(&candidate->value), load_fresh(&candidate->token)};
  };
  Candidate best = load(0);
  DISTMK_NO_UNROLL
  for (uint32_t rank = 1; rank < args.num_ranks; ++rank) best = better_of(best, load(rank));
  return best.token;
}

// A thread takes the run of a sequence. A constrained sequence, which has no drafts, may get no token.
DISTMK_FN void accept_drafts(Context& context, const AcceptDraftsArgs& args) {
  const SampledRows rows(context.rank_state, args);
  DISTMK_NO_UNROLL
  for (uint32_t first = context.team.index; first < rows.count(); first += context.team.size) {
    if (!is_first_with_token(rows, first)) continue;
    BatchRow row = rows[first];
    DraftSlot& drafts = context.at<DraftSlot>(args.drafts)[row.slot];
    auto* tokens = context.at<int32_t>(load_fresh(&drafts.tokens));
    const int32_t slot = row.slot;
    DISTMK_NO_UNROLL
    for (uint32_t index = first;; ++index) {
      const int32_t token = token_given(context, args, index, row);
      if (token < 0) break;
      const uint32_t position = static_cast<uint32_t>(row.position) + 1;
      tokens[position] = token;
      drafts.num_tokens = position + 1;
      if (index + 1 == rows.count()) break;
      row = rows[index + 1];
      if (row.slot != slot || row.token != token) break;
    }
    drafts.num_drafts = 0;
  }
}

// Looks for a sequence's last tokens in its history.
template <class Block>
class HistorySearch {
 public:
  DISTMK_FN HistorySearch(Block& block, const ProposeDraftsArgs& args, const int32_t* tokens, uint32_t num)
      : block_(block), args_(args), tokens_(tokens), num_(num) {}

  // The longest match, and among these the last one or the first one.
  struct Match {
    uint32_t length, end;  // tokens from `end` on followed it; length 0: there is no match
  };
  DISTMK_FN Match find() const {
    const bool wants_latest = args_.source == static_cast<uint32_t>(DraftSource::LATEST);
    const int32_t last = Block::load(tokens_ + num_ - 1);
    const uint32_t begin = num_ > MAX_SEARCHED ? num_ - MAX_SEARCHED : 1;
    uint64_t best = 0;
    DISTMK_NO_UNROLL
    for (uint32_t end = begin + block_.index(); end < num_; end += block_.size()) {
      if (Block::load(tokens_ + end - 1) != last) continue;
      const uint32_t length = length_at(end);
      if (length < args_.min_match) continue;
      const uint64_t key = uint64_t{length} << 32 | (wants_latest ? end : ~end);
      if (key > best) best = key;
    }
    best = block_.reduce(best, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
    const auto low = static_cast<uint32_t>(best);
    return {static_cast<uint32_t>(best >> 32), wants_latest ? low : ~low};
  }

 private:
  Block& block_;
  const ProposeDraftsArgs& args_;
  const int32_t* tokens_;
  const uint32_t num_;

  // How many tokens before `end` equal the last ones; the last one does.
  DISTMK_FN uint32_t length_at(uint32_t end) const {
    uint32_t length = 1;
    DISTMK_NO_UNROLL
    while (length < args_.max_match && length < end &&
           Block::load(tokens_ + end - 1 - length) == Block::load(tokens_ + num_ - 1 - length))
      ++length;
    return length;
  }
};

// The drafts of one sequence, with all threads of the block.
template <class Block>
DISTMK_FN void propose_for(Block& block, const Context& context, const ProposeDraftsArgs& args, DraftSlot& drafts) {
  auto* tokens = context.at<int32_t>(load_fresh(&drafts.tokens));
  const uint32_t num = load_fresh(&drafts.num_tokens);
  uint32_t most = num < args.max_ids ? min(args.max_drafts, args.max_ids - num) : 0;
  if (args.source != static_cast<uint32_t>(DraftSource::GIVEN) && most) {
    const auto match = HistorySearch<Block>(block, args, tokens, num).find();
    most = min(most, match.length * args.drafts_per_match / 256);
    // Behind the last token the match goes on with the drafts themselves.
    for (uint32_t i = block.index(); i < most; i += block.size())
      tokens[num + i] = Block::load(tokens + match.end + i % (num - match.end));
  }
  if (block.index() == 0) drafts.num_drafts = most;
  block.sync();
}

template <class Block>
DISTMK_FN void propose_drafts(Block& block, Context& context, const ProposeDraftsArgs& args) {
  const SampledRows rows(context.rank_state, args);
  if (!context.take_assigned(rows.count())) return;
  uint32_t index = context.instance;
  do {
    if (is_first_with_token(rows, index))
      propose_for(block, context, args, context.at<DraftSlot>(args.drafts)[rows[index].slot]);
  } while (context.next_assigned(index));
}

}  // namespace distmk
