// The sampling tasks on a GPU: runtime/sample_row.h run by a worker's consumer warps.
#pragma once
#include "device/sampling/block.cuh"
#include "runtime/sample_row.h"

namespace distmk {

DISTMK_FN void body_send_logits(Context& context, const SendLogitsArgs& args) {
  send_logits(context, args);
  context.signal_rank(0);
}

DISTMK_FN void body_count_tokens(Context& context, const CountTokensArgs& args) {
  DeviceBlock block;
  count_tokens(block, context, args);
}

DISTMK_FN void body_sample_row(Context& context, const SampleRowArgs& args) {
  DeviceBlock block;
  sample_row(block, context, args);
}

}  // namespace distmk
