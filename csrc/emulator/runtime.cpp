// A launch of the emulator: one thread emulates the GPU that runs the kernel.
#include <cuda_runtime.h>
// CUDA's names, before the headers of the kernel
#include <vector>

#include "device/attention/attention.cuh"
#include "device/attention/combine.cuh"
#include "device/comm/put.cuh"
#include "device/core/elementwise.cuh"
#include "device/core/megakernel.cuh"
#include "device/core/scheduler.cuh"
#include "device/linear/embed.cuh"
#include "device/linear/linear.cuh"
#include "device/sampling/sample.cuh"
#include "host/launch.h"

namespace distmk {
namespace {

class EmulatedLaunch : public Launch {
 public:
  explicit EmulatedLaunch(LaunchParams* params) : Launch(params) {
    params->self = reinterpret_cast<uint64_t>(params);
    params->faults_seen = reinterpret_cast<uint64_t>(&faults_seen_);
    worker_owners_.resize(program_.num_workers + (params->scheduler_threads ? 1 : 0));
    params->worker_owners = reinterpret_cast<uint64_t>(worker_owners_.data());
    if (!params->fault.node_size) return;
    network_ = std::make_unique<emulator::Network>(reinterpret_cast<const uint64_t*>(params->heap_bases), program_.rank,
                                                   program_.num_ranks, params->fault.node_size);
    params->heap_bases = reinterpret_cast<uint64_t>(network_->mapped_bases());
    params->num_remote_ranks = network_->num_remote_ranks();
  }

  void start() override {
    ++params_->launch_number;
    spawn([this] {
      const auto num_blocks = static_cast<uint32_t>(worker_owners_.size());
      // Each piece of a launch has its own timing.
      const uint64_t seed = params_->fault.seed + params_->first_iteration;
      emulator::network = network_.get();
      emulator::run_grid(num_blocks, NUM_THREADS, sizeof(Shared), seed, [this] { distmk_megakernel(params_); });
    });
  }

 private:
  uint64_t faults_seen_ = 0;
  std::vector<uint64_t> worker_owners_;
  std::unique_ptr<emulator::Network> network_;  // if some ranks are not to be peer-mapped
};

}  // namespace

std::unique_ptr<Launch> make_launch(LaunchParams* params) { return std::make_unique<EmulatedLaunch>(params); }

}  // namespace distmk
