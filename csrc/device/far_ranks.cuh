// Ranks that no pointer reaches: NVSHMEM carries puts and signals to them, over whatever network there is.
#pragma once
#include <nvshmem.h>
#include <nvshmemx.h>

#include "runtime/context.h"

namespace distmk {

class FarRanks {
 public:
  const RankState& state;
  DISTMK_FN explicit FarRanks(const RankState& s) : state(s) {}
};

DISTMK_FN bool is_far(const FarRanks& far, uint32_t rank) { return far.state.heap_bases[rank] == 0; }

DISTMK_FN void far_put(FarRanks& far, const Team& team, uint32_t rank, uint64_t heap_offset, const void* src,
                       uint64_t num_bytes) {
  // A symmetric address: this rank's own, which NVSHMEM translates.
  if (team.leader())
    nvshmem_putmem_nbi(reinterpret_cast<void*>(far.state.heap + heap_offset), src, num_bytes, static_cast<int>(rank));
}

DISTMK_FN void far_signal(FarRanks& far, uint32_t rank, uint32_t event, uint64_t amount) {
  nvshmem_fence();  // signals to a rank come after what was put to it
  nvshmemx_signal_op(far.state.event(far.state.program->rank, event), amount, NVSHMEM_SIGNAL_ADD,
                     static_cast<int>(rank));
}

DISTMK_FN void far_send(FarRanks&, uint32_t) {}
DISTMK_FN void far_send_all(FarRanks&) {}
DISTMK_FN void far_quiet(FarRanks&) { nvshmem_quiet(); }

}  // namespace distmk
