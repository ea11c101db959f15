// The host twin: one rank of a launch, with a thread a worker and, if asked for, a thread a scheduler.
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "host/delayed_puts.h"
#include "runtime/worker.h"

namespace distmk {
namespace {

class Launch {
 public:
  explicit Launch(LaunchParams* params) : params_(params), state_(params, &faults_seen_) {
    if (params->fault.delay_puts_ns && params->fault.node_size) {
      far_ = std::make_unique<FarRanks>(state_);
      state_.far = far_.get();
    }
    start();
  }

  // All threads have left.
  bool idle() const { return running_.load(std::memory_order_acquire) == 0; }

  // Waits for that, and where they left before the end lets them go on. False: it was the end.
  bool go_on() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    const bool aborted = load_relaxed(state_.abort_flag(state_.program->rank));
    if (aborted || params_->iterations_done < end_iteration(*params_)) return false;
    params_->first_iteration = params_->iterations_done;
    start();
    return true;
  }

 private:
  LaunchParams* params_;
  uint64_t faults_seen_ = 0;
  RankState state_;
  std::unique_ptr<FarRanks> far_;
  std::vector<std::unique_ptr<Scheduler>> schedulers_;
  std::vector<std::thread> threads_;
  std::atomic<uint32_t> running_{0};

  void start() {
    const ProgramHeader& program = *state_.program;
    const bool own_threads = params_->scheduler_threads != 0;
    schedulers_.clear();
    for (uint32_t id = 0; id < program.num_schedulers; ++id)
      schedulers_.push_back(std::make_unique<Scheduler>(state_, id, Team{}, TaskHolder{}));
    running_ = program.num_workers + (own_threads ? program.num_schedulers : 0);
    for (uint32_t worker = 0; worker < program.num_workers; ++worker)
      threads_.emplace_back([this, worker, own_threads] { run_worker(worker, own_threads); });
    for (uint32_t id = 0; own_threads && id < program.num_schedulers; ++id)
      threads_.emplace_back([this, id] { run_own_scheduler(id); });
  }

  void run_worker(uint32_t worker, bool own_threads) {
    const uint32_t id = worker % state_.program->num_schedulers;
    Scheduler* rider = !own_threads && worker == id ? schedulers_[id].get() : nullptr;
    Context context(state_, Team{});
    Worker decide(state_, worker, Team{}, TaskList{}, TaskHolder{}, rider);
    Tracer tracer(state_, worker);
    for (Action action = decide.next(); action.kind != ActionKind::LEAVE; action = decide.next())
      run_task(context, action, tracer);
    if (worker == 0) params_->iterations_done = decide.iterations();
    running_.fetch_sub(1, std::memory_order_release);
  }

  void run_own_scheduler(uint32_t id) {
    run_scheduler(state_, id, Team{}, *schedulers_[id]);
    running_.fetch_sub(1, std::memory_order_release);
  }
};

}  // namespace
}  // namespace distmk

extern "C" {

uint64_t distmk_abi_hash() { return distmk::ABI_HASH; }

// Starts the rank's threads and returns at once; `params` must stay where it is until distmk_join.
void* distmk_start(distmk::LaunchParams* params) { return new distmk::Launch(params); }

// Sleeps until more than `seen` tokens are out, the launch is over, or the time is up. 1: the launch is over. One that
// runs only some iterations at a time goes on in here.
int distmk_wait(void* launch, uint64_t seen, uint64_t timeout_us, const uint64_t* token_count) {
  auto* running = static_cast<distmk::Launch*>(launch);
  const uint64_t until = distmk::now_ns() + timeout_us * 1000;
  for (;;) {
    if (running->idle() && !running->go_on()) return 1;
    if (token_count && distmk::load_acquire(token_count) > seen) return 0;
    if (distmk::now_ns() >= until) return 0;
    const timespec nap{0, 500000};
    nanosleep(&nap, nullptr);
  }
}

void distmk_join(void* launch) {
  auto* running = static_cast<distmk::Launch*>(launch);
  while (running->go_on()) {
  }
  delete running;
}

// Tells the threads of every reachable rank to leave.
void distmk_abort(const uint64_t* heap_bases, uint32_t num_ranks, uint64_t reason) {
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    uint64_t* flag = &reinterpret_cast<distmk::Control*>(heap_bases[rank])->abort;
    if (!distmk::load_relaxed(flag)) distmk::store_release(flag, reason);
  }
}

}  // extern "C"
