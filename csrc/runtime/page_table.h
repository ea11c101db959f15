// The pages of the running sequences: the page table, and the record of pages that the host reads for its prefix cache.
#pragma once
#include "runtime/page_pool.h"
#include "runtime/sequences.h"

namespace distmk {

class PageTable {
 public:
  DISTMK_FN PageTable(const Context& context, const SchedulerStepArgs& args, BatcherState& state,
                      const Sequences& sequences)
      : params_(context.params()),
        args_(args),
        state_(state),
        sequences_(sequences),
        entries_(context.at<int32_t>(args.page_table)),
        page_shift_(floor_log2(args.page_size)),
        pool_state_(page_pool(context, args)),
        pool_(state, pool_state_, args.num_pages) {}

  DISTMK_FN void reset() {
    state_.pages_changed = 0;
    pool_state_->awaited_pages = 0;
    if (!params_.keeps_cache) pool_.reset();
  }

  // Called before a step, when the last step's changes are on all ranks.
  DISTMK_FN void changes_were_put() {
    if (!state_.pages_changed) return;
    state_.pages_changed = 0;
    if (args_.num_ranks == 1) return;
    DISTMK_NO_UNROLL
    for (uint32_t slot = 0; slot < sequences_.end(); ++slot) {
      Sequence& sequence = sequences_[slot];
      sequence.num_put_pages = pages_of(sequence.position);
    }
  }
  // changes_were_put() for all threads of the team.
  DISTMK_FN void changes_were_put(const Team& team) {
    const bool changed = state_.pages_changed;
    if (changed && args_.num_ranks > 1)
      for (uint32_t slot = team.index; slot < sequences_.end(); slot += team.size)
        sequences_[slot].num_put_pages = pages_of(sequences_[slot].position);
    team.sync();
    if (team.leader()) state_.pages_changed = 0;
  }

  DISTMK_FN uint32_t num_free() const { return state_.num_free_pages; }
  DISTMK_FN uint32_t pages_of(uint32_t num_positions) const {
    return (num_positions + args_.page_size - 1) >> page_shift_;
  }
  // Whether the sequence's next position starts a page that it does not have yet.
  DISTMK_FN bool needs_page(const Sequence& sequence) const { return !(sequence.position & (args_.page_size - 1)); }

  // Gives a sequence the page of its next position, if that position starts a page. A page must be free.
  DISTMK_FN void grow(uint32_t slot, const Sequence& sequence) {
    if (needs_page(sequence)) append(slot, sequence, pool_.take());
  }

  // grow() for the sequence in the slot of every thread of the team that has a row for it, in the order of the threads.
  // All threads call it.
  DISTMK_FN void grow_each(const Team& team, bool has_row, uint32_t slot) {
    const bool takes = has_row && needs_page(sequences_[slot]);
    if (!team.votes(takes)) return;
    const PageRef ref = pool_.take_each(team, takes);
    if (takes) append<false>(slot, sequences_[slot], ref);
    if (team.leader()) state_.pages_changed = 1;
  }

  // Frees the pages of a sequence, the last one first. Free pages are reused in that order, so the beginning of a
  // prompt, which other prompts most likely share, stays cached longest.
  DISTMK_FN void release(uint32_t slot) {
    DISTMK_NO_UNROLL
    for (uint32_t page = pages_of(sequences_[slot].position); page-- > 0;) pool_.release(entry(slot, page));
  }

  // Takes the positions from `num_positions` on from a sequence, and their pages. None of them was confirmed.
  DISTMK_FN void shrink(uint32_t slot, uint32_t num_positions) {
    Sequence& sequence = sequences_[slot];
    const uint32_t num_pages = pages_of(num_positions);
    DISTMK_NO_UNROLL
    for (uint32_t page = pages_of(sequence.position); page-- > num_pages;) pool_.release_empty(entry(slot, page));
    if (sequence.num_put_pages > num_pages) sequence.num_put_pages = num_pages;
    sequence.position = num_positions;
  }

  // Begins a request in a free slot, with the pages of its prefix that are still cached. `num_claimed` counts the free
  // pages that running sequences take in any case. Returns false if too few other pages are free for the whole prompt
  // and the first token: the request would be the first to be preempted. If nothing else runs, there are always enough.
  DISTMK_FN bool begin(uint32_t slot, const RequestEntry& request, uint32_t num_claimed) {
    const bool has_waited = pool_state_->awaited_pages && pool_state_->awaited_command == state_.num_admitted;
    if (state_.num_running && has_waited && pool_state_->awaited_pages + num_claimed > num_free()) return false;
    const Prefix prefix = find_prefix(request);
    const uint32_t num_pages = pages_of(request.prompt_len) - prefix.num_pages + prefix.num_free + 1;
    if (state_.num_running && num_pages + num_claimed > num_free()) {
      pool_state_->awaited_pages = num_pages;
      pool_state_->awaited_command = state_.num_admitted;
      return false;
    }
    pool_state_->awaited_pages = 0;
    share_prefix(slot, request, prefix.num_pages);
    return true;
  }

 private:
  const LaunchParams& params_;
  const SchedulerStepArgs& args_;
  BatcherState& state_;
  const Sequences sequences_;
  int32_t* entries_;
  uint32_t page_shift_;  // page sizes are powers of two: a shift, as division is slow
  PagePoolState* pool_state_;
  PagePool pool_;

  // The leading pages of a request's prefix that are still cached, and how many of them are free.
  struct Prefix {
    uint32_t num_pages, num_free;
  };

  DISTMK_FN int32_t& entry(uint32_t slot, uint32_t page) const { return entries_[slot * args_.max_pages + page]; }

  DISTMK_FN Prefix find_prefix(const RequestEntry& request) const {
    const auto* offered = reinterpret_cast<const PageRef*>(request.prefix);
    const uint32_t most = (request.prompt_len - 1) >> page_shift_;  // the last token is always computed
    const uint32_t num_offered = request.num_prefix_pages < most ? request.num_prefix_pages : most;
    Prefix prefix{0, 0};
    DISTMK_NO_UNROLL
    for (; prefix.num_pages < num_offered; ++prefix.num_pages) {
      const PagePool::Content content = pool_.find(offered[prefix.num_pages]);
      if (!content.is_kept) break;
      prefix.num_free += !content.is_used;
    }
    return prefix;
  }

  // Starts the sequence with the first `num_pages` pages that its request offers.
  DISTMK_FN void share_prefix(uint32_t slot, const RequestEntry& request, uint32_t num_pages) {
    const auto* offered = reinterpret_cast<const PageRef*>(request.prefix);
    Sequence& sequence = sequences_[slot];
    DISTMK_NO_UNROLL
    for (uint32_t page = 0; page < num_pages; ++page) {
      pool_.share(offered[page].page);
      append(slot, sequence, offered[page]);
      sequence.position += args_.page_size;
    }
    if (request.pages)
      *reinterpret_cast<PageRef*>(request.pages) = {static_cast<int32_t>(num_pages * args_.page_size), 0};
  }

  // Records `ref` as the page of the sequence's next position. Without `NOTES_CHANGE` the caller sets `pages_changed`.
  template <bool NOTES_CHANGE = true>
  DISTMK_FN void append(uint32_t slot, const Sequence& sequence, const PageRef& ref) {
    const uint32_t page = sequence.position >> page_shift_;
    entry(slot, page) = ref.page;
    if constexpr (NOTES_CHANGE) state_.pages_changed = 1;
    const RequestEntry& request = reinterpret_cast<const RequestEntry*>(params_.requests)[sequence.request];
    if (request.pages) reinterpret_cast<PageRef*>(request.pages)[1 + page] = ref;
  }
};

// Puts the new entries of the page table to all other ranks.
DISTMK_FN void put_page_table(const Context& context, const SchedulerStepArgs& args, const Sequences& sequences) {
  if (args.num_ranks == 1) return;
  const uint32_t page_shift = floor_log2(args.page_size);
  DISTMK_NO_UNROLL
  for (uint32_t slot = 0; slot < sequences.end(); ++slot) {
    const Sequence& sequence = sequences[slot];
    const uint32_t first = sequence.num_put_pages;
    const uint32_t num_pages = (sequence.position + args.page_size - 1) >> page_shift;
    if (sequence.request < 0 || first == num_pages) continue;
    const uint64_t entries = args.page_table + (uint64_t{slot} * args.max_pages + first) * sizeof(int32_t);
    DISTMK_NO_UNROLL
    for (uint32_t rank = 0; rank < args.num_ranks; ++rank)
      if (rank != context.rank())
        context.put(rank, entries, context.at<void>(entries), (num_pages - first) * sizeof(int32_t));
  }
}

// put_page_table() of a job program, whose ranks mostly reach each other by pointers: each thread stores the entries of
// some slots.
DISTMK_FN void store_page_table(const Context& context, const SchedulerStepArgs& args, const Sequences& sequences) {
  if (context.rank_state.transport) return put_page_table(context, args, sequences);
  if (args.num_ranks == 1) return;
  const uint32_t page_shift = floor_log2(args.page_size);
  const auto* own = context.at<const int32_t>(args.page_table);
  DISTMK_NO_UNROLL
  for (uint32_t slot = context.team.index; slot < sequences.end(); slot += context.team.size) {
    const Sequence& sequence = sequences[slot];
    if (sequence.request < 0) continue;
    const uint32_t num_pages = (sequence.position + args.page_size - 1) >> page_shift;
    DISTMK_NO_UNROLL
    for (uint32_t page = sequence.num_put_pages; page < num_pages; ++page) {
      const uint32_t entry = slot * args.max_pages + page;
      const int32_t value = load_changing(own + entry);
      DISTMK_NO_UNROLL
      for (uint32_t rank = 0; rank < args.num_ranks; ++rank)
        if (rank != context.rank()) context.peer<int32_t>(rank, args.page_table)[entry] = value;
    }
  }
}

}  // namespace distmk
