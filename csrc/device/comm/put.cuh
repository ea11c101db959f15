// The put task, putmem_signal: copies a region, or the batch's rows of a buffer, to another rank, then signals the
// task's triggers there.
#pragma once
#include "runtime/context.h"

namespace distmk {

DISTMK_FN void body_put(Context& context, const PutArgs& args) {
  const uint64_t num_bytes = rows_of(context.batch(args.batch)) * args.num_bytes;
  const void* src = context.at<void>(args.src);
  if (args.dst_rank == context.rank())  // the target may be local memory, which no peer reaches
    copy_bytes(context.team, context.at<void>(args.dst), src, num_bytes);
  else
    context.push(args.dst_rank, args.dst, src, num_bytes);
}

}  // namespace distmk
