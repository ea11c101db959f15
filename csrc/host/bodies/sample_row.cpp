// The tasks of sampling and of drafts on the host: runtime/sample_row.h and accept_drafts.h with a block of one thread.
#include "runtime/sample_row.h"

#include <algorithm>

#include "runtime/accept_drafts.h"

namespace distmk {

namespace {

struct HostBlock {
  struct Vector {
    float x, y, z, w;
  };
  static constexpr uint32_t LANES = 1, NUM_WARPS = 1, LOADS_IN_FLIGHT = 1, RACERS_IN_FLIGHT = 1;
  static constexpr uint32_t index() { return 0; }
  static constexpr uint32_t size() { return 1; }
  static constexpr uint32_t lane() { return 0; }
  static constexpr uint32_t warp() { return 0; }
  static void sync() {}
  static SelectorMemory& memory() {
    thread_local SelectorMemory memory;
    return memory;
  }
  SlotSampling copy;
  const SlotSampling& slot(const SlotSampling* from) { return copy = *from; }

  template <class T>
  static T load(const T* p) {
    return *p;
  }
  static uint32_t add(uint32_t* p, uint32_t v) {
    const uint32_t old = *p;
    *p += v;
    return old;
  }
  static void set_bits(uint32_t* p, uint32_t bits) { *p |= bits; }
  static float exp(float x) { return expf(x); }
  static float log(float x) { return logf(x); }
  template <class T, class F>
  static T reduce(const T& mine, const F&) {
    return mine;
  }
  static uint64_t sum_before(uint64_t) { return 0; }
  static void sort(TokenKey* list, uint32_t count) { std::sort(list, list + count); }
};

}  // namespace

void body_send_logits(Context& context, const SendLogitsArgs& args) { send_logits(context, args); }

void body_count_tokens(Context& context, const CountTokensArgs& args) {
  HostBlock block;
  count_tokens(block, context, args);
}

void body_sample_row(Context& context, const SampleRowArgs& args) {
  HostBlock block;
  sample_row(block, context, args);
}
void body_verify_row(Context& context, const SampleRowArgs& args) {
  HostBlock block;
  sample_row<HostBlock, true>(block, context, args);
}

void body_accept_drafts(Context& context, const AcceptDraftsArgs& args) { accept_drafts(context, args); }

void body_propose_drafts(Context& context, const ProposeDraftsArgs& args) {
  HostBlock block;
  propose_drafts(block, context, args);
}

}  // namespace distmk
