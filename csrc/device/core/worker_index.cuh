// Chooses the worker index of a CTA by its SM, at the beginning of a launch.
#pragma once
#include "abi.h"
#include "platform/device.h"

namespace distmk {

// Called by one thread of the CTA. Returns the number of its SM or, if another CTA of this launch has taken that, the
// next free number. A worker so stays on its SM from launch to launch. With blockIdx it would not, and a decode step
// would take up to 3 % more or less time.
DISTMK_FN uint32_t take_worker_index(const LaunchParams& launch, uint32_t num_blocks) {
  auto* owners = reinterpret_cast<uint64_t*>(launch.worker_owners);  // last launch that took each index
  if (!owners) return blockIdx.x;
  uint32_t index = sm_number() % num_blocks;
  while (raise_to(&owners[index], launch.launch_number) >= launch.launch_number)
    index = index + 1 < num_blocks ? index + 1 : 0;
  return index;
}

}  // namespace distmk
