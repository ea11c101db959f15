// The pages of the running sequences: the page table, and what the host is told of it for its prefix cache.
#pragma once
#include "runtime/page_pool.h"

namespace distmk {

class PageTable {
 public:
  DISTMK_FN PageTable(const Context& context, const SchedulerStepArgs& args, BatcherState& state)
      : params_(context.params()),
        args_(args),
        state_(state),
        entries_(context.at<int32_t>(args.page_table)),
        pool_(state, reinterpret_cast<KvPage*>(context.at<BatcherState>(args.state) + 1), args.num_pages) {}

  DISTMK_FN void reset() {
    state_.pages_changed = 0;
    if (!params_.keeps_cache) pool_.reset();
  }

  // Before a step: what the last one has changed is on all ranks.
  DISTMK_FN void changes_were_put() {
    if (!state_.pages_changed) return;
    state_.pages_changed = 0;
    DISTMK_NO_UNROLL
    for (uint32_t slot = 0; slot < args_.max_slots; ++slot)
      state_.slots[slot].num_put_pages = state_.slots[slot].num_pages;
  }

  DISTMK_FN uint32_t num_free() const { return state_.num_free_pages; }
  DISTMK_FN uint32_t pages_of(uint32_t num_positions) const {
    return (num_positions + args_.page_size - 1) / args_.page_size;
  }
  // Whether the sequence's next position is the first of a page, which it does not have yet.
  DISTMK_FN bool needs_page(const Sequence& sequence) const { return !(sequence.position & (args_.page_size - 1)); }

  // Gives a sequence a page behind those that it has. There must be a free one.
  DISTMK_FN void grow(uint32_t slot) { append(slot, pool_.take()); }

  // Frees the pages of a sequence, the last one first: of a prefix that others may share, the beginning is kept
  // longest.
  DISTMK_FN void release(uint32_t slot) {
    DISTMK_NO_UNROLL
    for (uint32_t page = state_.slots[slot].num_pages; page-- > 0;) pool_.release(entry(slot, page));
  }

  // The pages of a request's prefix that are still cached: how many of the first ones, and how many of these are free.
  struct Prefix {
    uint32_t num_pages, num_free;
  };
  DISTMK_FN Prefix find_prefix(uint32_t request, uint32_t num_offered) const {
    Prefix prefix{0, 0};
    DISTMK_NO_UNROLL
    for (; prefix.num_pages < num_offered; ++prefix.num_pages) {
      const PagePool::Content content = pool_.find(offered(request, prefix.num_pages));
      if (!content.is_kept) break;
      prefix.num_free += !content.is_used;
    }
    return prefix;
  }
  // Begins a sequence with the first pages of the prefix that its request offers.
  DISTMK_FN void share_prefix(uint32_t slot, uint32_t num_pages) {
    const auto request = static_cast<uint32_t>(state_.slots[slot].request);
    DISTMK_NO_UNROLL
    for (uint32_t page = 0; page < num_pages; ++page) {
      const PageRef ref = offered(request, page);
      pool_.share(ref.page);
      append(slot, ref);
    }
    if (params_.pages) reinterpret_cast<uint32_t*>(params_.num_cached)[request] = num_pages * args_.page_size;
  }

 private:
  const LaunchParams& params_;
  const SchedulerStepArgs& args_;
  BatcherState& state_;
  int32_t* entries_;
  PagePool pool_;

  DISTMK_FN int32_t& entry(uint32_t slot, uint32_t page) const { return entries_[slot * args_.max_pages + page]; }
  DISTMK_FN const PageRef& offered(uint32_t request, uint32_t page) const {
    return reinterpret_cast<const PageRef*>(params_.prefixes)[uint64_t{request} * params_.page_stride + page];
  }
  DISTMK_FN void append(uint32_t slot, const PageRef& ref) {
    Sequence& sequence = state_.slots[slot];
    const uint32_t page = sequence.num_pages++;
    entry(slot, page) = ref.page;
    state_.pages_changed = 1;
    if (!params_.pages) return;
    const uint64_t row = uint64_t{params_.page_stride} * static_cast<uint32_t>(sequence.request);
    reinterpret_cast<PageRef*>(params_.pages)[row + page] = ref;
  }
};

// Puts the new entries of the page table to all other ranks.
DISTMK_FN void put_page_table(const Context& context, const SchedulerStepArgs& args, const BatcherState& state) {
  DISTMK_NO_UNROLL
  for (uint32_t slot = 0; slot < args.max_slots; ++slot) {
    const Sequence& sequence = state.slots[slot];
    const uint32_t first = sequence.num_put_pages;
    if (sequence.request < 0 || first == sequence.num_pages) continue;
    const uint64_t entries = args.page_table + (uint64_t{slot} * args.max_pages + first) * sizeof(int32_t);
    DISTMK_NO_UNROLL
    for (uint32_t rank = 0; rank < args.num_ranks; ++rank)
      if (rank != context.rank())
        context.put(rank, entries, context.at<void>(entries), (sequence.num_pages - first) * sizeof(int32_t));
  }
}

}  // namespace distmk
