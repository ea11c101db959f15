// A launch whose one thread plays the GPU that runs the kernel.
#include <cuda_runtime.h>
// CUDA's names first
#include "device/bodies/attention.cuh"
#include "device/bodies/basic.cuh"
#include "device/bodies/linear.cuh"
#include "device/bodies/merge.cuh"
#include "device/megakernel.cuh"
#include "host/launch.h"

namespace distmk {
namespace {

class EmulatedLaunch : public Launch {
 public:
  explicit EmulatedLaunch(LaunchParams* params) : Launch(params) {
    params->self = reinterpret_cast<uint64_t>(params);
    params->faults_seen = reinterpret_cast<uint64_t>(&faults_seen_);
  }

  void start() override {
    spawn([this] {
      const uint32_t num_blocks = program_.num_workers + (params_->scheduler_threads ? 1 : 0);
      // Each piece of a launch has a timing of its own.
      const uint64_t seed = params_->fault.seed + params_->first_iteration;
      emulator::run_grid(num_blocks, NUM_THREADS, sizeof(Shared), seed, [this] { distmk_megakernel(params_); });
    });
  }

 private:
  uint64_t faults_seen_ = 0;
};

}  // namespace

std::unique_ptr<Launch> make_launch(LaunchParams* params) { return std::make_unique<EmulatedLaunch>(params); }

}  // namespace distmk
