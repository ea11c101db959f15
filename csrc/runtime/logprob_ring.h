// The ring of logprob records between rank 0's batcher and the host: an element for each one of the token ring, in host
// memory. Records of an iteration's rows are copied into it before their tokens are published.
#pragma once
#include "runtime/host_rings.h"

namespace distmk {

// Rows of the last iteration, in bits: those that gave an event, which are the step's first ones, and those with a
// record.
struct ReportedRows {
  uint32_t with_event = 0, with_record = 0;

  DISTMK_FN void add(uint32_t row, bool has_record) {
    with_event |= 1u << row;
    with_record |= static_cast<uint32_t>(has_record) << row;
  }
};
static_assert(MAX_ROWS <= 32, "a bit for each row");

// Copies the records of the leader's reported rows, with all threads of the team. `place`: the leader's, of the first
// event in the token ring. The rows' tasks overwrite the records in the next iteration, so it must not have begun. Out
// of line, as few steps have records.
DISTMK_NOINLINE void copy_records(const Team team, const LaunchParams& params, const LogprobRecord* records,
                                  uint32_t with_event, uint32_t with_record, uint32_t place) {
  with_event = team.from_leader(with_event);
  with_record = team.from_leader(with_record);
  place = team.from_leader(place);
  auto* ring = reinterpret_cast<LogprobRecord*>(params.logprobs);
  DISTMK_NO_UNROLL
  for (uint32_t row = 0; row < MAX_ROWS; ++row) {
    if (with_record >> row & 1) copy_bytes(team, ring + place, records + row, sizeof(LogprobRecord));
    place += with_event >> row & 1;
    if (place == params.token_capacity) place = 0;
  }
}

}  // namespace distmk
