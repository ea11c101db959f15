// A single row's split that comes through the ring. A warp has the first of its chunks in registers, so that the stage
// is free for what comes behind, and takes the next straight from the ring beside it, where their products fill each
// other's waits.
#pragma once
#include "device/attention/kv_load.cuh"
#include "device/core/shared.cuh"

namespace distmk {
namespace attention {

// A warp's way through the chunks of its share, each of which has its keys before its values.
template <class W>
struct ChunkStages {
  using Keys = KeyPieces<W, FromRing>;
  using Values = ValuePieces<W, FromRing>;
  const W& w;
  PipelineState<NUM_STAGES> stage;  // of the chunk it is at
  uint32_t turn;

  DISTMK_FN explicit ChunkStages(const W& work)
      : w(work), stage(consumer_state().stage.advanced(work.chunk_turn() / 2)), turn(work.chunk_turn()) {}

  // The chunk, once it is there.
  DISTMK_FN const __nv_bfloat16* await() const {
    barrier_wait(&shared().ring.full[stage.index], stage.phase);
    const char* slot = shared().slots + stage.index * STAGE_BYTES;
    return reinterpret_cast<const __nv_bfloat16*>(slot + turn % 2 * 2 * w.chunk_bytes());
  }
  DISTMK_FN Keys keys(const __nv_bfloat16* chunk) const { return {w, chunk}; }
  DISTMK_FN Values values(const __nv_bfloat16* chunk) const { return {w, chunk + CHUNK * W::DIM}; }
  // The chunk into registers.
  DISTMK_FN void take(Tile& tile) const {
    const __nv_bfloat16* chunk = await();
    keys(chunk).load(tile);
    values(chunk).load(tile);
  }
  // Nothing more is read of it. A stage with one chunk is given back as a whole.
  DISTMK_FN void consumer_release() const {
    warp_arrive(&shared().ring.empty[stage.index], turn % 2 == 0 && turn + 1 == w.num_chunks() ? 2 : 1);
  }
  DISTMK_FN bool has_next() const { return turn + NUM_WARPS < w.num_chunks(); }
  DISTMK_FN void step() {
    stage = stage.advanced(NUM_WARPS / 2);
    turn += NUM_WARPS;
  }
};

// This warp is done with a share's stages.
template <class W>
DISTMK_FN void leave_stages(const W& w) {
  constexpr uint32_t MOST = PipelineState<NUM_STAGES>::MOST_STEPS;
  ConsumerState consumer = consumer_state();
  for (uint32_t left = (w.num_chunks() + 1) / 2; left; left -= min(left, MOST))
    consumer.stage = consumer.stage.advanced(min(left, MOST));
  store_consumer_state(consumer);
}

// This warp's chunks, of which the first is in registers. Only the split's last one, which is the first turn's, may
// hold new positions or nobody's; of those before the split's first one the query sees none.
template <class W>
DISTMK_FN void attend_ring(const W& w, Tile& tile, Partial& partial) {
  ChunkStages<W> ring(w);
  ring.consumer_release();
#pragma unroll 1
  while (true) {
    const uint32_t chunk = w.chunk_of(ring.turn);
    const bool whole = ring.turn != 0, two = ring.has_next();
    if (!whole) patch_keys(w, chunk, tile);
    const __nv_bfloat16* other = w.new_key(0);  // there is none, perhaps: scores that nobody looks at
    if (two) {
      ring.step();
      other = ring.await();
    }
    const auto keys = ring.keys(other);
    float scores[4][4] = {};
    multiply_keys(w, [&](uint32_t i, uint32_t j) { return i < 2 ? tile.k[i][j] : keys.load(i % 2, j); }, scores);
    uint32_t weights[2][2][2];
    partial.template weigh<false>(chunk, w.begin, w.end, two, scores, weights);
    if (!whole) patch_values(w, chunk, tile);
    partial.add_values(tile, W::DIM, weights[0]);
    if (two) {
      ring.values(other).load(tile);
      partial.add_values(tile, W::DIM, weights[1]);
      ring.consumer_release();
    }
    if (!ring.has_next()) break;
    ring.step();
    ring.take(tile);
    ring.consumer_release();
  }
  leave_stages(w);
}

}  // namespace attention
}  // namespace distmk
