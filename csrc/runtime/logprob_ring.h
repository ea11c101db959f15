// The ring of logprob records from rank 0's batcher to the host, in host memory. It has one element for each element of
// the token ring. An iteration's records are copied before its tokens are published.
#pragma once
#include "runtime/host_rings.h"

namespace distmk {

// Which rows of the last iteration have events and records. The step's first events belong to these rows, in order.
// `without_event` has a bit for each row of a slab iteration that was not sampled; `with_record` has a bit for each
// event.
struct ReportedRows {
  uint32_t num_events = 0, without_event = 0;
  uint64_t with_record = 0, with_record_high = 0;
  static_assert(MAX_ROWS <= 32 && MAX_SEQUENCES <= 128, "");

  DISTMK_FN bool any_record() const { return with_record | with_record_high; }
  DISTMK_FN void add(bool has_record) {
    const uint64_t bit = static_cast<uint64_t>(has_record) << num_events % 64;
    (num_events < 64 ? with_record : with_record_high) |= bit;
    ++num_events;
  }
  // add() for `num` events, at most 32, one bit each. None of them may be in both words.
  DISTMK_FN void add(uint32_t bits, uint32_t num) {
    (num_events < 64 ? with_record : with_record_high) |= uint64_t{bits} << num_events % 64;
    num_events += num;
  }
};

// Copies the records of the leader's `reported` rows, with all threads of the team. `place` is the leader's index in
// the token ring of the first event. The next iteration overwrites the records, so it must not have begun. Out of line,
// because few steps have records.
DISTMK_NOINLINE void copy_records(const Team team, const LaunchParams& params, const LogprobRecord* records,
                                  ReportedRows reported, uint32_t place) {
  const uint32_t num_events = team.from_leader(reported.num_events),
                 without_event = team.from_leader(reported.without_event);
  place = team.from_leader(place);
  auto* ring = reinterpret_cast<LogprobRecord*>(params.logprobs);
  DISTMK_NO_UNROLL
  for (uint32_t event = 0, row = 0; event < num_events; ++event, ++row) {
    while (row < MAX_ROWS && without_event >> row & 1) ++row;
    const uint64_t bits = event < 64 ? reported.with_record : reported.with_record_high;
    if (team.from_leader(bits >> event % 64 & 1)) copy_bytes(team, ring + place, records + row, sizeof(LogprobRecord));
    if (++place == params.token_capacity) place = 0;
  }
}

}  // namespace distmk
