// The host twin: one rank of a launch, with a thread per worker and, if asked for, a thread per scheduler.
#include "host/delayed_puts.h"
#include "host/launch.h"
#include "host/network_transport.h"
#include "host/networks.h"
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
    schedulers_.clear();
    for (uint32_t id = 0; id < program_.num_schedulers; ++id)
      schedulers_.push_back(std::make_unique<HostScheduler>(state_, id, Team{}, ProgramTasks::Holder{}));
    for (uint32_t worker = 0; worker < program_.num_workers; ++worker)
      spawn([this, worker, own_threads] { run_worker(worker, own_threads); });
    for (uint32_t id = 0; own_threads && id < program_.num_schedulers; ++id)
      spawn([this, id] { run_scheduler(state_, id, Team{}, *schedulers_[id]); });
  }

 private:
  uint64_t faults_seen_ = 0;
  RankState state_;
  const std::shared_ptr<Network> network_;  // null: every rank is reached by a pointer
  std::unique_ptr<Transport> transport_;
  std::vector<std::unique_ptr<HostScheduler>> schedulers_;

  void run_worker(uint32_t worker, bool own_threads) {
    const uint32_t id = worker % program_.num_schedulers;
    HostScheduler* local_scheduler = !own_threads && worker == id ? schedulers_[id].get() : nullptr;
    Context context(state_, Team{});
    Worker<ProgramTasks> actions(state_, worker, Team{}, {}, {}, local_scheduler);
    Tracer tracer(state_, worker);
    for (Action action = actions.next(); action.kind != ActionKind::LEAVE; action = actions.next())
      run_task(context, action, tracer);
    if (worker == 0) params_->iterations_done = actions.iterations();
  }
};

}  // namespace

std::unique_ptr<Launch> make_launch(LaunchParams* params) { return std::make_unique<HostLaunch>(params); }

}  // namespace distmk
