// The C interface that Python calls for the network of the host twin.
#include "host/networks.h"

extern "C" {

// Opens a network for the rank of `program` over `sockets` (by rank, -1: none), which it takes over. Returns the number
// for LaunchParams::network.
uint32_t distmk_network_open(uint64_t heap, const distmk::ProgramHeader* program, const int* sockets) {
  return distmk::open_network(std::make_shared<distmk::Network>(
      reinterpret_cast<char*>(heap), *program, std::vector<int>(sockets, sockets + program->num_ranks)));
}

// Leaves the peers in order. No launch may be running, and the heap must still exist.
void distmk_network_close(uint32_t network) { distmk::close_network(network); }

// Sets the abort flag of every rank that the network reaches.
void distmk_network_abort(uint32_t network, uint64_t reason) { distmk::find_network(network)->abort(reason); }

// Before a launch every rank sends a fence behind all frames of the last launch. The second call returns 1 once the
// fences of all peers have arrived, 0 at the timeout.
void distmk_network_send_fence(uint32_t network) { distmk::find_network(network)->send_fence(); }
int distmk_network_reached_fence(uint32_t network, uint64_t timeout_us) {
  return distmk::find_network(network)->reached_fence(timeout_us * 1000);
}

// Why the connection to a rank is over (Connection::End); 0 while it is not over.
uint32_t distmk_network_end(uint32_t network, uint32_t rank) {
  return static_cast<uint32_t>(distmk::find_network(network)->end_of(rank));
}

}  // extern "C"
