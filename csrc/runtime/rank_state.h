// One rank's view of a launch: its program, the heaps of all ranks, and the transport to ranks whose heaps are not
// mapped here.
#pragma once
#include "abi.h"
#include "platform/platform.h"

namespace distmk {

// The transport to ranks that no pointer reaches: NVSHMEM on GPUs (device/comm/nvshmem.cuh), sockets on the host twin
// (host/network_transport.h). Data put to a rank arrives before the signals that are sent with it. Different sends may
// overtake each other, so a task is complete only after transport_quiet().
class Transport;
DISTMK_BODY bool is_remote(const Transport& transport, uint32_t rank);
DISTMK_BODY void transport_put(Transport& transport, const Team& team, uint32_t rank, uint64_t heap_offset,
                               const void* src, uint64_t num_bytes);
DISTMK_BODY void transport_signal(Transport& transport, uint32_t rank, uint32_t event, uint64_t amount);
DISTMK_BODY void transport_send(Transport& transport, uint32_t rank);
DISTMK_BODY void transport_send_all(Transport& transport);
DISTMK_BODY void transport_quiet(Transport& transport);
DISTMK_BODY void transport_abort(Transport& transport, uint32_t rank,
                                 uint64_t reason);  // sets the rank's abort flag, eventually

DISTMK_FN Scope scope_of(bool system) { return system ? Scope::SYSTEM : Scope::DEVICE; }

// Whether the task is in a worker's ahead-of-time list, so that no scheduler dispatches it.
DISTMK_FN bool is_listed(const TaskDesc& task) {
  return task.launch == static_cast<uint16_t>(LaunchKind::AHEAD) ||
         task.launch == static_cast<uint16_t>(LaunchKind::SPREAD);
}
DISTMK_FN bool is_spread(const TaskDesc& task) { return task.launch == static_cast<uint16_t>(LaunchKind::SPREAD); }

// A task descriptor with its waits and triggers: in the program, or a copy in shared memory.
struct TaskView {
  const TaskDesc* desc = nullptr;
  const Wait* waits = nullptr;
  const Trigger* triggers = nullptr;
  uint32_t index = 0;  // in the program
};

// Shared by all workers and schedulers of a rank; on a GPU each worker has its own.
struct RankState {
  const LaunchParams* params;
  const ProgramHeader* program;
  const TaskDesc* tasks;
  const Wait* waits;
  const Trigger* triggers;
  const Queue* queues;
  const uint32_t* launches;
  uint64_t* heap_bases;                          // address of each rank's heap in this process
  uint64_t to_address[3];                        // by Space: added to an operand; operand 0 becomes null
  uint64_t* faults_seen;                         // triggers so far that matched the injected fault
  Transport* transport = nullptr;                // null: every rank is peer-mapped
  const Batch* cached_batch = nullptr;           // copy of the batch in shared memory; null: read the heap's
  const uint64_t* num_cached_batches = nullptr;  // 2 * number of cached batches, + 1 if the last one says stop
  JitRing* local_ring = nullptr;  // the worker's ring in shared memory beside its scheduler; null: in the heap

  DISTMK_FN RankState(const LaunchParams* launch, uint64_t* fault_counter)
      : RankState(launch, fault_counter, reinterpret_cast<const ProgramHeader*>(launch->program),
                  reinterpret_cast<uint64_t*>(launch->heap_bases)) {}

  // `header` and `bases` are copies of the program's header and of the table of heaps.
  DISTMK_FN RankState(const LaunchParams* launch, uint64_t* fault_counter, const ProgramHeader* header, uint64_t* bases)
      : params(launch), program(header), heap_bases(bases), faults_seen(fault_counter) {
    const auto base = params->program;
    tasks = reinterpret_cast<const TaskDesc*>(base + program->tasks_offset);
    waits = reinterpret_cast<const Wait*>(base + program->waits_offset);
    triggers = reinterpret_cast<const Trigger*>(base + program->triggers_offset);
    queues = reinterpret_cast<const Queue*>(base + program->queues_offset);
    launches = reinterpret_cast<const uint32_t*>(base + program->launches_offset);
    const auto map = [&](Space space, uint64_t base) {
      to_address[static_cast<uint64_t>(space)] = base - (static_cast<uint64_t>(space) << SPACE_SHIFT);
    };
    map(Space::NONE, 0);
    map(Space::HEAP, heap());
    map(Space::LOCAL, params->local_base);
  }

  DISTMK_FN uint64_t heap() const { return heap_bases[program->rank]; }

  DISTMK_FN TaskView view(uint32_t index) const {
    const TaskDesc& desc = tasks[index];
    return {&desc, waits + desc.wait_begin, triggers + desc.trigger_begin, index};
  }

  DISTMK_FN uint64_t* event(uint32_t rank, uint32_t index) const {
    return reinterpret_cast<uint64_t*>(heap_bases[rank] + program->events_heap_offset + index * EVENT_STRIDE_BYTES);
  }
  DISTMK_FN uint64_t* abort_flag(uint32_t rank) const { return &reinterpret_cast<Control*>(heap_bases[rank])->abort; }
  DISTMK_FN JitRing* ring(uint32_t worker) const {
    const uint64_t ring_bytes = sizeof(JitRing) + uint64_t{program->jit_capacity} * sizeof(JitEntry);
    return reinterpret_cast<JitRing*>(heap() + program->rings_heap_offset + worker * ring_bytes);
  }
  DISTMK_FN uint64_t address(uint64_t operand) const { return operand + to_address[operand >> SPACE_SHIFT]; }
  // The batch metadata, or null if the task does not depend on it.
  DISTMK_FN const Batch* batch(uint64_t operand) const {
    return operand && cached_batch ? cached_batch : reinterpret_cast<const Batch*>(address(operand));
  }
};

// Token rows that a task works on: the batch's rows, or one if the task does not depend on a batch.
DISTMK_FN uint32_t rows_of(const Batch* batch) { return batch ? batch->num_rows : 1; }

}  // namespace distmk
