// Where keys and values are in the paged caches, which are [page, KV head, position in page] rows of head_dim elements,
// and which query heads read them. `Args`: of a task that appends or reads them.
#pragma once
#include "platform/platform.h"

namespace distmk {

// Row of a position in the caches: the page, and what follows from it.
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
// A warp that reads a KV tile in shared memory, K of two positions or V of four in a phase, then meets no bank twice.
// Pages of fewer than eight positions, and heads that are no multiple of 64, are not swizzled.
DISTMK_FN bool swizzles_cache(uint32_t head_dim, uint32_t page_size) { return !(head_dim % 64 || page_size % 8); }
DISTMK_FN uint32_t cache_swizzle(uint32_t position) { return 8 * (position % 8 ^ position % 2 * 4); }

// Query heads of this rank that share a KV head: a rank's first and last KV head may have fewer than a group, or, if
// MAYBE_NONE, none.
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
