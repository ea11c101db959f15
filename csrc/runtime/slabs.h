// How the rows of a matrix are dealt to slabs (Partition in distmk/graph/partition.py). `Args`: arguments of a matrix
// product.
#pragma once
#include "platform/platform.h"

namespace distmk {

// Pairs of rows after the reduced slabs.
template <class Args>
DISTMK_FN uint32_t num_pairs(const Args& args) {
  return (args.num_rows - args.num_reduced * args.reduced_rows + 1) / 2;
}
// First row of a slab; for the index past the last slab, the number of rows.
template <class Args>
DISTMK_FN uint32_t slab_begin(const Args& args, uint32_t slab) {
  if (slab < args.num_reduced) return slab * args.reduced_rows;
  const uint32_t num_others = args.num_slabs - args.num_reduced, other = slab - args.num_reduced;
  const uint32_t begin = args.num_reduced * args.reduced_rows + 2 * (num_pairs(args) * other / num_others);
  return begin < args.num_rows ? begin : args.num_rows;
}

// Rows of gate and up that give one column of a gated product. In a slab of 2h rows, row i is gate's row i and row h +
// i is up's.
struct GateUp {
  uint32_t gate, up;

  template <class Args>
  DISTMK_FN GateUp(const Args& args, uint32_t column) {
    const uint32_t reduced = args.num_reduced * args.reduced_rows, num_others = args.num_slabs - args.num_reduced;
    const uint32_t slab = 2 * column < reduced
                              ? 2 * column / args.reduced_rows
                              : args.num_reduced + ((column - reduced / 2 + 1) * num_others - 1) / num_pairs(args);
    const uint32_t begin = slab_begin(args, slab), half = (slab_begin(args, slab + 1) - begin) / 2;
    gate = begin / 2 + column;
    up = gate + half;
  }
};

}  // namespace distmk
