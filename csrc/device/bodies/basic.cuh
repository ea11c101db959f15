// Tasks that move or add up a little data, by all threads of a team.
#pragma once
#include "device/arriving.cuh"
#include "device/candidates.cuh"
#include "device/shared.cuh"
#include "runtime/batcher.h"
#include "runtime/context.h"

namespace distmk {

DISTMK_FN uint32_t rows_of(const Batch* batch) { return batch ? batch->num_rows : 1; }

DISTMK_FN void body_nop(Context&, const NopArgs&) {}

DISTMK_FN void body_put(Context& context, const PutArgs& args) {
  context.push(args.dst_rank, args.dst, context.at<void>(args.src), args.num_bytes);
}

DISTMK_FN void body_affine(Context& context, const AffineArgs& args) {
  const auto* src = context.at<float>(args.src);
  auto* dst = context.at<float>(args.dst);
  for (uint32_t i = context.team.index; i < args.num; i += context.team.size)
    dst[i] = __ldcg(src + i) * args.scale + args.shift;
}

// Several elements a thread at once: a sine waits for the one before it, and a worker has few warps to fill the wait.
DISTMK_FN void body_sine(Context& context, const SineArgs& args) {
  constexpr uint32_t AT_ONCE = 4;
  const auto* src = context.at<float>(args.src);
  auto* dst = context.at<float>(args.dst);
  const uint32_t step = context.team.size;
  for (uint32_t first = context.team.index; first < args.num; first += AT_ONCE * step) {
    float values[AT_ONCE] = {};
#pragma unroll
    for (uint32_t i = 0; i < AT_ONCE; ++i)
      if (first + i * step < args.num) values[i] = __ldcg(src + first + i * step);
    DISTMK_ROLLED
    for (uint32_t n = 0; n < args.times; ++n)
#pragma unroll
      for (uint32_t i = 0; i < AT_ONCE; ++i) values[i] = sinf(values[i]);
#pragma unroll
    for (uint32_t i = 0; i < AT_ONCE; ++i)
      if (first + i * step < args.num) dst[first + i * step] = values[i];
  }
}

// Whether a sum takes its elements as they arrive: having seen them it knows as much as if it had waited.
DISTMK_FN bool sum_arrives(const RankState& state, const SumArgs& args) { return args.arriving && !state.far; }

// All blocks of up to IN_FLIGHT are on their way before the first is added; for more it is a trip more.
DISTMK_FN void body_sum(Context& context, const SumArgs& args) {
  constexpr uint32_t IN_FLIGHT = 4;
  const uint32_t count = rows_of(context.batch(args.batch)) * args.num, num_blocks = args.num_blocks;
  auto* blocks = context.at<float>(args.blocks);
  const uint64_t step = args.block_stride / sizeof(float);
  auto* dst = context.at<float>(args.dst);
  const ArrivingVector rounded{context.at<__nv_bfloat16>(args.rounded), context.at<__nv_bfloat16>(args.cleared)};
  const bool arriving = sum_arrives(context.rank_state, args);
  if (arriving)
    context.look_for_inputs();
  else if (!context.inputs_ready())
    return;
#pragma unroll 1
  for (uint32_t i = context.team.index; i < count; i += context.team.size) {
    const uint32_t row = i < args.num ? 0 : i / args.num, column = i - row * args.num;  // divisions are slow
    float* out = dst + uint64_t{row} * args.dst_stride + column;
    const uint32_t place = opaque(row * args.rounded_stride + column);  // here, where nobody waits for it yet
    float sum = args.add ? __ldcg(out) : 0.0f;
#pragma unroll 1
    for (uint32_t first = 0; first < num_blocks; first += IN_FLIGHT) {
      float* const element = blocks + first * step + i;
      const uint32_t left = num_blocks - first;
      float value[IN_FLIGHT];
      context.look(arriving, [&] {
        bool all = true;
#pragma unroll
        for (uint32_t b = 0; b < IN_FLIGHT; ++b) value[b] = b < left ? load_arriving(element + b * step) : -0.0f;
#pragma unroll
        for (uint32_t b = 0; b < IN_FLIGHT; ++b) all &= __float_as_uint(value[b]) != 0;
        return all;
      });
#pragma unroll
      for (uint32_t b = 0; b < IN_FLIGHT; ++b) sum += value[b];
    }
    if (rounded) rounded.store(place, sum);  // first: others look for it
    *out = sum;
#pragma unroll 1
    for (uint32_t b = 0; args.arriving && b < num_blocks; ++b) store_arriving(blocks + b * step + i, 0.0f);
  }
  if (arriving) context.inputs_found();
}

DISTMK_FN void body_embed(Context& context, const EmbedArgs& args) {
  const Batch* batch = context.batch(args.batch);
  const uint32_t num_rows = rows_of(batch);
  const auto* table = context.at<__nv_bfloat16>(args.table);
  const ArrivingVector rounded{context.at<__nv_bfloat16>(args.rounded), context.at<__nv_bfloat16>(args.cleared)};
  const bool push = args.epilogue == static_cast<uint32_t>(Epilogue::PUSH);
  for (uint32_t row = 0; row < num_rows; ++row) {
    const auto token = static_cast<uint32_t>(batch->rows[row].token);
    const bool here = token >= args.first_token && token < args.last_token;
    const __nv_bfloat16* from = table + uint64_t{token - args.first_token} * args.k + args.col_begin;
    for (uint32_t i = context.team.index; i < args.n; i += context.team.size) {
      const float value = here ? __bfloat162float(from[i]) : 0.0f;
      if (!push) {
        context.at<float>(args.out)[uint64_t{row} * args.out_stride + i] = value;
        if (rounded) rounded.store(uint64_t{row} * args.rounded_stride + i, value);
        continue;
      }
      for (uint32_t rank = 0; rank < context.num_ranks(); ++rank)
        if (float* out = context.peer<float>(rank, args.out)) store_element(out + row * args.n + i, value);
    }
  }
  if (push) context.push_far(args.out, uint64_t{num_rows} * args.n * sizeof(float));
}

// A warp a row. The best goes straight to rank 0, or where no pointer reaches that, from its own place on this rank's
// heap, where the network reads it.
DISTMK_FN void body_sample(Context& context, const SampleArgs& args) {
  constexpr uint32_t IN_FLIGHT = 5;  // enough for a task on each of 132 workers at once
  const uint32_t num_rows = rows_of(context.batch(args.batch)), lane = context.team.index % 32;
  const auto* candidates = context.at<uint64_t>(args.candidates);
  auto* near = context.peer<Candidate>(0, args.out);
  auto* out = near ? near : context.at<Candidate>(args.out);
#pragma unroll 1
  for (uint32_t row = context.team.index / 32; row < num_rows; row += NUM_WARPS) {
    Candidate best = {-INFINITY, -1};
#pragma unroll 1
    for (uint32_t first = lane; first < args.num_tasks; first += 32 * IN_FLIGHT) {
      uint64_t packed[IN_FLIGHT];
#pragma unroll
      for (uint32_t i = 0; i < IN_FLIGHT; ++i)
        if (first + 32 * i < args.num_tasks) packed[i] = __ldcg(candidates + (first + 32 * i) * MAX_ROWS + row);
#pragma unroll
      for (uint32_t i = 0; i < IN_FLIGHT; ++i)
        if (first + 32 * i < args.num_tasks) best = better_of(best, *reinterpret_cast<const Candidate*>(&packed[i]));
    }
    for (uint32_t step = 16; step; step >>= 1) best = better_of(best, exchanged(best, step));
    if (lane == 0) out[row] = best;
  }
  if (!near) {
    context.team.sync();
    context.put(0, args.out, out, sizeof(Candidate) * MAX_ROWS);
  }
  context.tell(0);
}

// Only schedulers run it; their single thread goes through it step by step, so it works on copies in shared memory.
DISTMK_FN void body_prepare(Context& context, const PrepareArgs& args) {
  PrepareCopies& copies = shared().prepare;
  const Team& team = context.team;
  const auto* candidates = context.at<Candidate>(args.candidates);
  const bool fits = args.num_ranks <= NEAR_RANKS;
  // Later it still has there what it left.
  if (context.iteration == context.params().first_iteration) {
    copy_bytes(team, &copies.state, context.at<void>(args.state), sizeof(BatcherState));
    copy_bytes(team, &copies.batch, context.at<void>(args.batch), sizeof(Batch));
  }
  if (fits) copy_bytes(team, copies.candidates, candidates, args.num_ranks * MAX_ROWS * sizeof(Candidate));
  team.sync();
  prepare_batch(context, args, {&copies.state, &copies.batch, fits ? copies.candidates : candidates});
}

}  // namespace distmk
