// Attention of a wide iteration.
#include "runtime/context.h"

namespace distmk {

void body_wide_append(Context&, const WideAppendArgs&) {}
void body_wide_attention(Context&, const WideAttentionArgs&) {}

}  // namespace distmk
