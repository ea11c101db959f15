// What two ranks of different hosts send each other: frames on a stream socket, in the byte order of their processors,
// which run one program and so are of one kind.
#pragma once
#include <cstddef>
#include <cstdint>

namespace distmk {
namespace wire {

// PARCEL: writes, then signals. ACK: the number of parcels that have been applied so far. ABORT: the reason. FENCE: its
// number; all frames of earlier launches precede it. LEAVE: the sender closes in order.
enum class Type : uint32_t { PARCEL = 1, ACK, ABORT, FENCE, LEAVE };

// Followed by Write[num_writes], Signal[num_signals] and the writes' data, one after the other.
struct Header {
  Type type;
  uint32_t num_writes, num_signals;
  uint32_t num_bytes;  // of data
  uint64_t value;      // of a frame that is no parcel
};
struct Write {
  uint64_t heap_offset, num_bytes;
};
struct Signal {
  uint64_t amount;
  uint32_t event, pad;
};

// Of a frame; a larger parcel takes several frames. Data is cut at multiples of its elements' size.
constexpr uint32_t MAX_WRITES = 128, MAX_SIGNALS = 128, MAX_DATA_BYTES = 256 << 10;
constexpr size_t MAX_FRAME_BYTES =
    sizeof(Header) + MAX_WRITES * sizeof(Write) + MAX_SIGNALS * sizeof(Signal) + MAX_DATA_BYTES;

inline size_t tables_bytes(const Header& header) {
  return header.num_writes * sizeof(Write) + header.num_signals * sizeof(Signal);
}

}  // namespace wire
}  // namespace distmk
