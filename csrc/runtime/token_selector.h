// Selects the best tokens of a row without sorting it (top-k). Draws one of them, or one of the best that hold a share
// of the probability (top-p). Results are exact. Tokens are ordered by logit, equal ones by id; the tokens that are
// kept are always a prefix of that order.
//
// Top-k with a small k: the k-th best of the threads' best tokens is at most as good as the row's k-th best token. So
// it suffices to list and sort the tokens that are at least as good as the former. If these are too many, or k is
// large, a histogram by distance from the best logit finds the bin of the last token that is kept. If that bin has few
// tokens, they are listed and sorted; else it is divided again (radix select).
//
// A draw is a race of the tokens that are kept (token_race.h). For top-p of tokens that are not listed, all tokens race
// first. If the tokens better than the winner already hold the share, only these race again. Every token keeps its
// random number, so the winner is the same as in a race of the share alone. Probabilities are added up as integers, so
// the result does not depend on the order of the additions.
#pragma once
#include <math.h>

#include "runtime/argmax.h"
#include "runtime/row_logits.h"
#include "runtime/token_key.h"
#include "runtime/token_race.h"

namespace distmk {

constexpr uint32_t NUM_BINS = 1024, LIST_CAPACITY = 1024, MAX_THREADS = 256;
constexpr float BINS_PER_NAT = 64.0f;
constexpr float MASS_SCALE = 0x1p40f;  // scale of a probability relative to the best token's

// Memory that the threads of a block share.
struct SelectorMemory {
  uint32_t counts[NUM_BINS];   // tokens in each bin
  TokenKey best[MAX_THREADS];  // the best token of each thread
  TokenKey list[LIST_CAPACITY];
  uint32_t list_size;
  uint32_t found_index;
  uint64_t found_before, found_inside;
};

template <class Block>
class TokenSelector {
 public:
  DISTMK_FN TokenSelector(Block& block, const RowLogits& row) : block_(block), memory_(block.memory()), row_(row) {}

  // The token with the largest logit, and the first one of equal tokens. Must be called before anything else.
  DISTMK_OUTLINED Candidate find_best() {
    Candidate best = {-INFINITY, -1};
    for_each_vector<Block>(row_, [&](uint32_t first, const float* x, uint32_t, uint64_t) {
      const float highest = highest_of(x);
      if (highest <= best.value) return;
      const uint32_t i = x[0] == highest ? 0 : x[1] == highest ? 1 : x[2] == highest ? 2 : 3;
      best = {highest, static_cast<int32_t>(first + i)};
    });
    block_.sync();
    memory_.best[block_.index()] = token_key(best.value, static_cast<uint32_t>(best.token));
    best = block_.reduce(best, [](const Candidate& a, const Candidate& b) { return better_of(a, b); });
    if (best.token < 0) best.token = 0;  // all are -infinity
    best_ = best.value;
    best_token_ = static_cast<uint32_t>(best.token);
    return best;
  }
  // Drops tokens with z < `floor`, where z is the distance from the best logit over the temperature (not positive).
  DISTMK_FN void set(float temperature, float floor) {
    scale_ = 1.0f / temperature;
    floor_ = floor;
  }

  // Keeps the best `count` tokens, or all if the row has fewer. Lists the kept tokens, the best first, if they are at
  // most LIST_CAPACITY.
  DISTMK_FN void keep_count(uint32_t count) {
    if (count > Block::size() || !list_by_threads(count)) {
      const uint64_t num_kept = find_last(count);
      if (num_kept <= LIST_CAPACITY) num_listed_ = gather(last_logit_, [](TokenKey, float) { return true; });
    }
  }
  DISTMK_FN uint32_t num_listed() const { return num_listed_; }
  DISTMK_FN TokenKey listed(uint32_t index) const { return memory_.list[index]; }

  // Draws a token by probability, out of the best tokens that hold a share `p` of the kept tokens' probability.
  DISTMK_OUTLINED int32_t draw(float p, const TokenNumbers& numbers) {
    if (num_listed_) return race_of_listed(num_in_share(p), numbers);
    uint64_t share = 0;
    DISTMK_NO_UNROLL
    for (;;) {
      const uint32_t winner = race(numbers);
      if (p >= 1.0f || winner == best_token_) return static_cast<int32_t>(winner);
      const float logit = finite_logit(Block::load(row_.at(winner)));
      const Mass mass = weigh(logit, winner);
      if (!share) share = share_of(mass.all, p);
      if (mass.better < share) return static_cast<int32_t>(winner);
      last_logit_ = logit;
      end_token_ = winner;
    }
  }

  // Probability mass: sums of probabilities relative to the best token's, times MASS_SCALE.
  struct Mass {
    uint64_t all, better;  // of all kept tokens, and of those better than a given token
  };
  DISTMK_OUTLINED Mass weigh(float logit, uint32_t token) {
    Mass mass{0, 0};
    for_each_vector<Block>(row_, [&](uint32_t first, const float* x, uint32_t, uint64_t) {
      DISTMK_UNROLL
      for (uint32_t i = 0; i < LOGITS_PER_VECTOR; ++i) {
        const uint64_t mass_of_token = is_kept(first + i, x[i]) ? mass_of(z_of(x[i])) : 0;
        const bool is_better = x[i] > logit, is_equal = x[i] == logit, is_before = first + i < token;
        mass.all += mass_of_token;
        mass.better += is_better | (is_equal & is_before) ? mass_of_token : 0;
      }
    });
    const auto sum = [](uint64_t a, uint64_t b) { return a + b; };
    return {block_.reduce(mass.all, sum), block_.reduce(mass.better, sum)};
  }

 private:
  Block& block_;
  SelectorMemory& memory_;
  const RowLogits& row_;
  float best_ = 0.0f, scale_ = 1.0f, floor_ = -INFINITY;
  // The worst logit that is kept. Tokens with exactly this logit are kept if their id is below end_token_.
  float last_logit_ = -INFINITY;
  uint32_t end_token_ = 0;
  uint32_t best_token_ = 0;
  uint32_t num_listed_ = 0;  // 0: not listed

  DISTMK_FN float z_of(float x) const { return (x - best_) * scale_; }
  DISTMK_FN bool is_kept(uint32_t token, float x) const {  // without branches
    const bool is_better = x > last_logit_, is_equal = x == last_logit_, is_before = token < end_token_;
    return (z_of(x) >= floor_) & (is_better | (is_equal & is_before));
  }
  DISTMK_FN static uint64_t mass_of(float z) { return static_cast<uint64_t>(Block::exp(z) * MASS_SCALE + 0.5f); }
  DISTMK_FN static uint64_t share_of(uint64_t mass, float p) {
    const auto share = static_cast<uint64_t>(ceil(static_cast<double>(p) * static_cast<double>(mass)));
    return share < 1 ? 1 : share > mass ? mass : share;
  }
  DISTMK_FN static uint32_t bin_of(float z) {
    const float bin = -z * BINS_PER_NAT;
    return bin < NUM_BINS - 1 ? static_cast<uint32_t>(bin) : NUM_BINS - 1;
  }
  DISTMK_FN auto count_in_bin() const {
    return [this](uint32_t bin) { return static_cast<uint64_t>(memory_.counts[bin]); };
  }
  DISTMK_FN auto mass_of_listed() const {
    return [this](uint32_t index) { return mass_of(z_of(logit_of(memory_.list[index]))); };
  }

  // Calls f(key, z) for every token that is kept.
  template <class F>
  DISTMK_FN void for_each_kept(const F& f) const {
    for_each_vector<Block, 1>(row_, [&](uint32_t first, const float* x, uint32_t, uint64_t) {
      DISTMK_UNROLL
      for (uint32_t i = 0; i < LOGITS_PER_VECTOR; ++i)
        if (is_kept(first + i, x[i])) f(token_key(x[i], first + i), z_of(x[i]));
    });
  }

  // `bin_of_token(key, z)` returns NUM_BINS or more for tokens that do not count. Most tokens are in the last bin, so
  // each thread counts these for itself and adds them up once.
  template <class F>
  DISTMK_FN void fill_histogram(const F& bin_of_token) {
    block_.sync();
    for (uint32_t bin = block_.index(); bin < NUM_BINS; bin += block_.size()) memory_.counts[bin] = 0;
    block_.sync();
    uint32_t num_in_last = 0;
    for_each_kept([&](TokenKey key, float z) {
      const uint32_t bin = bin_of_token(key, z);
      num_in_last += bin == NUM_BINS - 1;
      if (bin < NUM_BINS - 1) Block::add(&memory_.counts[bin], 1);
    });
    Block::add(&memory_.counts[NUM_BINS - 1], num_in_last);
    block_.sync();
  }

  // A thread's consecutive part of `num` items.
  DISTMK_FN uint32_t part_begin(uint32_t num, uint32_t thread) const {
    return static_cast<uint32_t>(uint64_t{num} * thread / block_.size());
  }
  template <class AmountOf>
  DISTMK_FN uint64_t total(uint32_t num, const AmountOf& amount_of) const {
    uint64_t mine = 0;
    for (uint32_t i = block_.index(); i < num; i += block_.size()) mine += amount_of(i);
    return block_.reduce(mine, [](uint64_t a, uint64_t b) { return a + b; });
  }

  // The first of `num` items at which `before` plus the amounts so far reach the target: its index, the sum before it,
  // and its own amount.
  struct Place {
    uint32_t index;
    uint64_t before, inside;
  };
  template <class AmountOf>
  DISTMK_FN Place find(uint32_t num, const AmountOf& amount_of, uint64_t before, uint64_t target) {
    const uint32_t begin = part_begin(num, block_.index()), end = part_begin(num, block_.index() + 1);
    uint64_t mine = 0;
    for (uint32_t i = begin; i < end; ++i) mine += amount_of(i);
    before += block_.sum_before(mine);
    if (before < target && before + mine >= target) {
      for (uint32_t i = begin; i < end; ++i) {
        const uint64_t amount = amount_of(i);
        if (before < target && before + amount >= target) {
          memory_.found_index = i;
          memory_.found_before = before;
          memory_.found_inside = amount;
        }
        before += amount;
      }
    }
    block_.sync();
    const Place place{memory_.found_index, memory_.found_before, memory_.found_inside};
    block_.sync();
    return place;
  }

  // Narrows the range [low, high] of a bin's keys, which holds more than LIST_CAPACITY tokens. A histogram of this
  // range finds the part in which the target is reached.
  DISTMK_FN Place divide(uint32_t bin, uint64_t before, TokenKey* low, TokenKey* high, uint64_t target) {
    TokenKey first = *high, last = *low;
    for_each_kept([&](TokenKey key, float z) {
      if (bin_of(z) != bin || key < *low || key > *high) return;
      first = key < first ? key : first;
      last = key > last ? key : last;
    });
    first = block_.reduce(first, [](TokenKey a, TokenKey b) { return a < b ? a : b; });
    last = block_.reduce(last, [](TokenKey a, TokenKey b) { return a > b ? a : b; });
    uint32_t shift = 0;
    while ((last - first) >> shift >= NUM_BINS) ++shift;
    fill_histogram([&](TokenKey key, float z) {
      const bool counts = bin_of(z) == bin && key >= first && key <= last;
      return counts ? static_cast<uint32_t>((key - first) >> shift) : NUM_BINS;
    });
    const Place place = find(NUM_BINS, count_in_bin(), before, target);
    *low = first + (static_cast<TokenKey>(place.index) << shift);
    const TokenKey end = *low + ((TokenKey{1} << shift) - 1);
    *high = end < last ? end : last;
    return place;
  }

  // Lists and sorts the kept tokens for which `wanted(key, z)` holds; their logits must be at least `least`. Returns
  // their number. If it exceeds LIST_CAPACITY, only some are listed.
  template <class F>
  DISTMK_FN uint32_t gather(float least, const F& wanted) {
    block_.sync();
    if (block_.index() == 0) memory_.list_size = 0;
    block_.sync();
    for_each_vector<Block>(row_, [&](uint32_t first, const float* x, uint32_t, uint64_t) {
      if (highest_of(x) < least) return;
      DISTMK_UNROLL
      for (uint32_t i = 0; i < LOGITS_PER_VECTOR; ++i) {
        const TokenKey key = token_key(x[i], first + i);
        if (!is_kept(first + i, x[i]) || !wanted(key, z_of(x[i]))) continue;
        const uint32_t at = Block::add(&memory_.list_size, 1);
        if (at < LIST_CAPACITY) memory_.list[at] = key;
      }
    });
    block_.sync();
    const uint32_t num = memory_.list_size;
    block_.sort(memory_.list, num < LIST_CAPACITY ? num : LIST_CAPACITY);
    return num;
  }

  // Lists the best `count` tokens. Returns false if too many tokens may be among them.
  DISTMK_OUTLINED bool list_by_threads(uint32_t count) {
    block_.sync();
    for (uint32_t i = block_.index(); i < Block::size(); i += block_.size()) memory_.list[i] = memory_.best[i];
    block_.sort(memory_.list, Block::size());
    const TokenKey last = memory_.list[count - 1];
    const uint32_t num = gather(logit_of(last), [&](TokenKey key, float) { return key <= last; });
    if (num > LIST_CAPACITY) return false;
    num_listed_ = num < count ? num : count;
    return true;
  }
  // Drops all but the best `count` tokens. Returns how many are left.
  DISTMK_OUTLINED uint64_t find_last(uint32_t count) {
    fill_histogram([&](TokenKey, float z) { return bin_of(z); });
    const uint64_t num_all = total(NUM_BINS, count_in_bin());
    if (num_all <= count) return num_all;
    Place place = find(NUM_BINS, count_in_bin(), 0, count);
    const uint32_t bin = place.index;
    TokenKey low = 0, high = ~TokenKey{0};  // of the bin's tokens that are still in question
    while (place.inside > LIST_CAPACITY) place = divide(bin, place.before, &low, &high, count);
    gather(-INFINITY, [&](TokenKey key, float z) { return bin_of(z) == bin && key >= low && key <= high; });
    const TokenKey last = memory_.list[count - 1 - place.before];
    last_logit_ = logit_of(last);
    end_token_ = token_of(last) + 1;
    return count;
  }

  // How many of the listed tokens, the best first, hold a share `p` of the probability of all listed tokens.
  DISTMK_FN uint32_t num_in_share(float p) {
    if (p >= 1.0f) return num_listed_;
    return find(num_listed_, mass_of_listed(), 0, share_of(total(num_listed_, mass_of_listed()), p)).index + 1;
  }
  DISTMK_FN static Candidate winner_of(const Candidate& a, const Candidate& b) { return better_of(a, b); }
  DISTMK_FN int32_t race_of_listed(uint32_t count, const TokenNumbers& numbers) {
    Candidate winner = {-INFINITY, -1};
    DISTMK_NO_UNROLL
    for (uint32_t i = block_.index(); i < count; i += block_.size()) {
      const uint32_t token = token_of(memory_.list[i]);
      const float score = z_of(logit_of(memory_.list[i])) + gumbel(numbers.of(token));
      winner = better_of(winner, {score, static_cast<int32_t>(token)});
    }
    return block_.reduce(winner, winner_of).token;
  }
  // The winner among all kept tokens. The best tokens of the threads race first. Few others can beat their winner, so
  // most vectors are skipped, and those far behind need no random number.
  DISTMK_OUTLINED uint32_t race(const TokenNumbers& numbers) {
    Candidate winner = {-INFINITY, -1};
    const auto enter = [&](uint32_t token, float x, uint32_t number) {
      if (is_kept(token, x)) winner = better_of(winner, {z_of(x) + gumbel(number), static_cast<int32_t>(token)});
    };
    const TokenKey mine = memory_.best[block_.index()];
    enter(token_of(mine), logit_of(mine), numbers.of(token_of(mine)));
    winner = block_.reduce(winner, winner_of);
    for_each_vector<Block, Block::RACERS_IN_FLIGHT>(row_, [&](uint32_t first, const float* x, uint32_t, uint64_t) {
      const float highest = highest_of(x), z = z_of(highest);
      if (highest < last_logit_ || z + MAX_GUMBEL < winner.value) return;
      uint32_t number[LOGITS_PER_VECTOR];
      numbers.of(first, number);
      if (z - Block::log(uniform(TokenNumbers::least_of(number))) + LOG_ERROR < winner.value) return;
      DISTMK_NO_UNROLL
      for (uint32_t i = 0; i < LOGITS_PER_VECTOR; ++i)
        enter(first + i, TokenNumbers::item(x, i), TokenNumbers::item(number, i));
    });
    return static_cast<uint32_t>(block_.reduce(winner, winner_of).token);
  }
};

}  // namespace distmk
