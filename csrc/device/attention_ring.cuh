// A share of attention that comes through the ring. A warp has the first of its chunks in registers, so that the stage
// is free for what comes behind, and takes the next straight from the ring beside it, where their products fill each
// other's waits.
#pragma once
#include "device/attention_tile.cuh"
#include "device/shared.cuh"

namespace distmk {
namespace attention {

// A warp's way through the chunks of its share.
struct ChunkStages {
  RingPlace<NUM_STAGES> stage;  // of the chunk it is at
  uint32_t turn;

  DISTMK_FN explicit ChunkStages(const Work& w)
      : stage(shared().places[threadIdx.x / 32].stage.after(w.chunk_turn() / 2)), turn(w.chunk_turn()) {}

  // The chunk, once it is there.
  DISTMK_FN NearLines await(const Work& w) const {
    barrier_wait(&shared().ring.full[stage.slot], stage.parity);
    const char* slot = shared().slots + stage.slot * STAGE_BYTES;
    return {w, reinterpret_cast<const __nv_bfloat16*>(slot + turn % 2 * 2 * w.chunk_bytes())};
  }
  // Nothing more is read of it. A stage with one chunk is given back as a whole.
  DISTMK_FN void give_back(const Work& w) const {
    warp_arrive(&shared().ring.empty[stage.slot], turn % 2 == 0 && turn + 1 == w.num_chunks() ? 2 : 1);
  }
  DISTMK_FN bool has_next(const Work& w) const { return turn + NUM_WARPS < w.num_chunks(); }
  DISTMK_FN void step() {
    stage = stage.after(NUM_WARPS / 2);
    turn += NUM_WARPS;
  }
};

// The chunk into registers.
DISTMK_FN void take(const Work& w, const ChunkStages& ring, Tile& tile) { load_chunk(w, ring.await(w), tile); }
DISTMK_FN void take_first(const Work& w, Tile& tile) { take(w, ChunkStages(w), tile); }

// Scores over the chunk in registers and, beside it, over `near`.
DISTMK_FN void multiply_two(const Work& w, const Tile& tile, const NearLines& near, float (&scores)[4][4]) {
  const uint32_t lane = w.lane();
  const __nv_bfloat16* lines[2] = {near.key(key_place(lane, 0)), near.key(key_place(lane, 1))};
  const uint32_t exchanged = keys_exchanged(w, lane);
  multiply_keys(
      w,
      [&](uint32_t i, uint32_t j) {
        return i < 2 ? tile.k[i][j] : near.load(lines[i % 2] + place_in_line(w, key_element(lane, j), exchanged));
      },
      scores);
}

// This warp is done with a share's stages.
DISTMK_FN void leave_stages(const Work& w) {
  constexpr uint32_t MOST = RingPlace<NUM_STAGES>::MOST_STEPS;
  Places places = shared().places[threadIdx.x / 32];
  for (uint32_t left = (w.num_chunks() + 1) / 2; left; left -= min(left, MOST))
    places.stage = places.stage.after(min(left, MOST));
  keep_places(places);
}

// One block of queries over this warp's chunks, of which the first is in registers. Others hold no new positions.
DISTMK_FN void attend_ring(const Work& w, uint32_t first_query, Tile& tile, Partial& partial) {
  ChunkStages ring(w);
  ring.give_back(w);
  const uint32_t last = w.first_new() + w.row_of(first_query + group_of_lane());  // position this query may see
#pragma unroll 1
  while (true) {
    const uint32_t chunk = w.chunk_of(ring.turn);
    const bool whole = is_cached(w, chunk), two = ring.has_next(w);
    if (!whole) patch_keys(w, chunk, tile);
    NearLines near{w, w.new_key(0)};  // there is no other: scores that nobody looks at
    if (two) {
      ring.step();
      near.chunk = ring.await(w).chunk;
    }
    float scores[4][4] = {};
    multiply_two(w, tile, near, scores);
    uint32_t weights[2][2][2];
    partial.weigh<false>(chunk, w.begin, min(w.end, last + 1), two, scores, weights);
    if (!whole) patch_values(w, chunk, tile);
    partial.add_values(tile, w.head_dim(), weights[0]);
    if (two) {
      load_values(w, near, tile);
      partial.add_values(tile, w.head_dim(), weights[1]);
      ring.give_back(w);
    }
    if (!ring.has_next(w)) break;
    ring.step();
    take(w, ring, tile);
    ring.give_back(w);
  }
  leave_stages(w);
}

}  // namespace attention
}  // namespace distmk
