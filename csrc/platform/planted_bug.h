// A bug for the tests of the race detectors, off unless `run_ranks --missing-release` asks for it: without its release,
// what was written before a signal is not ordered before it.
#pragma once

namespace distmk {

#ifdef DISTMK_PLANTED_BUG
inline bool missing_release = false;
#else
constexpr bool missing_release = false;
#endif

}  // namespace distmk
