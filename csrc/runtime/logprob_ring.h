// The ring of logprob records between rank 0's batcher and the host: an element for each one of the token ring, in host
// memory. Records of an iteration's rows are copied into it before their tokens are published.
#pragma once
#include "runtime/host_rings.h"

namespace distmk {

// The step's first events are those of the last iteration's rows, in order. A narrow iteration may have rows without an
// event, which are not sampled; of these there is a bit for each.
struct ReportedRows {
  uint32_t num_events = 0, without_event = 0;
  bool any_record = false;
};
static_assert(MAX_ROWS <= 32, "a bit for each row");

// Copies the records of the leader's reported rows, with all threads of the team. The rows' tasks overwrite the records
// in the next iteration, so it must not have begun. Out of line, as few steps have records.
DISTMK_NOINLINE void copy_records(const Team team, const LaunchParams& params, const LogprobRecord* records,
                                  const ReportedRows& reported, const HostRings& rings) {
  const uint32_t num_events = team.from_leader(reported.num_events),
                 without_event = team.from_leader(reported.without_event);
  uint32_t place = team.from_leader(rings.first_place());
  auto* ring = reinterpret_cast<LogprobRecord*>(params.logprobs);
  DISTMK_NO_UNROLL
  for (uint32_t event = 0, row = 0; event < num_events; ++event, ++row) {
    while (row < MAX_ROWS && without_event >> row & 1) ++row;
    if (team.from_leader(team.leader() && rings.has_record(event)))
      copy_bytes(team, ring + place, records + row, sizeof(LogprobRecord));
    if (++place == params.token_capacity) place = 0;
  }
}

}  // namespace distmk
