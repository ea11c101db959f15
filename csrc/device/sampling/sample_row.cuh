// The tasks of sampling and of drafts on a GPU: runtime/sample_row.h and accept_drafts.h run by a worker's consumer
// warps.
#pragma once
#include "device/sampling/block.cuh"
#include "runtime/accept_drafts.h"
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
DISTMK_FN void body_verify_row(Context& context, const SampleRowArgs& args) {
  DeviceBlock block;
  sample_row<DeviceBlock, true>(block, context, args);
}

DISTMK_FN void body_accept_drafts(Context& context, const AcceptDraftsArgs& args) { accept_drafts(context, args); }

DISTMK_FN void body_propose_drafts(Context& context, const ProposeDraftsArgs& args) {
  DeviceBlock block;
  propose_drafts(block, context, args);
}

}  // namespace distmk
