// Assigns split-KV attention instances to workers: computes the split of a worker's first instance and the cache rows
// of its K and V. Both depend on the batch metadata, not on the layer. So the dispatcher computes them once an
// iteration, before it issues the first attention task, and leaves them in shared memory. Consumers (params.cuh) and
// the loader read them. The loader streams the K and V of long splits through the weight pipeline.
#pragma once
#include "device/attention/params.cuh"

namespace distmk {
namespace attention {

// The loader's part in attention (device/core/loader.cuh).
struct InputStream {
  // Whether the dispatcher notifies the loader about a task. Both see all tasks of the worker's list in the same order.
  DISTMK_FN static bool handles(const TaskDesc& task) {
    return BULK_COPIES && task.type == static_cast<uint16_t>(TaskType::ATTENTION) && is_spread(task) &&
           reinterpret_cast<const AttentionArgs*>(task.args)->long_splits;
  }
  // Producer of keys and values, run by the loader. If the KvPath is PIPELINED, it streams K and V of the assigned
  // split, two tiles a stage. False: the worker has left.
  DISTMK_FN static bool stream(const RankState& state, const Team& lanes, Loader& loader, const TaskDesc& task) {
    AttentionAssignment& assignment = shared().attention_assignment;
    const uint32_t number = assignment.num_received.get(), slot = number % 2;
    while (!lanes.all(barrier_try_wait(&assignment.notified[slot], number / 2 % 2)))
      if (!lanes.all(!shared().pipeline.leave.get())) return false;
    const bool streams = assignment.streams[slot];
    lanes.sync();
    if (lanes.leader()) assignment.num_received.set(number + 1);
    lanes.sync();
    if (!streams) return true;
    Context context(state, lanes);
    const auto& args = *reinterpret_cast<const AttentionArgs*>(task.args);
    const Params p{assignment.split, context, args};
    const __nv_bfloat16 *k_cache = p.k_cache(), *v_cache = p.v_cache();
    const uint32_t num_tiles = p.num_tiles(), tile_bytes = p.kv_tile_bytes();
    fence_copies();
    uint32_t rows = 0;  // first cache rows of 32 steps' tiles, one tile per lane
    return loader.stream_stages((num_tiles + 1) / 2, [&](uint32_t stage, uint32_t dst, uint32_t full) {
      const uint32_t step = 2 * stage, in_stage = min(num_tiles - step, 2u);
      if (step % 32 == 0) rows = p.kv_row(p.tile_at(min(step + lanes.index, num_tiles - 1)) * KV_TILE);
      if (lanes.leader()) expect_bytes(full, 2 * in_stage * tile_bytes);
      lanes.sync();
      const uint32_t row = __shfl_sync(~0u, rows, step % 32 + lanes.index / 2 % 2);
      if (lanes.index < 2 * in_stage)
        copy_expected(dst + lanes.index * tile_bytes,
                      (lanes.index % 2 ? v_cache : k_cache) + uint64_t{row} * args.head_dim, tile_bytes, full);
    });
  }
};

// The dispatcher's part: keeps shared().attention_assignment up to date.
class AssignmentTracker {
 public:
  DISTMK_FN AssignmentTracker(const RankState& state, const Team& warp) : context_(state, warp) {}

  // Task `n` is about to be issued. Tasks up to n - 4 are done.
  DISTMK_FN void update_for(uint32_t n, const Action& action) {
    if (action.kind == ActionKind::LEAVE) return;
    num_listed_ += is_listed(*action.task.desc);
    if (action.task.desc->type != static_cast<uint16_t>(TaskType::ATTENTION)) return;
    const auto& args = *reinterpret_cast<const AttentionArgs*>(action.task.desc->args);
    bool assigned = false;
    // Only if a tile lies in one page: its first cache row then locates all of it.
    if (is_spread(*action.task.desc) && args.page_size >= KV_TILE) {
      assigned = is_current(action, args);
      // Consumers of the last spread attention task may still read the assignment, so only a task at least four behind
      // it in the worker's list replaces it. Issued tasks are not counted: just-in-time tasks in between would then
      // change the path, and with it the order of additions.
      if (!assigned && num_listed_ > last_ + 3) {
        assign(action, args);
        assigned = true;
      }
    }
    if (is_spread(*action.task.desc)) last_ = num_listed_;
    context_.team.sync();  // one lane has written what all lanes read below
    const bool notifies = InputStream::handles(*action.task.desc),
               pipelined = notifies && assigned && is_pipelined(args);
    const KvPath path = !assigned ? UNASSIGNED : pipelined ? PIPELINED : is_batch1(args) ? ONE_TILE_PER_WARP : ASSIGNED;
    if (context_.team.leader()) shared().attention_assignment.kv_path[handshake_slot(n)] = path;
    if (notifies) notify_loader(pipelined);
  }

 private:
  // The arguments that an assignment depends on, one word per lane: `num_q` to `window`, and `fused_combine_len`.
  static constexpr uint32_t FIRST_WORD = offsetof(AttentionArgs, num_q) / sizeof(uint32_t),
                            NUM_WORDS = offsetof(AttentionArgs, eps) / sizeof(uint32_t) - FIRST_WORD,
                            LAST_WORD = offsetof(AttentionArgs, fused_combine_len) / sizeof(uint32_t);
  static_assert(NUM_WORDS < 32, "");
  static constexpr uint32_t NO_INSTANCE = ~0u;

  Context context_;
  int64_t num_listed_ = 0, last_ = -4;  // listed tasks so far; their number at the last spread attention task
  uint32_t num_notified_ = 0;
  // Key of the present assignment. Each lane has a `word_` of its own.
  uint64_t iteration_ = 0, batch_ = 0, page_table_ = 0;
  uint32_t instance_ = NO_INSTANCE, word_ = 0;

  DISTMK_FN uint32_t word(const AttentionArgs& args) const {
    const uint32_t i = context_.team.index;
    return reinterpret_cast<const uint32_t*>(&args)[i < NUM_WORDS ? FIRST_WORD + i : LAST_WORD];
  }
  DISTMK_FN bool is_current(const Action& action, const AttentionArgs& args) const {
    return context_.team.all(action.instance == instance_ && action.iteration == iteration_ && args.batch == batch_ &&
                             args.page_table == page_table_ && word(args) == word_);
  }

  // Whether the split takes the pipeline: every warp then has a tile and most have several. If the warps loaded those
  // themselves, they would wait for memory once per tile.
  DISTMK_FN bool is_pipelined(const AttentionArgs& args) {
    const AttentionAssignment& assignment = shared().attention_assignment;
    if (instance_ >= assignment.num_instances) return false;
    const Params p{assignment.split, context_, args};
    return is_decode_row() && args.head_dim % (HOT_HEAD_DIM / 2) == 0 && p.num_tiles() >= NUM_WARPS;
  }
  // Whether the split is a decode row whose queries fit in one block (decode_row.cuh).
  DISTMK_FN bool is_decode_row() const {
    const AttentionSplit& split = shared().attention_assignment.split;
    return split.run.num_rows == 1 && split.num_heads <= Q_TILE;
  }
  // Whether the split belongs to the batch's only row, its combine is fused, and no warp has more than one tile.
  DISTMK_FN bool is_batch1(const AttentionArgs& args) {
    const AttentionAssignment& assignment = shared().attention_assignment;
    if (instance_ >= assignment.num_instances || args.head_dim != HOT_HEAD_DIM) return false;
    const Params p{assignment.split, context_, args};
    return is_decode_row() && p.fuses_combine() && p.num_tiles() <= NUM_WARPS;
  }

  // At most two notifications are outstanding.
  DISTMK_FN void notify_loader(bool streams) {
    AttentionAssignment& assignment = shared().attention_assignment;
    const uint32_t slot = num_notified_ % 2;
    while (!context_.team.all(num_notified_ < assignment.num_received.get() + 2))
      if (!context_.team.all(!shared().pipeline.leave.get())) return;
    ++num_notified_;
    if (context_.team.leader()) assignment.streams[slot] = streams;
    warp_arrive(&assignment.notified[slot]);
  }

  DISTMK_FN void assign(const Action& action, const AttentionArgs& args) {
    iteration_ = action.iteration, batch_ = args.batch, page_table_ = args.page_table;
    instance_ = action.instance, word_ = word(args);
    const uint32_t lane = context_.team.index;
    const uint32_t num_instances = num_attention_instances(args, *context_.batch(args.batch));
    AttentionAssignment& assignment = shared().attention_assignment;
    if (lane == 0) assignment.num_instances = num_instances;
    if (instance_ >= num_instances) return;
    const Params p{split_of(context_, args, instance_), context_, args};
    if (lane == 0) assignment.split = p;
    if (const uint32_t position = max(p.begin, p.first_new()); lane == NUM_WARPS && position < p.end_of_positions())
      assignment.new_line = p.kv_row(position);
    if (lane >= NUM_WARPS) return;
    const uint32_t first = p.tile_at(lane) * KV_TILE;
    assignment.lines[lane] = lane < p.num_tiles() && p.is_cached(max(first, p.begin)) ? p.kv_row(first) : 0;
  }
};

}  // namespace attention
}  // namespace distmk
