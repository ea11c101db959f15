"""Lowering of wide iterations, which carry up to WIDE_ROWS token rows: the same model, with the narrow program's weights.

Every task but those behind the head is in the list of every worker and computes a whole matrix of its rank. A rank owns a share
of the rows of the residual stream. Row-parallel products go to the owners of the rows, in parts, one slot for each term; the
owner adds them up and writes the normalized rows to every rank. So there is a reduce-scatter and an all-gather in place of an
all-reduce (Rajbhandari et al., "ZeRO", arXiv:1910.02054), and no rank normalizes rows that another one does.
"""

from __future__ import annotations

import itertools

from distmk.abi import WideEpilogue
from distmk.errors import UsageError
from distmk.gc_pause import no_collection
from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Slab
from distmk.lower.buffers import DecodeBuffers
from distmk.lower.head import emit_sampled
from distmk.lower.plan import WorkPlan
from distmk.lower.scheduler import emit_scheduler_step
from distmk.lower.wide_buffers import SharedWeights, WideBuffers, declare_wide_buffers, share_buffers
from distmk.model.nodes import ActivationKind
from distmk.model.operators import Embedding, Head, Mlp, Model, Operator, SelfAttention
from distmk.model.shards import Range
from distmk.tasks import ArgmaxRows, SelectRows, WideAppend, WideAttention, WideEmbed, WideLinear, WideSum
from distmk.tasks.wide_linear import SlabPartition

EPILOGUES: dict[ActivationKind, WideEpilogue] = {"silu": WideEpilogue.SWIGLU, "gelu_tanh": WideEpilogue.GEGLU}


@no_collection()
def lower_wide(
    model: Model,
    plan: WorkPlan,
    narrow: Graph,
    buffers: DecodeBuffers,
    program: int,
    first: tuple[Graph, WideBuffers] | None = None,
) -> tuple[Graph, WideBuffers]:
    """The task graph of one wide iteration on all ranks, that of program number `program`, and its buffers.

    plan, buffers: of the narrow graph. first: what this function returned for the first wide program of the launch. Raises
    UsageError if ranks do not share memory, as these tasks write that of peers.
    """
    if plan.options.crosses_hosts:
        raise UsageError(
            f"{len(plan.options.hosts)} hosts cannot run wide iterations; they need ranks that share memory"
        )
    graph = Graph(narrow.num_ranks, narrow.num_workers, narrow.num_schedulers, host_sizes=narrow.host_sizes)
    if first:
        made = share_buffers(graph, plan, *first, program)
    else:
        made = declare_wide_buffers(graph, plan, buffers, program)
    emitter = _Emitter(graph, plan, made, SharedWeights(graph, narrow))
    emit_scheduler_step(graph, plan, made.decode, program)
    for op, following in itertools.zip_longest(model.operators, model.operators[1:]):
        emitter.emit(op, normalized=_has_norm(following))
    return graph, made


def _has_norm(op: Operator | None) -> bool:
    return op is not None and not isinstance(op, Embedding) and op.norm is not None


class _Emitter:
    """Adds the tasks of operators on all ranks to a graph."""

    def __init__(self, graph: Graph, plan: WorkPlan, buffers: WideBuffers, weights: SharedWeights) -> None:
        self.graph, self.plan, self.buffers, self.weights = graph, plan, buffers, weights
        self.hidden, self.tiled = plan.config.hidden_size, plan.options.tiled

    def emit(self, op: Operator, *, normalized: bool) -> None:
        """normalized: whether the operator behind it has a norm in front."""
        if isinstance(op, Embedding):
            self._embed(op)
            self._sum("embed", 1, None, normalized=normalized, add=False)
        elif isinstance(op, SelfAttention):
            self._attention(op)
            self._sum(f"{op.name}.o", self.buffers.o_splits, op.post_norm, normalized=normalized)
        elif isinstance(op, Mlp):
            self._mlp(op)
            self._sum(f"{op.name}.down", self.buffers.down_splits, op.post_norm, normalized=normalized)
        else:
            self._head(op)

    def _embed(self, op: Embedding) -> None:
        """scale * table[token]: a rank that does not have the token adds zeros."""
        for rank in self.plan.ranks:
            self.graph.add(
                WideEmbed(
                    rank=rank,
                    op="embed",
                    table=self.weights.whole(op.table, rank),
                    out=self.buffers.slots_at(rank, self.hidden, 1),
                    batch=self.buffers.batch.at(rank),
                    first_token=self.plan.shards[rank].vocab[0],
                    num_ranks=self.graph.num_ranks,
                )
            )

    def _attention(self, op: SelfAttention) -> None:
        """o(attention(q, k, v of norm(x)))."""
        buffers = self.buffers
        for rank, shape in enumerate(self.plan.shapes):
            self.graph.add(
                WideLinear(
                    rank=rank,
                    op=f"{op.name}.qkv",
                    x=buffers.normalized.at(rank),
                    slab=self.weights.whole(f"{op.name}.qkv", rank),
                    out=buffers.qkv.at(rank, 0, shape.qkv_cols),
                    batch=buffers.batch.at(rank),
                    partition=SlabPartition.of(self.plan.qkv[rank].ranges),
                    bias=self._vector(f"{op.q.tensor}.bias", rank, op.q.bias),
                    tiled=self.tiled,
                )
            )
        for rank in self.plan.ranks:
            self._append(op, rank)
        for rank in self.plan.ranks:
            self._attend(op, rank)
        bias = f"{op.o.tensor}.bias" if op.o.bias else None
        self._row_parallel(f"{op.name}.o", buffers.attention_out, self.plan.o.ranges, bias, buffers.o_splits)

    def _append(self, op: SelfAttention, rank: int) -> None:
        shape, buffers = self.plan.shapes[rank], self.buffers
        k_cache, v_cache = buffers.decode.caches[op.layer]
        self.graph.add(
            WideAppend(
                rank=rank,
                op=f"{op.name}.append",
                shape=shape,
                qkv=buffers.qkv.at(rank, 0, shape.qkv_cols),
                q=buffers.q.at(rank, 0, shape.num_q * shape.head_dim),
                k_cache=k_cache.at(rank, 0, shape.cache_cols),
                v_cache=v_cache.at(rank, 0, shape.cache_cols),
                page_table=buffers.decode.page_table.at(rank),
                batch=buffers.batch.at(rank),
                rope=self.weights.whole(op.rope, rank),
                q_norm=self._vector(f"{op.q_norm}.weight", rank, op.q_norm is not None),
                k_norm=self._vector(f"{op.k_norm}.weight", rank, op.k_norm is not None),
                eps=self.plan.config.rms_norm_eps,
            )
        )

    def _attend(self, op: SelfAttention, rank: int) -> None:
        shape, buffers = self.plan.shape_of(op, rank), self.buffers
        k_cache, v_cache = buffers.decode.caches[op.layer]
        self.graph.add(
            WideAttention(
                rank=rank,
                op=f"{op.name}.attention",
                shape=shape,
                q=buffers.q.at(rank, 0, shape.num_q * shape.head_dim),
                k_cache=k_cache.at(rank, 0, shape.cache_cols),
                v_cache=v_cache.at(rank, 0, shape.cache_cols),
                page_table=buffers.decode.page_table.at(rank),
                out=buffers.attention_out.at(rank),
                batch=buffers.batch.at(rank),
                tiled=self.tiled,
            )
        )

    def _mlp(self, op: Mlp) -> None:
        """down(activation(gate(norm(x))) * up(norm(x)))."""
        buffers = self.buffers
        for rank, partition in enumerate(self.plan.mlp):
            self.graph.add(
                WideLinear(
                    rank=rank,
                    op=f"{op.name}.gate_up",
                    x=buffers.normalized.at(rank),
                    slab=self.weights.whole(f"{op.name}.gate_up", rank),
                    out=buffers.mlp_hidden.at(rank),
                    batch=buffers.batch.at(rank),
                    partition=SlabPartition.of([(2 * begin, 2 * end) for begin, end in partition.ranges]),
                    bias=self._vector(f"{op.gate.tensor}.bias", rank, op.gate.bias),
                    epilogue=EPILOGUES[op.activation],
                    tiled=self.tiled,
                )
            )
        bias = f"{op.down.tensor}.bias" if op.down.bias else None
        self._row_parallel(f"{op.name}.down", buffers.mlp_hidden, self.plan.down.ranges, bias, buffers.down_splits)

    def _head(self, op: Head) -> None:
        """The logits of the sampled rows, the best candidates of every rank, and the tokens."""
        buffers, num_parts = self.buffers, self.graph.num_workers
        for rank in self.plan.ranks:
            x, sampled_x = buffers.normalized.at(rank), buffers.sampled_x.at(rank)
            batch = buffers.batch.at(rank)
            first, last = self.plan.shards[rank].vocab
            logits = buffers.decode.sampling.logits_of(rank, self.graph.num_ranks, 0, last - first)
            self.graph.add(
                SelectRows(
                    rank=rank,
                    op="select_rows",
                    x=x,
                    out=sampled_x,
                    batch=batch,
                    k=self.hidden,
                    num_rows=logits.buffer.rows,
                    tiled=self.tiled,
                )
            )
            self.graph.add(
                WideLinear(
                    rank=rank,
                    op="head",
                    x=sampled_x,
                    slab=self.weights.whole("head", rank),
                    out=logits,
                    batch=batch,
                    partition=SlabPartition.of(self.plan.head[rank].ranges),
                    epilogue=WideEpilogue.LOGITS,
                    tiled=self.tiled,
                    sampled=True,
                    softcap=op.softcap or 0.0,
                )
            )
            out = buffers.decode.candidates.at(rank)
            self.graph.add(ArgmaxRows(rank, "argmax_rows", logits=logits, out=out, batch=batch, first_token=first))
        emit_sampled(self.graph, self.plan, buffers.decode, [num_parts] * self.graph.num_ranks, wide=True)

    def _row_parallel(self, name: str, x: Buffer, slabs: tuple[Range, ...], bias: str | None, num_splits: int) -> None:
        """The terms of x @ matrix.T + bias, which rank 0 adds, in the slots of the ranks."""
        for rank in self.plan.ranks:
            self.graph.add(
                WideLinear(
                    rank=rank,
                    op=name,
                    x=x.at(rank),
                    slab=self.weights.whole(name, rank),
                    out=self.buffers.slots_at(rank, self.hidden, num_splits),
                    batch=self.buffers.batch.at(rank),
                    partition=SlabPartition.of(slabs),
                    bias=self._vector(bias, rank, rank == 0) if bias else None,
                    epilogue=WideEpilogue.PARTS,
                    num_splits=num_splits,
                    slot=self.buffers.slot_of(rank),
                    num_ranks=self.graph.num_ranks,
                    tiled=self.tiled,
                )
            )

    def _sum(self, name: str, num_splits: int, post_norm: str | None, *, normalized: bool, add: bool = True) -> None:
        """The parts of the rows that each rank owns into the residual stream, and these rows, normalized or not, to all ranks."""
        for rank in self.plan.ranks:
            self.graph.add(
                WideSum(
                    rank=rank,
                    op=f"{name}.reduce",
                    parts=self.buffers.parts.at(rank),
                    x=self.buffers.x.at(rank),
                    out=self.buffers.normalized.at(rank),
                    batch=self.buffers.batch.at(rank),
                    num_ranks=self.graph.num_ranks,
                    num_splits=num_splits,
                    add=add,
                    tiled=self.tiled,
                    eps=self.plan.config.rms_norm_eps,
                    post_norm=self._vector(f"{post_norm}.weight", rank, post_norm is not None),
                    normalized=normalized,
                )
            )

    def _vector(self, name: str, rank: int, is_there: bool) -> Slab | None:
        return self.weights.whole(name, rank) if is_there else None
