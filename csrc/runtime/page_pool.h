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
