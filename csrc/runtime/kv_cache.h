// Layout of the paged KV caches: [page, KV head, position in page] rows of head_dim elements; and which query heads
// read a KV head. `Args`: arguments of a task that appends to the caches or reads them.
#pragma once
#include "platform/platform.h"

namespace distmk {

// The page of a position. row_of_page() leads from there to the position's row in the caches.
template <class Args>
DISTMK_FN uint32_t page_of(const int32_t* page_table, const Args& args, uint32_t slot, uint32_t position) {
  const uint32_t in_table = position >> floor_log2(args.page_size);
  return static_cast<uint32_t>(load_changing(page_table + uint64_t{slot} * args.max_pages + in_table));
}
template <class Args>
DISTMK_FN uint32_t row_of_page(const Args& args, uint32_t page, uint32_t kv_head, uint32_t position) {
  return ((page * args.num_kv + kv_head) << floor_log2(args.page_size)) + (position & (args.page_size - 1));
}
template <class Args>
DISTMK_FN uint32_t cache_row(const int32_t* page_table, const Args& args, uint32_t slot, uint32_t kv_head,
                             uint32_t position) {
  return row_of_page(args, page_of(page_table, args, slot, position), kv_head, position);
}

// XOR swizzle of a GPU's caches, in elements: the 16-byte chunks of a position are permuted by its number in the page.
// A warp reads a KV tile in shared memory in phases of two positions of K or four of V; swizzled, no phase has a bank
// conflict. Pages of fewer than eight positions, and heads that are no multiple of 64, are not swizzled.
DISTMK_FN bool swizzles_cache(uint32_t head_dim, uint32_t page_size) { return !(head_dim % 64 || page_size % 8); }
DISTMK_FN uint32_t cache_swizzle(uint32_t position) { return 8 * (position % 8 ^ position % 2 * 4); }

// Query heads of this rank that share a KV head. At a rank's first and last KV head these may be fewer than a group or,
// if MAYBE_NONE, none.
template <bool MAYBE_NONE = true>
struct QueryHeads {
  uint32_t first, num;

  template <class Args>
  DISTMK_FN QueryHeads(const Args& args, uint32_t kv_head) {
    const uint32_t begin = (args.kv_begin + kv_head) * args.group;
    const uint32_t own_begin = max(begin, args.q_begin), end = min(begin + args.group, args.q_begin + args.num_q);
    first = own_begin - args.q_begin;
    num = !MAYBE_NONE || end > own_begin ? end - own_begin : 0;
  }
};

}  // namespace distmk
