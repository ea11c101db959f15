// What the emulator tells ThreadSanitizer. Every fiber counts as a thread, though all run on one CPU thread, and only
// what orders memory on a GPU orders it here. Without ThreadSanitizer these functions are empty.
#pragma once
#include <cstddef>
#include <cstdint>

#ifdef __SANITIZE_THREAD__  // GCC
#define DISTMK_WATCHED
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)  // Clang
#define DISTMK_WATCHED
#endif
#endif

#ifdef DISTMK_WATCHED
#include <sanitizer/tsan_interface.h>

extern "C" {
void __tsan_read_range(void* at, unsigned long num_bytes);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace distmk {
namespace emulator {

#ifdef DISTMK_WATCHED
constexpr bool WATCHED = true;

inline void* watch_thread() { return __tsan_create_fiber(0); }
inline void* watched_thread() { return __tsan_get_current_fiber(); }
inline void watch_no_more(void* thread) { __tsan_destroy_fiber(thread); }
inline void watch_next(void* thread) { __tsan_switch_to_fiber(thread, __tsan_switch_to_fiber_no_sync); }

// Orders everything that this thread has done before everything that others do after acquire_order() of the same
// `order`.
inline void release_order(const void* order) { __tsan_release(const_cast<void*>(order)); }
inline void acquire_order(const void* order) { __tsan_acquire(const_cast<void*>(order)); }

inline void note_read(const void* at, size_t num_bytes) { __tsan_read_range(const_cast<void*>(at), num_bytes); }

// While an object of this type exists, accesses are the emulator's own and are not checked.
struct Unwatched {
  Unwatched() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unwatched() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;
};
#else
constexpr bool WATCHED = false;

inline void* watch_thread() { return nullptr; }
inline void* watched_thread() { return nullptr; }
inline void watch_no_more(void*) {}
inline void watch_next(void*) {}
inline void release_order(const void*) {}
inline void acquire_order(const void*) {}
inline void note_read(const void*, size_t) {}

struct Unwatched {
  Unwatched() {}
};
#endif

// The `order` of a phase of a barrier or meeting. Two of them alternate, because no thread is more than one phase
// behind.
inline const void* order_of(const uint64_t* barrier, uint64_t phase) {
  return reinterpret_cast<const char*>(barrier) + phase % 2;
}

}  // namespace emulator
}  // namespace distmk
