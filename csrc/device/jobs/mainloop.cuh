// Mainloop of a GEMM in jobs (linear_jobs.cuh): C[m, n] = sum over k of W[m, k] X[n, k], with W and X in bf16 and C in
// float32. The eight consumer warps are two warpgroups of 64 weight rows. Each warp multiplies an M tile of 16 rows by
// all tokens of the N tile. A `Reader` takes weights from the A ring to registers, where formats of packed tiles are
// decoded. Tensor cores read activations straight from the B ring.
//
// A Reader is this lane's read position in the A ring: WeightReader for bf16, PackedReader<F> for a format F of packed
// tiles (packed_reader.cuh). The mainloop is compiled for each.
#pragma once
#include "device/core/marks.cuh"
#include "device/jobs/rings.cuh"
#include "platform/wgmma.cuh"

namespace distmk {
namespace jobs {

constexpr uint32_t STEP_K = 32;  // columns of a pair of k16 steps
static_assert(ACTIVATION_BLOCK_COLS == 2 * STEP_K, "two pairs of steps a block");

// This lane's weights in STEP_K columns, four pairs of bf16 from a row and from the row 8 rows further down. The first
// two pairs are operands of the first k16 step.
struct WeightFragments {
  uint4 upper, lower;
};

// A warp's position in the A ring. A warp without an M tile multiplies whatever is in NO_WEIGHTS, a region that nobody
// writes.
class TilePosition {
 public:
  DISTMK_FN TilePosition(uint32_t phases, uint32_t num_tiles, uint32_t tile)
      : at_(phases, rings().num_tiles, num_tiles, tile), has_tile_(tile < num_tiles) {}

  // Waits for the next K tile.
  DISTMK_FN void await() const {
    if (has_tile_) barrier_wait(shared_address(&rings().a_full[at_.place()]), at_.parity());
  }
  DISTMK_FN uint32_t tile() const {
    return has_tile_ ? shared_address(shared().at<Overlay::PRODUCT_RINGS>()) + at_.place() * A_TILE_BYTES
                     : shared_address(shared().at<Overlay::NO_WEIGHTS>());
  }
  DISTMK_FN void release(uint32_t arrivals) {
    if (has_tile_) warp_arrive(&rings().a_empty[at_.place()], arrivals), at_.advance();
  }

 private:
  WeightPosition at_;
  bool has_tile_;
};

// Reads tiles of bf16. The packed order gives a lane its fragments of two k16 steps at once.
class WeightReader : public TilePosition {
 public:
  using Loaded = WeightFragments;  // of a block, before its products: the first half

  // The row of the M tile that is row g of this lane's fragment, where g is the lane's group of four. Row g + 8 is 8
  // rows further down. With this order, two groups that read together differ in the swizzle's highest bit and share no
  // bank.
  DISTMK_FN static uint32_t fragment_row(uint32_t lane) { return lane / 8 + lane / 4 % 2 * 4; }

  using TilePosition::TilePosition;
  // The sums of bf16 weights have no factors.
  DISTMK_FN static void write_factors(const LinearJobsArgs&, const JobPlan&) {}
  template <uint32_t COUNT>
  DISTMK_FN static void multiply_by_factors(float (&)[COUNT], uint32_t) {}

  // Waits for the next K tile, which has `num_blocks` blocks of ACTIVATION_BLOCK_COLS columns, and begins at block
  // `first`.
  DISTMK_FN void open(uint32_t num_blocks, uint32_t first) {
    const uint32_t lane = threadIdx.x % 32, row = fragment_row(lane), pitch = num_blocks * ACTIVATION_BLOCK_COLS * 2;
    await();
    next_ = tile() + row * pitch + (lane ^ row) % 4 * 16 + row / 4 * 64 + first * ACTIVATION_BLOCK_COLS * 2;
    below_ = 8 * pitch;
  }
  // Blocks are read by halves, in the order of k. In rows 4 to 7, the swizzle puts the second half first.
  DISTMK_FN Loaded load() const { return {load_shared(next_), load_shared(next_ + below_)}; }
  // Also moves on by `step` blocks.
  DISTMK_FN WeightFragments load_second_half(uint32_t step) {
    const uint32_t at = next_ ^ 64;
    next_ += step * ACTIVATION_BLOCK_COLS * 2;
    return {load_shared(at), load_shared(at + below_)};
  }

 private:
  uint32_t next_, below_;
};
static_assert(A_TILE_BYTES <= overlay_bytes(Overlay::NO_WEIGHTS), "");

// Starts the products of half a block.
template <uint32_t N>
DISTMK_FN void multiply_half(float (&acc)[N / 2], const WeightFragments& w, uint32_t b_slot, uint32_t half) {
  const uint32_t first[4] = {tensor::operand(w.upper.x), tensor::operand(w.lower.x), tensor::operand(w.upper.y),
                             tensor::operand(w.lower.y)};
  const uint32_t second[4] = {tensor::operand(w.upper.z), tensor::operand(w.lower.z), tensor::operand(w.upper.w),
                              tensor::operand(w.lower.w)};
  tensor::begin<N>();
  tensor::multiply<N>(acc, first, b_slot, 2 * half);
  tensor::multiply<N>(acc, second, b_slot, 2 * half + 1);
  tensor::commit<N>();
}

// Starts the products of a block; of its first half they may have ended. While that is multiplied, the second half's
// weights are loaded. The reader moves on by `step` blocks.
template <uint32_t N>
DISTMK_FN void multiply_block(float (&acc)[N / 2], WeightReader& weights, WeightFragments& w, uint32_t b_slot,
                              uint32_t step) {
  multiply_half<N>(acc, w, b_slot, 0);
  w = weights.load_second_half(step);
  tensor::await<N>();
  multiply_half<N>(acc, w, b_slot, 1);
}

// While a block is multiplied, the next block's weights are loaded. Then the warpgroup waits for its products, so that
// their registers are free again. The other warpgroup's products keep the tensor cores busy meanwhile. SHARED: both
// warpgroups have the same M tiles, and each multiplies every other block.
template <uint32_t N, bool SHARED, class Reader>
DISTMK_FN void multiply_blocks(float (&acc)[N / 2], uint32_t num_tiles, uint32_t phases, SlotPosition b,
                               uint32_t num_blocks) {
  constexpr uint32_t STEP = SHARED ? NUM_GROUPS : 1, A_ARRIVALS = NUM_GROUPS / STEP, B_ARRIVALS = STEP;
  const uint32_t warp = threadIdx.x / 32, tile = SHARED ? warp % GROUP_WARPS : warp;
  const uint32_t first = SHARED ? warp / GROUP_WARPS : 0;
  Reader weights(phases, num_tiles, tile);
  if (first) b.advance(rings().num_slots, first);
  if (first < num_blocks) {
    weights.open(min(BLOCKS_PER_TILE, num_blocks), first);
    typename Reader::Loaded next = weights.load();
#pragma unroll 1
    for (uint32_t block = first + STEP;; block += STEP) {
      const uint32_t b_slot =
          shared_address(shared().at<Overlay::PRODUCT_RINGS>()) + rings().b_begin + b.slot * b_slot_bytes(N);
      barrier_wait(shared_address(&rings().b_full[b.slot]), b.parity);
      if (block == first + STEP) mark(Mark::FIRST);
      multiply_block<N>(acc, weights, next, b_slot, STEP);
      if (block % BLOCKS_PER_TILE == first || block >= num_blocks) {
        weights.release(A_ARRIVALS);
        if (block < num_blocks) weights.open(min(BLOCKS_PER_TILE, num_blocks + first - block), first);
      }
      if (block < num_blocks) next = weights.load();
      tensor::await<N>();
      warp_arrive(&rings().b_empty[b.slot], B_ARRIVALS);
      b.advance(rings().num_slots, STEP);
      if (block >= num_blocks) break;
    }
  }
  if (first && num_blocks % BLOCKS_PER_TILE == 1) {  // the last K tile has no block for this warpgroup
    weights.await();
    weights.release(A_ARRIVALS);
  }
}
static_assert(NUM_GROUPS == 2 && BLOCKS_PER_TILE % NUM_GROUPS == 0, "");

// The output of a job: float32 [N tokens][OUTPUT_ROWS]. Rows are swizzled by the token, so that neither writing nor
// reading the output has bank conflicts.
DISTMK_FN uint32_t output_swizzle(uint32_t token) { return token / 2 % 4 * 8; }
DISTMK_FN float* output_of(uint32_t token) {
  return shared().at<Overlay::PRODUCT_RINGS, float>() + token * OUTPUT_ROWS;
}

// Calls visit(sum, element of the output) for each of this lane's sums, as sums of M tile `tile`.
template <uint32_t N, class Reader, class Visit>
DISTMK_FN void visit_output(float (&acc)[N / 2], uint32_t tile, const Visit& visit) {
  const uint32_t lane = threadIdx.x % 32, token = lane % 4 * 2;
  const uint32_t row = output_begin(N) / sizeof(float) + tile * M_TILE + Reader::fragment_row(lane);
  const uint32_t swizzle = output_swizzle(token);
  float *upper = output_of(token) + (row ^ swizzle), *lower = output_of(token) + ((row + 8) ^ swizzle);
#pragma unroll
  for (uint32_t n = 0; n < N / 8; ++n) {
    const uint32_t at = n * 8 * OUTPUT_ROWS;
    visit(acc[4 * n], upper[at]), visit(acc[4 * n + 1], upper[at + OUTPUT_ROWS]);
    visit(acc[4 * n + 2], lower[at]), visit(acc[4 * n + 3], lower[at + OUTPUT_ROWS]);
  }
}

// Multiplies a job of `num_tiles` M tiles and `num_blocks` blocks of columns, and leaves its output in shared memory.
// `phases`: parities of the A ring. `b`: the slot of the job's first block. If one warpgroup can hold all M tiles, both
// share them, and the second one's sums are added to the first one's.
template <uint32_t N, class Reader>
DISTMK_FN void multiply_job(uint32_t num_tiles, uint32_t phases, const SlotPosition& b, uint32_t num_blocks) {
  const bool is_shared = num_tiles <= GROUP_WARPS;
  float acc[N / 2];
#pragma unroll
  for (float& sum : acc) sum = 0.0f;
  if (is_shared)
    multiply_blocks<N, true, Reader>(acc, num_tiles, phases, b, num_blocks);
  else
    multiply_blocks<N, false, Reader>(acc, num_tiles, phases, b, num_blocks);
  mark(Mark::LAST);
  const uint32_t warp = threadIdx.x / 32;
  const auto write = [](float sum, float& out) { out = sum; };
  barrier_sync<NUM_CONSUMERS>();  // the rings and the last job's output have been read
  Reader::multiply_by_factors(acc, is_shared ? warp % GROUP_WARPS : warp);
  if (!is_shared || warp >= GROUP_WARPS) visit_output<N, Reader>(acc, warp, write);
  if (!is_shared) return;
  barrier_sync<NUM_CONSUMERS>();
  if (warp >= GROUP_WARPS) return;
  visit_output<N, Reader>(acc, warp + GROUP_WARPS, [](float& sum, float other) { sum += other; });
  visit_output<N, Reader>(acc, warp, write);
}

}  // namespace jobs
}  // namespace distmk
