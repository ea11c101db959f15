// The pages of the KV cache, on rank 0: which are free, and how many sequences use the others.
#pragma once
#include "runtime/context.h"

namespace distmk {

// A free page keeps its content until it is taken. Pages that were never used are taken first, then the least recently
// used page. So a launch has nothing to initialise.
class PagePool {
 public:
  // `pool` is followed by the pages in memory.
  DISTMK_FN PagePool(BatcherState& state, PagePoolState* pool, uint32_t num_pages)
      : state_(state), pool_(*pool), pages_(reinterpret_cast<KvPage*>(pool + 1)), num_pages_(num_pages) {}

  // Frees all pages and forgets their contents.
  DISTMK_FN void reset() {
    state_.num_free_pages = num_pages_;
    pool_.num_touched = 0;
    pool_.first_free = pool_.last_free = -1;
  }

  // Takes a page for new content. A page must be free.
  DISTMK_FN PageRef take() {
    --state_.num_free_pages;
    if (pool_.num_touched < num_pages_) {
      const auto page = static_cast<int32_t>(pool_.num_touched++);
      pages_[page] = {-1, -1, 1, 1};
      return {page, 1};
    }
    const int32_t page = pool_.first_free;
    const uint32_t generation = pages_[page].generation + 1;
    unlink(pages_[page]);
    pages_[page] = {-1, -1, 1, generation};
    return {page, generation};
  }

  // take() for every thread of the team that `wants` a page, in the order of the threads. All threads call it. As many
  // pages must be free.
  DISTMK_FN PageRef take_each(const Team& team, bool wants) {
    const uint32_t votes = team.votes(wants), num = count_bits(votes), place = place_among(votes, team);
    team.sync();  // votes order no memory: the leader may just have changed the pool
    const uint32_t first = pool_.num_touched, num_new = min(num, num_pages_ - first);
    PageRef mine{static_cast<int32_t>(first + place), 1};
    if (wants && place < num_new) pages_[mine.page] = {-1, -1, 1, 1};
    team.sync();  // all have read the pool's state
    if (team.leader()) {
      pool_.num_touched += num_new;
      state_.num_free_pages -= num_new;
    }
    DISTMK_NO_UNROLL
    for (uint32_t i = num_new; i < num; ++i) {  // the list of free pages leads from one to the next
      PageRef taken{};
      if (team.leader()) taken = take();
      const auto page = static_cast<int32_t>(team.from_leader(static_cast<uint32_t>(taken.page)));
      const uint32_t generation = team.from_leader(taken.generation);
      if (wants && place == i) mine = {page, generation};
    }
    return mine;
  }

  // Whether the page still has the content that a PageRef names, and whether a sequence uses it.
  struct Content {
    bool is_kept, is_used;
  };
  DISTMK_FN Content find(const PageRef& ref) const {
    if (ref.page < 0 || static_cast<uint32_t>(ref.page) >= pool_.num_touched) return {false, false};
    const KvPage page = pages_[ref.page];
    return {page.generation == ref.generation, page.num_users > 0};
  }

  // Counts another user of a page that has kept its content.
  DISTMK_FN void share(int32_t page) {
    KvPage& shared = pages_[page];
    if (shared.num_users++) return;
    unlink(shared);
    --state_.num_free_pages;
  }

  DISTMK_FN void release(int32_t page) {
    KvPage& released = pages_[page];
    if (--released.num_users) return;
    released.next = -1;
    released.previous = pool_.last_free;
    (pool_.last_free < 0 ? pool_.first_free : pages_[pool_.last_free].next) = page;
    pool_.last_free = page;
    ++state_.num_free_pages;
  }
  // release() of a page that no other sequence uses and that holds nothing: it is the first used page to be taken
  // again.
  DISTMK_FN void release_empty(int32_t page) {
    KvPage& released = pages_[page];
    released.num_users = 0;
    released.previous = -1;
    released.next = pool_.first_free;
    (pool_.first_free < 0 ? pool_.last_free : pages_[pool_.first_free].previous) = page;
    pool_.first_free = page;
    ++state_.num_free_pages;
  }

 private:
  BatcherState& state_;
  PagePoolState& pool_;
  KvPage* pages_;
  uint32_t num_pages_;

  DISTMK_FN void unlink(const KvPage& page) {
    (page.previous < 0 ? pool_.first_free : pages_[page.previous].next) = page.next;
    (page.next < 0 ? pool_.last_free : pages_[page.next].previous) = page.previous;
  }
};

}  // namespace distmk
