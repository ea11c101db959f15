// The table of open networks (networks.h).
#include "host/networks.h"

#include <map>
#include <mutex>

namespace distmk {
namespace {

std::mutex mutex;
uint32_t last_number = 0;
std::map<uint32_t, std::shared_ptr<Network>> networks;

}  // namespace

uint32_t open_network(std::shared_ptr<Network> network) {
  const std::lock_guard lock(mutex);
  networks.emplace(++last_number, std::move(network));
  return last_number;
}

std::shared_ptr<Network> find_network(uint32_t number) {
  const std::lock_guard lock(mutex);
  const auto found = networks.find(number);
  return found == networks.end() ? nullptr : found->second;
}

void close_network(uint32_t number) {
  std::shared_ptr<Network> closed;  // destroyed without the lock, as the destructor waits for a thread
  {
    const std::lock_guard lock(mutex);
    if (const auto found = networks.find(number); found != networks.end()) {
      closed = std::move(found->second);
      networks.erase(found);
    }
  }
}

}  // namespace distmk
