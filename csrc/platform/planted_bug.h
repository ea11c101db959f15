// A planted bug for the tests of the race detectors, off unless `run_ranks --missing-release` asks for it. It makes
// releases relaxed, so that data written before a signal is no longer ordered before the signal.
#pragma once

namespace distmk {

#ifdef DISTMK_PLANTED_BUG
inline bool missing_release = false;
#else
constexpr bool missing_release = false;
#endif

}  // namespace distmk
