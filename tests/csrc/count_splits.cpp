// Prints the number of splits of each run of a batch (test_splits.py). Reads the budget, the least length of a split,
// the most splits of a run, the window, the number of runs, and the positions of each one, which has one row.
#include <cstdio>

#include "runtime/splits.h"

int main() {
  using namespace distmk;
  AttentionArgs args{};
  Batch batch{};
  while (scanf("%u %u %u %u %u", &args.kv_split_budget, &args.min_kv_split_len, &args.max_kv_splits, &args.window,
               &batch.num_runs) == 5) {
    batch.num_rows = batch.num_runs;
    for (uint32_t run = 0; run < batch.num_runs; ++run) {
      batch.runs[run].row_begin = static_cast<int32_t>(run);
      batch.runs[run].num_rows = 1;
      if (scanf("%d", &batch.runs[run].kv_len) != 1) return 2;
    }
    const Splits splits(args, batch);
    for (uint32_t run = 0; run < batch.num_runs; ++run) printf("%u ", splits.of(batch.runs[run]));
    printf("\n");
  }
}
