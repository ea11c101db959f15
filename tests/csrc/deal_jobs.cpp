// Prints how a worker's jobs are dealt to its warps (test_warp_dealer.py). Reads the number of warps, the number of
// jobs, and the tiles of each. Prints the most tiles of a warp, then for each job its first warp and its number of
// pieces.
#include <cstdio>
#include <vector>

#include "runtime/warp_dealer.h"

int main() {
  using distmk::WarpDealer;
  uint32_t num_warps, num_jobs;
  while (scanf("%u %u", &num_warps, &num_jobs) == 2) {
    std::vector<uint32_t> jobs(num_jobs);
    uint32_t total = 0;
    for (uint32_t& job : jobs) {
      if (scanf("%u", &job) != 1) return 2;
      total += job;
    }
    uint32_t most_tiles = 0;
    for (uint32_t i = 0; i < WarpDealer::NUM_TRIES; ++i) {
      most_tiles = WarpDealer::try_most_tiles(total, num_warps, i);
      WarpDealer tried(most_tiles);
      for (const uint32_t job : jobs) tried.deal(job);
      if (tried.num_warps() <= num_warps) break;
    }
    printf("%u", most_tiles);
    WarpDealer dealer(most_tiles);
    for (const uint32_t job : jobs) {
      dealer.deal(job);
      printf(" %u %u", dealer.warp, dealer.num_pieces);
    }
    printf("\n");
  }
}
