// Linear layers of a wide iteration.
#include "runtime/context.h"

namespace distmk {

void body_wide_linear(Context&, const WideLinearArgs&) {}

}  // namespace distmk
