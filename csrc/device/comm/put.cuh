// putmem_signal as a task: copies a region to another rank, then signals the task's triggers there.
#pragma once
#include "runtime/context.h"

namespace distmk {

DISTMK_FN void body_put(Context& context, const PutArgs& args) {
  context.push(args.dst_rank, args.dst, context.at<void>(args.src), args.num_bytes);
}

}  // namespace distmk
