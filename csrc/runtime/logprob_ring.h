// The ring of logprob records from rank 0's batcher to the host, in host memory. It has one element for each element of
// the token ring. An iteration's records are copied before its tokens are published.
#pragma once
#include "runtime/host_rings.h"

namespace distmk {

// A set of an iteration's sampled rows. A pair of words and no array, which a GPU would not keep in registers.
struct RowSet {
  uint64_t low = 0, high = 0;
  static_assert(MAX_SEQUENCES <= 128, "");

  DISTMK_FN bool any() const { return low | high; }
  DISTMK_FN bool has(uint32_t row) const { return (row < 64 ? low : high) >> row % 64 & 1; }
  // Adds the rows from `first` on whose bits are set, up to 32 of them. They must be in one word.
  DISTMK_FN void add(uint32_t first, uint32_t bits) { (first < 64 ? low : high) |= uint64_t{bits} << first % 64; }
};

// Rows of the last iteration that have events, and those with records. The step's first events belong to these rows, in
// order.
struct ReportedRows {
  RowSet with_event, with_record;

  DISTMK_FN void add(uint32_t row, bool has_record) {
    with_event.add(row, 1);
    with_record.add(row, has_record);
  }
};

// Copies the records of the leader's `reported` rows, with all threads of the team. `place` is the leader's index in
// the token ring of the first event. The next iteration overwrites the records, so it must not have begun. Out of line,
// because few steps have records.
DISTMK_NOINLINE void copy_records(const Team team, const LaunchParams& params, const LogprobRecord* records,
                                  ReportedRows reported, uint32_t place) {
  place = team.from_leader(place);
  auto* ring = reinterpret_cast<LogprobRecord*>(params.logprobs);
  DISTMK_NO_UNROLL
  for (uint32_t row = 0; row < MAX_SEQUENCES; ++row) {
    if (!team.from_leader(reported.with_event.has(row))) continue;
    if (team.from_leader(reported.with_record.has(row)))
      copy_bytes(team, ring + place, records + row, sizeof(LogprobRecord));
    if (++place == params.token_capacity) place = 0;
  }
}

}  // namespace distmk
