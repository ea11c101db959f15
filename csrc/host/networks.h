// The open networks of this process, by the number that a launch names (LaunchParams::network).
#pragma once
#include <cstdint>
#include <memory>

#include "host/network.h"

namespace distmk {

uint32_t open_network(std::shared_ptr<Network> network);
std::shared_ptr<Network> find_network(uint32_t number);  // null if there is none
void close_network(uint32_t number);

}  // namespace distmk
