// Asynchronous work that a GPU thread starts and later awaits in groups: its 16-byte copies, and products of its
// warpgroup.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulator/watch.h"

namespace distmk {
namespace emulator {

// The work of one thread, in the order in which the thread has started it.
template <class Item>
class Groups {
 public:
  void start(const Item& item) {
    const Unwatched here;
    started_.push_back({item, num_committed_});
  }
  void commit() { ++num_committed_; }
  uint64_t num_committed() const { return num_committed_; }

  // Calls finish(item) for all committed groups except the last `pending`.
  template <class Finish>
  void await(uint64_t pending, const Finish& finish) {
    size_t num_done = 0;
    for (; num_done < started_.size() && started_[num_done].group + pending < num_committed_; ++num_done)
      finish(started_[num_done].item);
    const Unwatched here;
    started_.erase(started_.begin(), started_.begin() + static_cast<ptrdiff_t>(num_done));
  }

 private:
  struct Started {
    Item item;
    uint64_t group;
  };
  std::vector<Started> started_;
  uint64_t num_committed_ = 0;
};

}  // namespace emulator
}  // namespace distmk
