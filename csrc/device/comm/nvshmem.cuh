// The transport on GPUs: NVSHMEM puts and signals to ranks that are not peer-mapped. runtime/context.h calls it.
#pragma once
#include <nvshmem.h>
#include <nvshmemx.h>

#include "device/core/shared.cuh"
#include "runtime/context.h"

namespace distmk {

class Transport {
 public:
  const RankState& state;
  DISTMK_FN explicit Transport(const RankState& s) : state(s) {}
};
static_assert(sizeof(Transport) <= sizeof(Shared::transport_memory), "");

DISTMK_FN bool is_remote(const Transport& transport, uint32_t rank) { return transport.state.heap_bases[rank] == 0; }

// NVSHMEM's functions are inlined wherever they are called. One wrapper for each keeps their thousands of instructions
// and their registers out of the bodies, and compile times short.
static __device__ __noinline__ void put_by_nvshmem(void* dst, const void* src, uint64_t num_bytes, int rank) {
  nvshmem_putmem_nbi(dst, src, num_bytes, rank);
}
static __device__ __noinline__ void signal_by_nvshmem(uint64_t* event, uint64_t amount, int rank) {
  nvshmem_fence();  // orders the signal after all puts to the rank
  nvshmemx_signal_op(event, amount, NVSHMEM_SIGNAL_ADD, rank);
}
static __device__ __noinline__ void set_by_nvshmem(uint64_t* word, uint64_t value, int rank) {
  nvshmemx_signal_op(word, value, NVSHMEM_SIGNAL_SET, rank);
}
static __device__ __noinline__ void wait_for_nvshmem() { nvshmem_quiet(); }

// NVSHMEM takes symmetric addresses: this rank's own, which it translates to the other rank's.
DISTMK_FN void transport_put(Transport& transport, const Team& team, uint32_t rank, uint64_t heap_offset,
                             const void* src, uint64_t num_bytes) {
  if (team.leader())
    put_by_nvshmem(reinterpret_cast<void*>(transport.state.heap() + heap_offset), src, num_bytes,
                   static_cast<int>(rank));
}
DISTMK_FN void transport_signal(Transport& transport, uint32_t rank, uint32_t event, uint64_t amount) {
  signal_by_nvshmem(transport.state.event(transport.state.program->rank, event), amount, static_cast<int>(rank));
}

DISTMK_FN void transport_send(Transport&, uint32_t) {}
DISTMK_FN void transport_send_all(Transport&) {}
DISTMK_FN void transport_quiet(Transport&) { wait_for_nvshmem(); }
DISTMK_FN void transport_abort(Transport& transport, uint32_t rank, uint64_t reason) {
  set_by_nvshmem(transport.state.abort_flag(transport.state.program->rank), reason, static_cast<int>(rank));
}

}  // namespace distmk
