// The wire format between ranks on different hosts: frames on a stream socket. Integers are in native byte order,
// because both hosts run one program on processors of one kind.
#pragma once
#include <cstddef>
#include <cstdint>

namespace distmk {
namespace wire {

// PARCEL carries writes, then signals. ACK carries the number of parcels that have been applied so far, ABORT the
// reason. FENCE carries its number; all frames of earlier launches precede it. LEAVE: the sender closes in order.
enum class Type : uint32_t { PARCEL = 1, ACK, ABORT, FENCE, LEAVE };

// Followed by Write[num_writes], Signal[num_signals] and the data of the writes, one after another.
struct Header {
  Type type;
  uint32_t num_writes, num_signals;
  uint32_t num_bytes;  // data only
  uint64_t value;      // what a frame other than a parcel carries
};
struct Write {
  uint64_t heap_offset, num_bytes;
};
struct Signal {
  uint64_t amount;
  uint32_t event, pad;
};

// Limits of a frame; a larger parcel takes several frames. Data is cut at multiples of its elements' size.
constexpr uint32_t MAX_WRITES = 128, MAX_SIGNALS = 128, MAX_DATA_BYTES = 256 << 10;
constexpr size_t MAX_FRAME_BYTES =
    sizeof(Header) + MAX_WRITES * sizeof(Write) + MAX_SIGNALS * sizeof(Signal) + MAX_DATA_BYTES;

inline size_t tables_bytes(const Header& header) {
  return header.num_writes * sizeof(Write) + header.num_signals * sizeof(Signal);
}

}  // namespace wire
}  // namespace distmk
