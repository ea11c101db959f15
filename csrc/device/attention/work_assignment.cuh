// A worker's share of attention at hand: what it has to do depends on the row table, not on the layer, so the waiter
// works it out once an iteration, before it announces the first of these tasks, and the consumers find it in shared
// memory.
#pragma once
#include "device/attention/params.cuh"

namespace distmk {
namespace attention {

DISTMK_FN AttentionSplit split_of(const Context& context, const AttentionArgs& args, uint32_t index) {
  const Batch& batch = *context.batch(args.batch);
  const AttentionInstance instance = attention_instance(args, batch, index);
  const BatchRun run = batch.runs[instance.run];
  const uint32_t model_kv = args.kv_begin + instance.kv_head;
  const uint32_t first = max(model_kv * args.group, args.q_begin),
                 last = min((model_kv + 1) * args.group, args.q_begin + args.num_q);
  const auto kv_len = static_cast<uint32_t>(run.kv_len);
  return {instance,
          run,
          first - args.q_begin,
          last - first,
          split_begin(kv_len, instance.split, instance.num_splits),
          split_begin(kv_len, instance.split + 1, instance.num_splits),
          batch.num_rows};
}

// Tasks that the waiter tells the loader of, as both come to all of them.
DISTMK_FN bool is_told_of(const TaskDesc& task) {
  return BULK_COPIES && task.type == static_cast<uint16_t>(TaskType::ATTENTION) && is_spread(task) &&
         reinterpret_cast<const AttentionArgs*>(task.args)->long_splits;
}

// By the loader: keys and values of this worker's share, two chunks a stage, if they come through the ring. False: the
// worker has left.
DISTMK_FN bool stream_assignment(const RankState& state, const Team& lanes, Loader& loader, const TaskDesc& task) {
  AttentionAssignment& share = shared().attention_assignment;
  const uint32_t number = share.num_heard.get(), place = number % 2;
  while (!lanes.all(barrier_try_wait(&share.told[place], number / 2 % 2)))
    if (!lanes.all(!shared().ring.leave.get())) return false;
  const bool streams = share.streams[place];
  lanes.sync();
  if (lanes.leader()) share.num_heard.set(number + 1);
  lanes.sync();
  if (!streams) return true;
  Context context(state, lanes);
  const auto& args = *reinterpret_cast<const AttentionArgs*>(task.args);
  const Work w{share.split, context, args};
  const __nv_bfloat16 *keys = w.keys(), *values = w.values();
  const uint32_t num_chunks = w.num_chunks(), num_bytes = w.chunk_bytes();
  fence_copies();
  uint32_t lines = 0;  // where a lane's chunk begins, of 32 at a time
  return loader.stream_stages((num_chunks + 1) / 2, [&](uint32_t stage, uint32_t dst, uint32_t full) {
    const uint32_t turn = 2 * stage, here = min(num_chunks - turn, 2u);
    if (turn % 32 == 0) lines = w.line_of(w.chunk_of(min(turn + lanes.index, num_chunks - 1)) * CHUNK);
    if (lanes.leader()) expect_bytes(full, 2 * here * num_bytes);
    lanes.sync();
    const uint32_t line = __shfl_sync(~0u, lines, turn % 32 + lanes.index / 2 % 2);
    if (lanes.index < 2 * here)
      copy_expected(dst + lanes.index * num_bytes, (lanes.index % 2 ? values : keys) + uint64_t{line} * args.head_dim,
                    num_bytes, full);
  });
}

// The waiter's: keeps shared().attention_assignment.
class AssignmentTracker {
 public:
  DISTMK_FN AssignmentTracker(const RankState& state, const Team& warp) : context_(state, warp) {}

  // Task `n` is about to be announced, and those up to n - 4 are done.
  DISTMK_FN void see(uint32_t n, const Action& action) {
    if (action.kind == ActionKind::LEAVE) return;
    num_listed_ += is_listed(*action.task.desc);
    if (action.task.desc->type != static_cast<uint16_t>(TaskType::ATTENTION)) return;
    const auto& args = *reinterpret_cast<const AttentionArgs*>(action.task.desc->args);
    bool at_hand = false;
    // A chunk's lines are told by its first one.
    if (is_spread(*action.task.desc) && args.page_size >= CHUNK) {
      at_hand = is_known(action, args);
      // Who runs the last one may still read. By place in the list, or it would depend on what was handed out in
      // between, and with it the order of sums.
      if (!at_hand && num_listed_ > last_ + 3) {
        learn(action, args);
        at_hand = true;
      }
    }
    if (is_spread(*action.task.desc)) last_ = num_listed_;
    context_.team.sync();  // one lane has written what all go by
    const bool told = is_told_of(*action.task.desc), in_ring = told && at_hand && comes_through_ring(args);
    const KvPath how = !at_hand ? UNASSIGNED : in_ring ? PIPELINED : is_near(args) ? NEAR : ASSIGNED;
    if (context_.team.leader()) shared().attention_assignment.at_hand[handshake_slot(n)] = how;
    if (told) tell_loader(in_ring);
  }

 private:
  // Arguments that count, a word a lane: `num_q` to `split_budget`, and `fused_combine_len`.
  static constexpr uint32_t FIRST_WORD = offsetof(AttentionArgs, num_q) / sizeof(uint32_t),
                            NUM_WORDS = offsetof(AttentionArgs, eps) / sizeof(uint32_t) - FIRST_WORD;
  static_assert(NUM_WORDS < 32, "");
  static constexpr uint32_t NO_INSTANCE = ~0u;

  Context context_;
  int64_t num_listed_ = 0, last_ = -4;  // tasks of this worker's list so far; up to the last spread one of this type
  uint32_t num_told_ = 0;
  // What it was worked out for:
  uint64_t iteration_ = 0, batch_ = 0, page_table_ = 0;
  uint32_t instance_ = NO_INSTANCE, word_ = 0;

  DISTMK_FN uint32_t word(const AttentionArgs& args) const {
    const uint32_t i = context_.team.index;
    constexpr uint32_t LAST_WORD = offsetof(AttentionArgs, fused_combine_len) / sizeof(uint32_t);
    return reinterpret_cast<const uint32_t*>(&args)[i < NUM_WORDS ? FIRST_WORD + i : LAST_WORD];
  }
  DISTMK_FN bool is_known(const Action& action, const AttentionArgs& args) const {
    return context_.team.all(action.instance == instance_ && action.iteration == iteration_ && args.batch == batch_ &&
                             args.page_table == page_table_ && word(args) == word_);
  }

  // A share of which each warp has a chunk, and most have several: those would be trips to memory one after another.
  DISTMK_FN bool comes_through_ring(const AttentionArgs& args) {
    const AttentionAssignment& share = shared().attention_assignment;
    if (instance_ >= share.num_instances) return false;
    const Work w{share.split, context_, args};
    return is_row() && args.head_dim % (MAX_HEAD_DIM / 2) == 0 && w.num_chunks() >= NUM_WARPS;
  }

  // Code of their own (device/attention/decode_row.cuh) have single rows, where heads have as many elements as it is
  // compiled for.
  DISTMK_FN bool is_row() const {
    const AttentionSplit& split = shared().attention_assignment.split;
    return split.run.num_rows == 1 && split.num_heads <= QUERIES;
  }
  DISTMK_FN bool is_near(const AttentionArgs& args) {
    const AttentionAssignment& share = shared().attention_assignment;
    if (instance_ >= share.num_instances || args.head_dim != MAX_HEAD_DIM) return false;
    const Work w{share.split, context_, args};
    return is_row() && w.fuses_combine() && w.num_chunks() <= NUM_WARPS;
  }

  DISTMK_FN void tell_loader(bool streams) {
    AttentionAssignment& share = shared().attention_assignment;
    const uint32_t turn = num_told_ % 2;
    while (!context_.team.all(num_told_ < share.num_heard.get() + 2))
      if (!context_.team.all(!shared().ring.leave.get())) return;
    ++num_told_;
    if (context_.team.leader()) share.streams[turn] = streams;
    warp_arrive(&share.told[turn]);
  }

  DISTMK_FN void learn(const Action& action, const AttentionArgs& args) {
    iteration_ = action.iteration, batch_ = args.batch, page_table_ = args.page_table;
    instance_ = action.instance, word_ = word(args);
    const uint32_t lane = context_.team.index;
    const uint32_t num_instances = num_attention_instances(args, *context_.batch(args.batch));
    AttentionAssignment& share = shared().attention_assignment;
    if (lane == 0) share.num_instances = num_instances;
    if (instance_ >= num_instances) return;
    const Work w{split_of(context_, args, instance_), context_, args};
    if (lane == 0) share.split = w;
    if (const uint32_t added = max(w.begin, w.first_new()); lane == NUM_WARPS && added < w.end)
      share.new_line = w.line_of(added);
    if (lane >= NUM_WARPS) return;
    const uint32_t first = w.chunk_of(lane) * CHUNK;
    share.lines[lane] = lane < w.num_chunks() && w.is_cached(max(first, w.begin)) ? w.line_of(first) : 0;
  }
};

// By the consumers: what is known of the task they are at.
DISTMK_FN uint32_t hand() { return shared().attention_assignment.at_hand[handshake_slot(task_number())]; }
DISTMK_FN uint32_t count_instances(const Context& context, const AttentionArgs& args) {
  return hand() ? shared().attention_assignment.num_instances
                : num_attention_instances(args, *context.batch(args.batch));
}
// How many of its share this warp is done with; 0 between tasks.
DISTMK_FN uint32_t own_round() { return shared().attention_assignment.rounds[own_warp()]; }
DISTMK_FN void set_own_round(uint32_t round) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) shared().attention_assignment.rounds[own_warp()] = round;
  __syncwarp();
}
// What is known of the instance of a round: of all but the first, nothing.
DISTMK_FN uint32_t at_hand(uint32_t round) { return round ? UNASSIGNED : hand(); }
// Of a task that is not spread, there is but that of round 0.
DISTMK_FN uint32_t instance_of(const Context& context, uint32_t round) {
  const uint32_t first = shared().handshake.action[handshake_slot(task_number())].instance;
  return round ? first + round * context.rank_state.program->num_workers : first;
}
// As look_up has them.
DISTMK_FN uint32_t lines_at_hand(uint32_t turn) {
  return shared().attention_assignment.lines[turn] + threadIdx.x % CHUNK;
}

}  // namespace attention
}  // namespace distmk
