// A launch whose one thread plays the GPU that runs the kernel.
#include <cuda_runtime.h>
// CUDA's names first
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
    block_takers_.resize(program_.num_workers + (params->scheduler_threads ? 1 : 0));
    params->worker_owners = reinterpret_cast<uint64_t>(block_takers_.data());
    if (!params->fault.node_size) return;
    network_ = std::make_unique<emulator::Network>(reinterpret_cast<const uint64_t*>(params->heap_bases), program_.rank,
                                                   program_.num_ranks, params->fault.node_size);
    params->heap_bases = reinterpret_cast<uint64_t>(network_->mapped_bases());
    params->num_remote_ranks = network_->num_remote_ranks();
  }

  void start() override {
    ++params_->launch_number;
    spawn([this] {
      const auto num_blocks = static_cast<uint32_t>(block_takers_.size());
      // Each piece of a launch has a timing of its own.
      const uint64_t seed = params_->fault.seed + params_->first_iteration;
      emulator::network = network_.get();
      emulator::run_grid(num_blocks, NUM_THREADS, sizeof(Shared), seed, [this] { distmk_megakernel(params_); });
    });
  }

 private:
  uint64_t faults_seen_ = 0;
  std::vector<uint64_t> block_takers_;
  std::unique_ptr<emulator::Network> network_;  // where ranks are to be out of reach of pointers
};

}  // namespace

std::unique_ptr<Launch> make_launch(LaunchParams* params) { return std::make_unique<EmulatedLaunch>(params); }

}  // namespace distmk
