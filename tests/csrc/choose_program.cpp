// Chooses the program of the next iteration (test_program_choice.py). Reads the number of the running program, whether
// there is a transport, a number of rows, a set of programs, the number of programs and their row buckets. Prints the
// program for the rows, and the program of the set that follows.
#include <cstdio>

#include "runtime/program_choice.h"

int main() {
  using namespace distmk;
  LaunchParams params{};
  ProgramHeader header{};
  uint64_t base = 0;
  RankState state(&params, nullptr, &header, &base);
  const Context context(state, Team{});
  uint32_t program, has_transport, num_rows, programs, num_programs;
  while (scanf("%u %u %u %u %u", &program, &has_transport, &num_rows, &programs, &num_programs) == 5) {
    SchedulerStepArgs args{};
    args.program = program;
    args.num_programs = num_programs;
    for (uint32_t i = 0; i < num_programs; ++i)
      if (scanf("%hu", &args.max_rows[i]) != 1) return 2;
    state.transport = has_transport ? reinterpret_cast<Transport*>(&state) : nullptr;
    const ProgramChoice choice(context, args);
    const bool decides = choice.program_for(num_rows) == choice.program_for(choice.least_rows() + 1);
    printf("%u %u %d\n", choice.program_for(num_rows), choice.next(programs),
           num_rows <= choice.least_rows() || decides);
  }
}
