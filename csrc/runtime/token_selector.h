// Selects the best tokens of a row without sorting it: those up to a number (top-k) or up to a share of the probability
// (top-p), exactly. Tokens are ordered by logit, equal ones by id; what is kept is always a prefix of that order.
//
// A histogram by distance from the best logit finds the bin of the last token that is kept. If few tokens are in it,
// they are listed and sorted; else it is divided again (radix select). Probabilities are added up as integers, so the
// result depends on no order of additions.
#pragma once
#include <math.h>

#include "runtime/row_logits.h"

namespace distmk {

constexpr uint32_t NUM_BINS = 1024, LIST_CAPACITY = 1024;
constexpr float BINS_PER_NAT = 32.0f;
constexpr float MASS_SCALE = 0x1p40f;  // of a probability relative to the best token's

// 64 bits that are smaller for better tokens: the bits of the logit in descending order, then the id.
using TokenKey = uint64_t;
DISTMK_FN TokenKey token_key(float x, uint32_t token) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | token;
}
DISTMK_FN uint32_t token_of(TokenKey key) { return static_cast<uint32_t>(key); }
DISTMK_FN float logit_of(TokenKey key) {
  const auto ascending = ~static_cast<uint32_t>(key >> 32);
  const uint32_t bits = ascending >> 31 ? ascending & 0x7fffffffu : ~ascending;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// A number of tokens and their probability relative to the best one's, times MASS_SCALE.
struct Amount {
  uint64_t count, mass;
};

// Shared by the threads of a block.
struct SelectorMemory {
  uint32_t counts[NUM_BINS];
  uint32_t mass_low[NUM_BINS], mass_high[NUM_BINS];
  TokenKey list[LIST_CAPACITY];
  uint32_t list_size;
  uint32_t found_bin;
  Amount found_before, found_inside;
};

template <class Block>
class TokenSelector {
 public:
  // Tokens with z < `floor` are dropped; z: distance from the best logit over the temperature (not positive).
  DISTMK_FN TokenSelector(Block& block, const RowLogits& row, float best, float inverse_temperature, float floor)
      : block_(block), memory_(block.memory()), row_(row), best_(best), scale_(inverse_temperature), floor_(floor) {}

  DISTMK_FN float z_of(float x) const { return (x - best_) * scale_; }
  DISTMK_FN bool is_kept(uint32_t token, float x) const {
    return x > -INFINITY && z_of(x) >= floor_ && token_key(x, token) <= last_;
  }
  // Counts all tokens; kept() is then about all of them.
  DISTMK_OUTLINED void count_all() {
    fill_histogram([&](TokenKey, float z) { return bin_of(z); });
    kept_ = histogram_total();
    is_fresh_ = true;
  }
  DISTMK_FN Amount kept() const { return kept_; }

  // Keeps the best `count` tokens, of more. After count_all().
  DISTMK_FN void keep_count(uint64_t count) { keep(true, count); }
  // Keeps the best tokens that have a share `p` of the probability of those that are kept.
  DISTMK_FN void keep_share(float p) {
    const auto share = static_cast<uint64_t>(ceil(static_cast<double>(p) * static_cast<double>(kept_.mass)));
    keep(false, share < 1 ? 1 : share > kept_.mass ? kept_.mass : share);
  }

  // Whether the tokens that are kept are listed, the best first.
  DISTMK_FN bool is_listed() const { return is_listed_; }
  DISTMK_FN TokenKey listed(uint32_t index) const { return memory_.list[index]; }
  // Lists them, if there are at most LIST_CAPACITY.
  DISTMK_OUTLINED void list_kept() {
    if (is_listed_) return;
    gather([&](TokenKey, float) { return true; });
    is_listed_ = true;
  }

 private:
  Block& block_;
  SelectorMemory& memory_;
  const RowLogits& row_;
  const float best_, scale_, floor_;
  TokenKey last_ = ~TokenKey{0};  // the last token that is kept
  Amount kept_{0, 0};
  bool is_fresh_ = false;  // the histogram is that of count_all()
  bool is_listed_ = false;

  DISTMK_FN static uint64_t mass_of(float z) { return static_cast<uint64_t>(expf(z) * MASS_SCALE + 0.5f); }
  DISTMK_FN static uint32_t bin_of(float z) {
    const float bin = -z * BINS_PER_NAT;
    return bin < NUM_BINS - 1 ? static_cast<uint32_t>(bin) : NUM_BINS - 1;
  }

  // Calls f(key, z) for every token that is kept.
  template <class F>
  DISTMK_FN void for_each_kept(const F& f) const {
    for_each_token(block_, row_, [&](uint32_t token, float x) {
      if (is_kept(token, x)) f(token_key(x, token), z_of(x));
    });
  }

  // `bin_of_token(key, z)`: NUM_BINS or more for tokens that do not count.
  template <class F>
  DISTMK_FN void fill_histogram(const F& bin_of_token) {
    block_.sync();
    for (uint32_t bin = block_.index(); bin < NUM_BINS; bin += block_.size())
      memory_.counts[bin] = memory_.mass_low[bin] = memory_.mass_high[bin] = 0;
    block_.sync();
    for_each_kept([&](TokenKey key, float z) {
      const uint32_t bin = bin_of_token(key, z);
      if (bin >= NUM_BINS) return;
      const uint64_t mass = mass_of(z);
      Block::add(&memory_.counts[bin], 1);
      const auto low = static_cast<uint32_t>(mass);
      const uint32_t carry = Block::add(&memory_.mass_low[bin], low) > ~low;
      if (const auto high = static_cast<uint32_t>(mass >> 32) + carry) Block::add(&memory_.mass_high[bin], high);
    });
    block_.sync();
  }
  DISTMK_FN Amount amount_in(uint32_t bin) const {
    return {memory_.counts[bin], static_cast<uint64_t>(memory_.mass_high[bin]) << 32 | memory_.mass_low[bin]};
  }
  // A thread's consecutive part of `num` items.
  DISTMK_FN uint32_t part_begin(uint32_t num, uint32_t thread) const {
    return static_cast<uint32_t>(uint64_t{num} * thread / block_.size());
  }
  DISTMK_FN Amount histogram_total() {
    Amount mine{0, 0};
    for (uint32_t bin = block_.index(); bin < NUM_BINS; bin += block_.size()) {
      const Amount amount = amount_in(bin);
      mine = {mine.count + amount.count, mine.mass + amount.mass};
    }
    const auto add = [](uint64_t a, uint64_t b) { return a + b; };
    return {block_.reduce(mine.count, add), block_.reduce(mine.mass, add)};
  }

  // The first of `num` items at which `before` and the amounts of the items up to it reach the target.
  struct Place {
    uint32_t index;
    Amount before, inside;
  };
  template <class AmountOf>
  DISTMK_FN Place find(uint32_t num, const AmountOf& amount_of, Amount before, bool by_count, uint64_t target) {
    const uint32_t begin = part_begin(num, block_.index()), end = part_begin(num, block_.index() + 1);
    Amount mine{0, 0};
    for (uint32_t i = begin; i < end; ++i) {
      const Amount amount = amount_of(i);
      mine = {mine.count + amount.count, mine.mass + amount.mass};
    }
    before = {before.count + block_.sum_before(mine.count), before.mass + block_.sum_before(mine.mass)};
    for (uint32_t i = begin; i < end; ++i) {
      const Amount amount = amount_of(i);
      const Amount through = {before.count + amount.count, before.mass + amount.mass};
      const bool reached = by_count ? through.count >= target : through.mass >= target;
      if (reached && (by_count ? before.count : before.mass) < target) {
        memory_.found_bin = i;
        memory_.found_before = before;
        memory_.found_inside = amount;
      }
      before = through;
    }
    block_.sync();
    const Place place{memory_.found_bin, memory_.found_before, memory_.found_inside};
    block_.sync();
    return place;
  }

  DISTMK_OUTLINED void keep(bool by_count, uint64_t target) {
    uint32_t num = static_cast<uint32_t>(kept_.count);
    Amount before{0, 0};
    if (!is_listed_) {
      if (!is_fresh_) fill_histogram([&](TokenKey, float z) { return bin_of(z); });
      is_fresh_ = true;
      Place place = find(NUM_BINS, [&](uint32_t bin) { return amount_in(bin); }, before, by_count, target);
      const uint32_t bin = place.index;
      TokenKey low = 0, high = ~TokenKey{0};  // of the tokens of the bin that are still in question
      is_listed_ = place.before.count + place.inside.count <= LIST_CAPACITY;
      while (!is_listed_ && place.inside.count > LIST_CAPACITY)
        place = divide(bin, place, &low, &high, by_count, target);
      const bool all = is_listed_;
      gather([&](TokenKey key, float z) {
        return all ? bin_of(z) <= bin : bin_of(z) == bin && key >= low && key <= high;
      });
      if (!all) before = place.before;
      num = memory_.list_size;
    }
    const auto amount = [&](uint32_t i) { return Amount{1, mass_of(z_of(logit_of(memory_.list[i])))}; };
    const Place place = find(num, amount, before, by_count, target);
    last_ = memory_.list[place.index];
    kept_ = {place.before.count + 1, place.before.mass + place.inside.mass};
  }

  // Divides the keys of a bin from `low` to `high`, which hold more than LIST_CAPACITY tokens, by a histogram of their
  // own; they become those of its bin that reaches the target.
  DISTMK_FN Place divide(uint32_t bin, const Place& whole, TokenKey* low, TokenKey* high, bool by_count,
                         uint64_t target) {
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
    is_fresh_ = false;
    fill_histogram([&](TokenKey key, float z) {
      const bool counts = bin_of(z) == bin && key >= first && key <= last;
      return counts ? static_cast<uint32_t>((key - first) >> shift) : NUM_BINS;
    });
    const auto amount = [&](uint32_t i) { return amount_in(i); };
    const Place place = find(NUM_BINS, amount, whole.before, by_count, target);
    *low = first + (static_cast<TokenKey>(place.index) << shift);
    const TokenKey end = *low + ((TokenKey{1} << shift) - 1);
    *high = end < last ? end : last;
    return place;
  }

  // Lists and sorts the kept tokens for which `wanted(key, z)`.
  template <class F>
  DISTMK_FN void gather(const F& wanted) {
    block_.sync();
    if (block_.index() == 0) memory_.list_size = 0;
    block_.sync();
    for_each_kept([&](TokenKey key, float z) {
      if (!wanted(key, z)) return;
      const uint32_t at = Block::add(&memory_.list_size, 1);
      if (at < LIST_CAPACITY) memory_.list[at] = key;
    });
    block_.sync();
    block_.sort(memory_.list, memory_.list_size);
  }
};

}  // namespace distmk
