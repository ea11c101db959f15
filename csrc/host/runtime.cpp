// The host twin: one rank of a launch, with a thread per worker and, if requested, a thread per scheduler.
#include "host/delayed_puts.h"
#include "host/launch.h"
#include "host/network_transport.h"
#include "host/networks.h"
#include "runtime/program_choice.h"
#include "runtime/task_source.h"
#include "runtime/worker.h"

namespace distmk {
namespace {

using HostScheduler = Scheduler<ProgramTasks>;

class HostLaunch : public Launch {
 public:
  explicit HostLaunch(LaunchParams* params)
      : Launch(params), state_(params, &faults_seen_), network_(find_network(params->network)) {
    if (network_) transport_ = std::make_unique<NetworkTransport>(state_, *network_);
    if (params->fault.delay_puts_ns && params->fault.node_size)
      transport_ = std::make_unique<DelayedPuts>(state_, std::move(transport_));
    state_.transport = transport_.get();
  }

  void start() override {
    const bool own_threads = params_->scheduler_threads != 0;
    const LaunchParams first = *params_;  // before worker 0 writes to them
    for (uint32_t worker = 0; worker < program_.num_workers; ++worker)
      spawn([this, first, worker, own_threads] {
        take_turns(first, [&](const RankState& state) { return run_worker(state, worker, own_threads); });
      });
    for (uint32_t id = 0; own_threads && id < program_.num_schedulers; ++id)
      spawn([this, id] {
        HostScheduler scheduler(state_, id, Team{}, ProgramTasks::Holder{});
        run_scheduler(state_, id, Team{}, scheduler);
      });
  }

 private:
  uint64_t faults_seen_ = 0;
  RankState state_;
  const std::shared_ptr<Network> network_;  // null: pointers reach every rank
  std::unique_ptr<Transport> transport_;

  // Runs the programs that have a turn, the program of `params` first. `run_turn` runs one turn and returns the
  // Batch::stop that it has seen. If schedulers have threads of their own, there is one program only: a scheduler that
  // dispatches nothing would not see a turn end.
  template <class RunTurn>
  void take_turns(LaunchParams params, const RunTurn& run_turn) {
    for (;;) {
      RankState state(&params, &faults_seen_);
      state.transport = transport_.get();
      const uint32_t stop = run_turn(state);
      if (stop < ENDS_TURN) return;
      begin_turn(params, stop - ENDS_TURN);
    }
  }

  uint32_t run_worker(const RankState& state, uint32_t worker, bool own_threads) {
    const uint32_t id = worker % program_.num_schedulers;
    std::unique_ptr<HostScheduler> local_scheduler;
    if (!own_threads && worker == id)
      local_scheduler = std::make_unique<HostScheduler>(state, id, Team{}, ProgramTasks::Holder{});
    Context context(state, Team{});
    Worker<ProgramTasks> actions(state, worker, Team{}, {}, {}, local_scheduler.get());
    Tracer tracer(state, worker);
    for (Action action = actions.next(); action.kind != ActionKind::LEAVE; action = actions.next())
      run_task(context, action, tracer);
    if (worker == 0) params_->iterations_done += actions.iterations() - state.params->first_iteration;
    return actions.stop();
  }
};

}  // namespace

std::unique_ptr<Launch> make_launch(LaunchParams* params) { return std::make_unique<HostLaunch>(params); }

}  // namespace distmk
