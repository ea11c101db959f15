// Row by row in a wide iteration.
#include "runtime/context.h"

namespace distmk {

void body_wide_embed(Context&, const WideEmbedArgs&) {}
void body_wide_sum(Context&, const WideSumArgs&) {}
void body_select_rows(Context&, const SelectRowsArgs&) {}
void body_argmax_rows(Context&, const ArgmaxRowsArgs&) {}

}  // namespace distmk
