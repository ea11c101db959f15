// Which drafts of which sequences the next iteration verifies.
#pragma once
#include "runtime/page_table.h"
#include "runtime/row_tokens.h"

namespace distmk {

DISTMK_FN DraftSlot* draft_slots(const Context& context, const SchedulerStepArgs& args) {
  return context.at<DraftSlot>(args.drafts);
}
DISTMK_FN DraftTotals& draft_totals(const Context& context, const SchedulerStepArgs& args) {
  return *reinterpret_cast<DraftTotals*>(draft_slots(context, args) + num_slots(args));
}

DISTMK_FN DraftPace& draft_pace(const Context& context, const SchedulerStepArgs& args, uint32_t program) {
  return reinterpret_cast<DraftPace*>(&draft_totals(context, args) + 1)[program];
}

// What one more row costs, as a straight line through the times of the last iterations (DraftPace).
struct Pace {
  static constexpr uint32_t MEMORY = 32;         // iterations that the means are over
  static constexpr uint32_t MEMORY_KEPT = 4;     // of them, when other sequences run than before
  static constexpr float PRIOR_VARIANCE = 1.0f;  // variance of the rows from which on times count more than row_cost

  DISTMK_FN static void add(DraftPace& pace, uint32_t num_sequences, uint32_t num_rows, uint32_t num_tokens,
                            uint64_t ns) {
    if (num_sequences != pace.num_sequences) pace.num = min(pace.num, MEMORY_KEPT);
    pace.num_sequences = num_sequences;
    if (pace.num < MEMORY) ++pace.num;
    const float weight = 1.0f / static_cast<float>(pace.num), time = static_cast<float>(ns);
    const float rows = static_cast<float>(num_rows), rows_off = rows - pace.rows, time_off = time - pace.ns;
    pace.rows += weight * rows_off;
    pace.ns += weight * time_off;
    pace.tokens += weight * (static_cast<float>(num_tokens) - pace.tokens);
    pace.rows_variance += weight * (rows_off * (rows - pace.rows) - pace.rows_variance);
    pace.covariance += weight * (time_off * (rows - pace.rows) - pace.covariance);
  }
  // The probability of acceptance from which on a draft gives more tokens for its time than iterations have given so
  // far. `row_cost`: of one more row, as a share of an iteration of one row, which counts as long as little is
  // measured.
  DISTMK_FN static float least_acceptance(const DraftPace& pace, float row_cost, uint32_t num_decoding) {
    if (!pace.num || row_cost == 0.0f) return row_cost * static_cast<float>(num_decoding);
    const float prior = row_cost / (1.0f + row_cost * (pace.rows - 1.0f));  // as a share of the mean iteration
    const float cost = (pace.covariance / pace.ns + prior * PRIOR_VARIANCE) / (pace.rows_variance + PRIOR_VARIANCE);
    return cost * pace.tokens;
  }
};

// The estimate of the probability that a draft is accepted (DraftSlot.acceptance).
struct Acceptance {
  static constexpr float FIRST = 0.75f, MOST = 0.98f;
  static constexpr float WEIGHT = 1.0f / 8.0f;    // of a draft that was verified
  static constexpr float FORGETS = 1.0f / 64.0f;  // of its distance from FIRST, when drafts are not worth their rows

  // Of `num` drafts that were verified, the first `num_accepted` were accepted; nothing is known of those behind the
  // first one that was not.
  DISTMK_FN static float update(float acceptance, uint32_t num, uint32_t num_accepted) {
    DISTMK_NO_UNROLL
    for (uint32_t i = 0; i < num_accepted; ++i) acceptance += (1.0f - acceptance) * WEIGHT;
    if (num_accepted < num) acceptance -= acceptance * WEIGHT;
    return acceptance < MOST ? acceptance : MOST;
  }
  // So a sequence is tried again some time, and not for long in vain.
  DISTMK_FN static float forget(float acceptance) { return acceptance + (FIRST - acceptance) * FORGETS; }
  // How many of `num` drafts are accepted with a probability of at least `least`.
  DISTMK_FN static uint32_t num_worthwhile(float acceptance, float least, uint32_t num) {
    uint32_t count = 0;
    float accepted = acceptance;
    DISTMK_NO_UNROLL
    for (; count < num && accepted >= least; ++count) accepted *= acceptance;
    return count;
  }
};

// At admission of a sequence.
DISTMK_FN void begin_drafts(const Context& context, const SchedulerStepArgs& args, uint32_t slot,
                            const Sequence& sequence) {
  const auto tokens = reinterpret_cast<uint64_t>(prompt_row(context.params(), sequence));
  draft_slots(context, args)[slot] = {tokens, sequence.prompt_len, 0, Acceptance::FIRST, 0};
}

// A draft pays if it is accepted with at least the probability Pace::least_acceptance(). If there is no room for all
// drafts that pay, the least probable ones are left out.
class DraftPlan {
 public:
  DISTMK_FN DraftPlan(const Context& context, const SchedulerStepArgs& args, const Sequences& sequences,
                      uint32_t program)
      : context_(context),
        args_(args),
        sequences_(sequences),
        drafts_(draft_slots(context, args)),
        pace_(draft_pace(context, args, program)) {}

  // Lowers num_drafts of the decoding sequences for which `is_for(slot)`: the iteration has rows for them. Drafts get
  // rows and pages that no sequence would take without them.
  template <class IsFor>
  DISTMK_FN void choose(const PageTable& pages, uint32_t max_rows, uint32_t max_sampled, const IsFor& is_for) {
    uint32_t num_decoding = 0, num_rows = 0, num_sampled = 0, num_pages = 0;
    DISTMK_NO_UNROLL
    for (uint32_t slot = 0; slot < sequences_.end(); ++slot) {
      const Sequence& sequence = sequences_[slot];
      if (sequence.request < 0) continue;
      const bool decodes = is_decoding(sequence);
      num_pages += decodes ? pages.needs_page(sequence)
                           : pages.pages_of(sequence.prompt_len) - pages.pages_of(sequence.position);
      if (!is_for(slot)) continue;
      num_decoding += decodes;
      num_rows += decodes ? 1 : sequence.prompt_len - sequence.position;
      num_sampled += decodes ? 1 : 1 + request_of(context_.params(), sequence).num_scores;
    }
    least_ = Pace::least_acceptance(pace_, static_cast<float>(args_.row_cost) / ROW_COST_UNIT, num_decoding);
    const auto for_each = [&](const auto& visit) {
      DISTMK_NO_UNROLL
      for (uint32_t slot = 0; slot < sequences_.end(); ++slot)
        if (sequences_[slot].request >= 0 && is_decoding(sequences_[slot]) && is_for(slot)) visit(slot, drafts_[slot]);
    };
    share_rows(for_each, min(rest_of(max_rows, num_rows), rest_of(max_sampled, num_sampled)));
    uint32_t num_free = rest_of(pages.num_free(), num_pages);
    for_each([&](uint32_t, DraftSlot& drafts) { keep_in_pages(pages, drafts, num_free); });
  }

 private:
  static constexpr float LEVEL = 1.0f / 32.0f;
  const Context& context_;
  const SchedulerStepArgs& args_;
  const Sequences& sequences_;
  DraftSlot* drafts_;
  const DraftPace& pace_;
  float least_ = 0.0f;  // probability from which on a draft pays

  DISTMK_FN static bool is_decoding(const Sequence& sequence) { return sequence.position >= sequence.prompt_len; }
  DISTMK_FN static uint32_t rest_of(uint32_t all, uint32_t taken) { return all > taken ? all - taken : 0; }

  // Keeps the drafts that pay, or the most probable ones of them that `num_rows` rows have room for.
  template <class ForEach>
  DISTMK_FN void share_rows(const ForEach& for_each, uint32_t num_rows) const {
    uint32_t num_wanted = 0;
    for_each([&](uint32_t slot, DraftSlot& drafts) { num_wanted += keep_worthwhile(slot, drafts); });
    if (num_wanted <= num_rows) return;
    float least = least_ > LEVEL ? least_ : LEVEL, before = least;
    uint32_t num = num_wanted;
    for (; num > num_rows; least += LEVEL) {
      before = least;
      num = 0;
      for_each([&](uint32_t, const DraftSlot& drafts) { num += num_above(drafts, least); });
    }
    // Above `before` there is room for all, and perhaps for some of the next probable ones.
    for_each([&](uint32_t, DraftSlot& drafts) {
      const uint32_t kept = num_above(drafts, before);
      const uint32_t more = min(num_above(drafts, before - LEVEL) - kept, num_rows - num);
      num += more;
      drafts.num_drafts = kept + more;
    });
  }

  DISTMK_FN static uint32_t num_above(const DraftSlot& drafts, float least) {
    return Acceptance::num_worthwhile(drafts.acceptance, least, drafts.num_drafts);
  }
  // Leaves out drafts that do not pay, or that would be behind the last token. A constrained sequence has none, because
  // the masks behind a draft are not known. Returns how many are left.
  DISTMK_FN uint32_t keep_worthwhile(uint32_t slot, DraftSlot& drafts) const {
    const Sequence& sequence = sequences_[slot];
    const RequestEntry& request = request_of(context_.params(), sequence);
    if (is_constrained(request)) return drafts.num_drafts = 0;
    const uint32_t end = sequence.prompt_len + request.max_new;
    const uint32_t most_tokens = min(end, args_.max_positions + 1);
    // The last token of the sequence needs no draft: the row before it gives it.
    const uint32_t room = drafts.num_tokens + 1 < most_tokens ? most_tokens - drafts.num_tokens - 1 : 0;
    const uint32_t offered = min(min(drafts.num_drafts, room), args_.max_drafts);
    drafts.num_drafts = Acceptance::num_worthwhile(drafts.acceptance, least_, offered);
    if (offered && !drafts.num_drafts) drafts.acceptance = Acceptance::forget(drafts.acceptance);
    return drafts.num_drafts;
  }
  DISTMK_FN static void keep_in_pages(const PageTable& pages, DraftSlot& drafts, uint32_t& num_free) {
    const uint32_t own = pages.pages_of(drafts.num_tokens);
    while (drafts.num_drafts && pages.pages_of(drafts.num_tokens + drafts.num_drafts) > own + num_free)
      --drafts.num_drafts;
    num_free -= pages.pages_of(drafts.num_tokens + drafts.num_drafts) - own;
  }
};

}  // namespace distmk
