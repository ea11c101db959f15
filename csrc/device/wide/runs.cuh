// The runs of a wide iteration in shared memory, for tasks that look at them often.
#pragma once
#include "device/core/shared.cuh"
#include "runtime/wide_batch.h"

namespace distmk {
namespace wide {

// By all consumers; they may read the runs after the next team.sync().
DISTMK_FN void load_runs(const Context& context, uint64_t operand, uint32_t num_runs, BatchRun* runs) {
  static_assert(MAX_SEQUENCES <= NUM_CONSUMERS, "a thread a run");
  const uint32_t i = context.team.index;
  if (i < num_runs) runs[i] = load_vector(wide_batch(context, operand).runs + i);
}

// Of a body that returns before it is done: nothing lands in shared memory any more.
DISTMK_FN void end_copies() {
  commit_copies();
  await_copies<0>();
}

// XOR swizzle of the caches in elements (see ParamsOf::swizzle in device/attention/params.cuh).
DISTMK_FN bool swizzles_cache(uint32_t head_dim, uint32_t page_size) { return !(head_dim % 64 || page_size % 8); }

// Row of a position in the caches, which are [page, KV head, position in page] rows of head_dim elements: the page, and
// what follows from it.
template <class Args>
DISTMK_FN uint32_t page_of(const int32_t* page_table, const Args& args, uint32_t slot, uint32_t position) {
  const uint32_t in_table = position >> floor_log2(args.page_size);
  return static_cast<uint32_t>(__ldcg(page_table + uint64_t{slot} * args.max_pages + in_table));
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

}  // namespace wide
}  // namespace distmk
