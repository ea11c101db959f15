// Mainloop of a wide product: C[m, n] = sum over k of W[m, k] X[n, k], W and X in bf16, C in float32. The eight
// consumer warps are two warpgroups of 64 weight rows, an M tile of 16 rows a warp, times all tokens of the N tile.
// Weights go from the A ring to registers, as the packed order gives a lane its fragments of two k16 steps at once;
// activations are read from the B ring by the tensor cores.
#pragma once
#include "device/wide/rings.cuh"
#include "platform/wgmma.cuh"

namespace distmk {
namespace wide {

constexpr uint32_t STEP_K = 32;  // columns of a pair of k16 steps
static_assert(WIDE_COLS == 2 * STEP_K, "two pairs of steps a block");

// The row of the M tile in which this lane holds the fragment's row g, g its group of four lanes; row g + 8 lies 8 rows
// below. Two groups that read together differ in the swizzle's highest bit, so that they meet in no bank.
DISTMK_FN uint32_t fragment_row(uint32_t lane) { return lane / 8 + lane / 4 % 2 * 4; }

// This lane's weights in STEP_K columns, as they are packed: of a row and of the one 8 rows below.
struct PackedWeights {
  uint4 upper, lower;
};

// This lane's way through the A ring.
class WeightReader {
 public:
  DISTMK_FN explicit WeightReader(uint32_t a_count) : at_{a_count} {}

  // Waits for the next K tile, of `num_blocks` blocks of WIDE_COLS columns.
  DISTMK_FN void open(uint32_t num_blocks) {
    const uint32_t lane = threadIdx.x % 32, row = fragment_row(lane), pitch = num_blocks * WIDE_COLS * 2;
    barrier_wait(shared_address(&rings().a_full[at_.slot()]), at_.parity());
    next_ = shared_address(shared().stages) + at_.slot() * A_SLOT_BYTES + threadIdx.x / 32 * A_TILE_BYTES +
            row * pitch + (lane ^ row) % 4 * 16 + row / 4 * 64;
    below_ = 8 * pitch;
  }
  // Blocks are read half by half, in the order of k; in rows 4 to 7 the second half comes first.
  DISTMK_FN PackedWeights load_first_half() const { return {load_shared(next_), load_shared(next_ + below_)}; }
  DISTMK_FN PackedWeights load_second_half() {
    const uint32_t at = next_ ^ 64;
    next_ += WIDE_COLS * 2;
    return {load_shared(at), load_shared(at + below_)};
  }
  DISTMK_FN void release() {
    warp_arrive(&rings().a_empty[at_.slot()]);
    ++at_.count;
  }

 private:
  RingPosition<A_SLOTS> at_;
  uint32_t next_, below_;
};

// Starts the products of half a block.
template <uint32_t N>
DISTMK_FN void multiply_half(float (&acc)[N / 2], const PackedWeights& w, uint32_t b_slot, uint32_t half) {
  const uint32_t first[4] = {tensor::operand(w.upper.x), tensor::operand(w.lower.x), tensor::operand(w.upper.y),
                             tensor::operand(w.lower.y)};
  const uint32_t second[4] = {tensor::operand(w.upper.z), tensor::operand(w.lower.z), tensor::operand(w.upper.w),
                              tensor::operand(w.lower.w)};
  tensor::begin<N>();
  tensor::multiply<N>(acc, first, b_slot, 2 * half);
  tensor::multiply<N>(acc, second, b_slot, 2 * half + 1);
  tensor::commit<N>();
}

// While half a block is multiplied, the next half's weights are loaded. Then a warpgroup waits for its products, so
// that their registers can be used again; those of the other warpgroup keep the tensor cores busy.
template <uint32_t N>
DISTMK_FN void multiply_blocks(float (&acc)[N / 2], uint32_t a_count, uint32_t b_count, uint32_t num_blocks) {
  WeightReader weights(a_count);
  RingPosition<num_b_slots(N)> b{b_count};
  weights.open(min(BLOCKS_PER_TILE, num_blocks));
  if (a_count == 0) mark(Mark::INPUTS);
  PackedWeights next = weights.load_first_half();
#pragma unroll 1
  for (uint32_t block = 1;; ++block) {
    const uint32_t b_slot = shared_address(shared().stages) + A_BYTES + b.slot() * b_slot_bytes(N);
    barrier_wait(shared_address(&rings().b_full[b.slot()]), b.parity());
    if (b.count == 0) mark(Mark::FIRST);
    multiply_half<N>(acc, next, b_slot, 0);
    next = weights.load_second_half();
    tensor::await<N>();
    multiply_half<N>(acc, next, b_slot, 1);
    if (block % BLOCKS_PER_TILE == 0 || block == num_blocks) {
      weights.release();
      if (block < num_blocks) weights.open(min(BLOCKS_PER_TILE, num_blocks - block));
    }
    if (block < num_blocks) next = weights.load_first_half();
    tensor::await<N>();
    warp_arrive(&rings().b_empty[b.slot()]);
    ++b.count;
    if (block == num_blocks) break;
  }
}

template <uint32_t N>
DISTMK_FN void skip_block(uint32_t b_count) {
  const RingPosition<num_b_slots(N)> b{b_count};
  barrier_wait(&rings().b_full[b.slot()], b.parity());
  warp_arrive(&rings().b_empty[b.slot()]);
}

// For a warpgroup without M tiles: takes part in the rings and nothing else.
template <uint32_t N>
DISTMK_FN void skip_blocks(uint32_t a_count, uint32_t b_count, uint32_t num_blocks) {
#pragma unroll 1
  for (uint32_t block = 0; block < num_blocks; ++block) {
    if (block % BLOCKS_PER_TILE == 0) {
      const RingPosition<A_SLOTS> a{a_count++};
      barrier_wait(&rings().a_full[a.slot()], a.parity());
      warp_arrive(&rings().a_empty[a.slot()]);
    }
    skip_block<N>(b_count + block);
  }
}

// The output of a job over the A ring: float32 [tokens][OUTPUT_ROWS], rows swizzled by the token so that neither
// writing nor reading it has bank conflicts.
constexpr uint32_t OUTPUT_ROWS = JOB_TILES * M_TILE;
static_assert(MAX_TOKENS * OUTPUT_ROWS * sizeof(float) <= A_BYTES, "the output leaves the B ring alone");
DISTMK_FN uint32_t output_swizzle(uint32_t token) { return token / 2 % 4 * 8; }
DISTMK_FN float* output_of(uint32_t token) { return reinterpret_cast<float*>(shared().stages) + token * OUTPUT_ROWS; }

template <uint32_t N>
DISTMK_FN void write_output(const float (&acc)[N / 2]) {
  const uint32_t lane = threadIdx.x % 32, token = lane % 4 * 2;
  const uint32_t row = threadIdx.x / 32 * M_TILE + fragment_row(lane), swizzle = output_swizzle(token);
  float *upper = output_of(token) + (row ^ swizzle), *lower = output_of(token) + ((row + 8) ^ swizzle);
#pragma unroll
  for (uint32_t n = 0; n < N / 8; ++n) {
    const uint32_t at = n * 8 * OUTPUT_ROWS;
    upper[at] = acc[4 * n], upper[at + OUTPUT_ROWS] = acc[4 * n + 1];
    lower[at] = acc[4 * n + 2], lower[at + OUTPUT_ROWS] = acc[4 * n + 3];
  }
}

// A job of `num_tiles` M tiles and `num_blocks` blocks of columns, of which the first are number a_count and b_count of
// their rings. Leaves the output in shared memory.
template <uint32_t N>
DISTMK_FN void multiply_job(uint32_t num_tiles, uint32_t a_count, uint32_t b_count, uint32_t num_blocks) {
  const bool active = threadIdx.x / 128 * 4 < num_tiles;
  float acc[N / 2];
#pragma unroll
  for (float& sum : acc) sum = 0.0f;
  if (!num_blocks)
    skip_block<N>(b_count);
  else if (active)
    multiply_blocks<N>(acc, a_count, b_count, num_blocks);
  else
    skip_blocks<N>(a_count, b_count, num_blocks);
  mark(Mark::LAST);
  barrier_sync<NUM_CONSUMERS>();  // all weights have been read
  if (active) write_output<N>(acc);
}

}  // namespace wide
}  // namespace distmk
