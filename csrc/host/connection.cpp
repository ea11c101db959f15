// Writes frames to a socket that may be full, from any thread (connection.h).
#include "host/connection.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace distmk {
namespace {

constexpr int ROOM_POLL_MS = 20;

Connection::End end_of(int error) {
  switch (error) {
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case EHOSTDOWN:
    case ENETDOWN:
      return Connection::End::NO_ANSWER;
    default:
      return Connection::End::CLOSED;
  }
}

wire::Header control_frame(wire::Type type, uint64_t value) { return {type, 0, 0, 0, value}; }

// Skips the bytes that have been written.
void advance(iovec*& parts, size_t& num_parts, size_t num_bytes) {
  while (num_parts && num_bytes >= parts->iov_len) {
    num_bytes -= parts->iov_len;
    ++parts;
    --num_parts;
  }
  if (!num_bytes) return;
  parts->iov_base = static_cast<char*>(parts->iov_base) + num_bytes;
  parts->iov_len -= num_bytes;
}

}  // namespace

Connection::Connection(uint32_t rank, int fd, std::function<void()> wake)
    : rank(rank), fd(fd), wake_(std::move(wake)) {}

Connection::~Connection() { close(fd); }

uint64_t Connection::send_parcel(iovec* parts, size_t num_parts, const GoOn& go_on) {
  uint64_t number;
  {
    const std::lock_guard lock(mutex_);
    number = ++num_sent_;
    bool waits = true;
    while (waits && !write_tail()) waits = wait_for_room(go_on);
    while (waits && !write(parts, num_parts)) waits = wait_for_room(go_on);
    append_to_tail(parts, num_parts);
  }
  settle();
  return number;
}

void Connection::send_control(wire::Type type, uint64_t value) {
  const wire::Header header = control_frame(type, value);
  iovec part{const_cast<wire::Header*>(&header), sizeof header};
  {
    const std::lock_guard lock(mutex_);
    iovec* parts = &part;
    size_t num_parts = 1;
    if (write_tail()) write(parts, num_parts);
    append_to_tail(parts, num_parts);
  }
  settle();
}

void Connection::acknowledge(uint64_t num_applied) {
  ack_due_.store(num_applied);
  settle();
}

void Connection::write_pending() {
  if (!mutex_.try_lock()) return;  // the holder writes the tail
  write_due();
  mutex_.unlock();
  settle();
}

// Sends the acknowledgement that is due. Every thread calls this after it has released the mutex, so a thread that
// finds the mutex taken may leave at once.
void Connection::settle() {
  while (ack_due_.load() != ack_sent_.load() && end() == End::NONE && mutex_.try_lock()) {
    const bool fits = write_due();
    mutex_.unlock();
    if (!fits) return wake_();  // the receiver goes on when there is room
  }
}

bool Connection::set_acknowledged(uint64_t num_applied) {
  if (num_applied < acknowledged_.load() || num_applied > num_sent_.load()) return false;
  acknowledged_.store(num_applied);
  return true;
}

void Connection::set_end(End reason) {
  End none = End::NONE;
  end_.compare_exchange_strong(none, reason);
  shutdown(fd, SHUT_RDWR);
}

bool Connection::write(iovec*& parts, size_t& num_parts) {
  while (num_parts && end() == End::NONE) {
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = num_parts;
    const ssize_t written = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (written >= 0)
      advance(parts, num_parts, static_cast<size_t>(written));
    else if (errno == EAGAIN || errno == EWOULDBLOCK)
      return false;
    else if (errno != EINTR)
      set_end(end_of(errno));
  }
  num_parts = 0;  // written, or nobody is left to read it
  return true;
}

bool Connection::write_tail() {
  if (tail_.empty()) return true;
  iovec part{tail_.data(), tail_.size()};
  iovec* parts = &part;
  size_t num_parts = 1;
  const bool all = write(parts, num_parts);
  tail_.erase(0, all ? tail_.size() : tail_.size() - part.iov_len);
  has_tail_.store(!tail_.empty(), std::memory_order_release);
  return all;
}

bool Connection::write_due() {
  if (!write_tail()) return false;
  const uint64_t due = ack_due_.load();
  if (due == ack_sent_.load()) return true;
  ack_sent_.store(due);
  const wire::Header header = control_frame(wire::Type::ACK, due);
  tail_.assign(reinterpret_cast<const char*>(&header), sizeof header);
  return write_tail();
}

void Connection::append_to_tail(const iovec* parts, size_t num_parts) {
  if (!num_parts) return;
  for (size_t i = 0; i < num_parts; ++i) tail_.append(static_cast<const char*>(parts[i].iov_base), parts[i].iov_len);
  has_tail_.store(true, std::memory_order_release);
  wake_();
}

bool Connection::wait_for_room(const GoOn& go_on) {
  pollfd room{fd, POLLOUT, 0};
  poll(&room, 1, ROOM_POLL_MS);
  return go_on();
}

}  // namespace distmk
