"""The work plan of a decode program: which worker of which rank runs which rows of every operator.

The plan is a pure function of the model and the options and is computed once. Buffers and tasks follow from it; nothing
changes it later.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from distmk.abi import MAX_FUSED_COMBINE_COLS, MAX_ROWS
from distmk.formats import find_format
from distmk.graph.partition import Partition, partition_items, partition_rows
from distmk.lower.options import DecodeOptions, settle_factors
from distmk.lower.rotating import Rotation
from distmk.lower.worker_roles import WorkerRoles, assign_roles
from distmk.model.config import ModelConfig
from distmk.model.operators import Model, Operator, SelfAttention
from distmk.model.shards import Shard, shard_model
from distmk.tasks import AttentionShape
from distmk.tasks.splits import ANY_LENGTH, has_fused_combine

COMBINED_PER_TASK = 4  # rows times slices of a head that are enough work for a combine task


@dataclass(frozen=True)
class WorkPlan:
    """The decisions that lowering takes before it makes any task.

    Tuples are by rank; partitions that are not tuples hold for all ranks.

    num_pages: KV cache pages of a rank.
    shards: each rank's part of the model.
    shapes: each rank's attention heads and cache, as attention tasks take them, without the fields that differ between
      layers (`shape_of`).
    windows: positions that a row of each layer sees; ANY_LENGTH if no sequence can be longer.
    rope_tables: names of the rotary tables that layers use.
    readers: the operator that reads each write of the residual stream, in order.
    has_post_norms: some operator normalizes its output before the output is added to the residual stream.
    fuses_combine: the o projection combines the splits of a single decode row, which saves a hop.
    residual_rotation: of the bf16 residual stream.
    attention_rotation: of queries, keys and values, of attention's output, and of the partials of a fused combine.
    mlp_rotation: of the activations between gate_up and down.
    roles: workers reserved for attention, workers with a reduced share of qkv, and workers allowed to poll.
    embed: columns of the embedding.
    qkv: rows of the q, k and v matrices, one after another.
    combine: slices of the query heads' outputs.
    o, down: rows of the o and down projections, which are columns of the residual stream.
    mlp: columns between gate_up and down, each a row of gate and a row of up.
    head: rows of the vocabulary shard.
    """

    config: ModelConfig
    options: DecodeOptions
    num_pages: int
    shards: tuple[Shard, ...]
    shapes: tuple[AttentionShape, ...]
    windows: tuple[int, ...]
    rope_tables: tuple[str, ...]
    readers: tuple[Operator, ...]
    has_post_norms: bool
    fuses_combine: bool
    residual_rotation: Rotation
    attention_rotation: Rotation
    mlp_rotation: Rotation
    roles: WorkerRoles
    embed: Partition
    qkv: tuple[Partition, ...]
    combine: tuple[Partition, ...]
    o: Partition
    mlp: tuple[Partition, ...]
    down: Partition
    head: tuple[Partition, ...]

    @property
    def ranks(self) -> range:
        return range(self.options.num_ranks)

    def shape_of(self, op: SelfAttention, rank: int) -> AttentionShape:
        """The attention heads and cache of a layer on a rank, with the layer's window and scores."""
        window = self.windows[op.layer]
        return dataclasses.replace(self.shapes[rank], window=window, scores=op.scores)

    def may_poll(self, rank: int, worker: int) -> bool:
        """Whether a worker may poll the operands of qkv, o, gate_up and down."""
        return worker < self.roles.num_polling[rank]

    def attention_may_poll(self, rank: int) -> bool:
        """Whether attention tasks may poll their queries, keys and values.

        Every worker runs a share of attention, so all must be allowed to.
        """
        return self.attention_rotation.rotates and self.may_poll(rank, self.options.num_workers - 1)

    def combine_may_poll(self, rank: int) -> bool:
        """Whether the combine tasks of a layer may poll the partials."""
        combine = self.combine[rank]
        return self.may_poll(rank, combine.first_worker + combine.num_tasks - 1)


def plan_work(model: Model, options: DecodeOptions) -> WorkPlan:
    """The work plan of a model. Raises UsageError if there are more ranks than query heads, or as `settle_factors`."""
    config, options = model.config, settle_factors(model, options)
    shards = tuple(shard_model(config, options.num_ranks))
    num_pages = options.total_pages
    shapes = tuple(_attention_shape(config, options, shard, num_pages) for shard in shards)
    windows = _windows(model, options)
    fuses_combine = _fuses_combine(config, options, shapes, windows) and _o_begins_at_heads(model, shards)
    mlp_rotation = Rotation(config.num_layers, lag=2)
    mlp = tuple(_mlp(config, options, shard) for shard in shards)
    down = _residual(config, options, shards)
    num_polling = tuple(_num_polling(config, options, shape, mlp[r], down) for r, shape in enumerate(shapes))
    roles = assign_roles(
        options,
        config.hidden_size,
        shapes,
        num_polling,
        fuses_combine=fuses_combine,
        mlp_rotates=mlp_rotation.rotates,
    )
    return WorkPlan(
        config=config,
        options=options,
        num_pages=num_pages,
        shards=shards,
        shapes=shapes,
        windows=windows,
        rope_tables=model.rope_tables,
        readers=model.operators[1:],
        has_post_norms=model.has_post_norms,
        fuses_combine=fuses_combine,
        residual_rotation=Rotation(1 + 2 * config.num_layers, lag=2, spare=1),
        attention_rotation=Rotation(config.num_layers),
        mlp_rotation=mlp_rotation,
        roles=roles,
        embed=_embed(config, options),
        qkv=tuple(_qkv(config, options, shape, roles.num_reserved, roles.num_reduced) for shape in shapes),
        combine=tuple(_combine(options, shape, fuses_combine, roles) for shape in shapes),
        o=_residual(config, options, shards, roles.num_reserved),
        mlp=mlp,
        down=down,
        head=tuple(_head(config, options, shard) for shard in shards),
    )


def _attention_shape(config: ModelConfig, options: DecodeOptions, shard: Shard, num_pages: int) -> AttentionShape:
    shape = AttentionShape(
        num_q=shard.num_q,
        num_kv=shard.num_kv,
        head_dim=config.head_dim,
        group=config.num_heads // config.num_kv_heads,
        q_begin=shard.heads[0],
        kv_begin=shard.kv_heads[0],
        page_size=options.page_size,
        max_pages=options.max_pages,
        num_pages=num_pages,
        max_kv_splits=options.max_kv_splits,
        min_kv_split_len=options.fixed_split_len if options.deterministic else options.min_kv_split_len,
        num_workers=options.num_workers,
        num_slots=options.num_slots,
        fixed_splits=options.deterministic,
    )
    most = -(-options.max_model_len // shape.min_kv_split_len) if options.deterministic else shape.kv_split_budget
    return dataclasses.replace(shape, max_kv_splits=min(shape.max_kv_splits, most))


def _windows(model: Model, options: DecodeOptions) -> tuple[int, ...]:
    """The window of each layer. A window of `max_model_len` or more counts as none, since the results are the same."""
    windows = [op.window for op in model.operators if isinstance(op, SelfAttention)]
    return tuple(window if window and window < options.max_model_len else ANY_LENGTH for window in windows)


def _fuses_combine(
    config: ModelConfig, options: DecodeOptions, shapes: tuple[AttentionShape, ...], windows: tuple[int, ...]
) -> bool:
    """Whether every task of the o projection combines a single row's splits for itself.

    The row must fit in whole blocks, and its partials must rotate between layers of one window. The combine is never
    fused with `deterministic`, because a row beside others is not combined this way, nor without `folds_factors`, whose
    tasks cannot do it.
    """
    if options.deterministic or not options.folds_factors:
        return False
    fits = all(shape.num_q * shape.head_dim <= MAX_FUSED_COMBINE_COLS for shape in shapes)
    rotates = all(windows.count(window) > 1 for window in windows)
    return options.spreads_attention and fits and has_fused_combine(config.head_dim) and rotates


def _o_begins_at_heads(model: Model, shards: tuple[Shard, ...]) -> bool:
    """Whether no shard of o is stored with columns of other heads before it, which a fused combine would have to skip."""
    formats = {find_format(op.o.format) for op in model.operators if isinstance(op, SelfAttention)}
    firsts = [shard.heads[0] * model.config.head_dim for shard in shards]
    return all(first % found.group_cols == 0 for first in firsts for found in formats)


def _num_polling(
    config: ModelConfig, options: DecodeOptions, shape: AttentionShape, mlp: Partition, down: Partition
) -> int:
    """Workers of a rank that may poll: those with tasks of every matrix of a layer.

    The waits of such a worker two operators earlier imply that the buffers it polls have been reset, and that nobody
    still reads the buffers that it resets. If attention is dispatched, no task starts before its waits are met, so none
    polls. `ScaledLinear` tasks (without `folds_factors`) do not poll either.
    """
    if not options.spreads_attention or not options.folds_factors:
        return 0
    return min(_qkv(config, options, shape).num_tasks, mlp.num_tasks, down.num_tasks)


def _embed(config: ModelConfig, options: DecodeOptions) -> Partition:
    """Columns of the embedding.

    Without all-reduces the last workers embed, because the first ones begin with a single row's attention.
    """
    cols = partition_items(config.hidden_size, 4 * MAX_ROWS, options.num_workers)
    first = 0 if options.all_reduces else options.num_workers - cols.num_tasks
    return dataclasses.replace(cols, first_worker=first)


def _qkv(
    config: ModelConfig, options: DecodeOptions, shape: AttentionShape, num_reserved: int = 0, num_reduced: int = 0
) -> Partition:
    num_workers = options.num_workers - num_reserved
    return partition_rows(shape.qkv_cols, config.hidden_size, num_workers, num_reduced, num_reserved)


def _combine(options: DecodeOptions, shape: AttentionShape, fuses_combine: bool, roles: WorkerRoles) -> Partition:
    """Slices of the query heads' outputs.

    The more rows an iteration may have, the fewer slices a task gets, so that its warps suffice.

    With a fused combine these tasks are idle for a single row, but their workers still reach them before their o tasks.
    So they go to reserved workers, which have no rows of o. If these are too few, they go to the last workers with a
    reduced share of qkv, or else to the last workers, which take no part in a single row's attention.
    """
    total = shape.num_q * shape.slices
    num_tasks = min(options.num_workers, -(-total // max(1, COMBINED_PER_TASK // options.max_seqs)))
    first = 0
    if fuses_combine and num_tasks > roles.num_reserved:
        last = roles.num_reduced if num_tasks <= roles.num_reduced else options.num_workers
        first = last - num_tasks
    return Partition(total, num_tasks, first_worker=first)


def _residual(
    config: ModelConfig, options: DecodeOptions, shards: tuple[Shard, ...], num_reserved: int = 0
) -> Partition:
    """Columns of the residual stream, which are rows of o and of down.

    Without reserved workers o and down get the same partition, so that a worker adds only to columns that it wrote
    itself and needs no event.
    """
    num_cols = max(max(shard.num_q * config.head_dim, shard.mlp[1] - shard.mlp[0]) for shard in shards)
    return partition_rows(config.hidden_size, num_cols, options.num_workers - num_reserved, first_worker=num_reserved)


def _mlp(config: ModelConfig, options: DecodeOptions, shard: Shard) -> Partition:
    begin, end = shard.mlp
    return partition_items(end - begin, 4 * config.hidden_size, options.num_workers)


def _head(config: ModelConfig, options: DecodeOptions, shard: Shard) -> Partition:
    begin, end = shard.vocab
    return partition_rows(end - begin, config.hidden_size, options.num_workers)
