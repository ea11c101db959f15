"""Lowering of buckets of many rows: every operator is divided into jobs, which all workers share.

Every task before sampling is in the list of every worker and computes a whole matrix of its rank. A rank owns a share
of the rows of the residual stream. The partial sums of row-parallel products go to the ranks that own the rows, each
term to its own part. The owner adds them up and writes the normalized rows to every rank. So a reduce-scatter and an
all-gather take the place of an all-reduce (Rajbhandari et al., "ZeRO", arXiv:1910.02054), and each row is normalized on
one rank only.
"""

from __future__ import annotations

import itertools
from typing import Any

from distmk.abi import Epilogue
from distmk.errors import UsageError
from distmk.formats import find_format
from distmk.graph.graph import Graph
from distmk.graph.partition import Partition
from distmk.graph.regions import Buffer, Region
from distmk.lower.head import emit_sampled
from distmk.lower.job_buffers import JobBuffers, Operand, declare_job_buffers, layout_for
from distmk.lower.options import Bucket
from distmk.lower.packed import input_formats, is_packed
from distmk.lower.plan import WorkPlan
from distmk.lower.product import Part, Product
from distmk.lower.products import (
    down_product,
    embedding_tables,
    gate_up_product,
    head_norm,
    head_product,
    input_norms,
    o_product,
    post_norms,
    qkv_product,
)
from distmk.lower.scheduler import emit_scheduler_step
from distmk.model.operators import Embedding, Head, Mlp, Model, Operator, SelfAttention
from distmk.tasks import AppendKv, ArgmaxRows, AttentionJobs, EmbedRows, LinearJobs, ReduceRows, SelectRows
from distmk.tasks.activations import RowSet


def emit_jobs(graph: Graph, model: Model, plan: WorkPlan, bucket: Bucket) -> None:
    """Add the tasks of an iteration of `bucket` on all ranks to `graph`.

    Raises UsageError if some ranks do not share memory, because these tasks write to the memory of peers.
    """
    if plan.options.crosses_hosts:
        raise UsageError(
            f"{len(plan.options.hosts)} hosts cannot run iterations of {bucket.max_rows} rows; they need ranks that share memory"
        )
    emitter = _Emitter(graph, plan, declare_job_buffers(graph, plan, bucket))
    emit_scheduler_step(graph, plan, emitter.buffers)
    for op, following in itertools.zip_longest(model.operators, model.operators[1:]):
        emitter.emit(op, following)


def _has_norm(op: Operator | None) -> bool:
    return op is not None and not isinstance(op, Embedding) and op.norm is not None


class _Emitter:
    """Adds the tasks of operators on all ranks to a graph."""

    def __init__(self, graph: Graph, plan: WorkPlan, buffers: JobBuffers) -> None:
        self.graph, self.plan, self.buffers = graph, plan, buffers
        self.hidden, self.tiled, self.eps = plan.config.hidden_size, plan.options.tiled, plan.config.rms_norm_eps

    def emit(self, op: Operator, following: Operator | None) -> None:
        """Add the tasks of `op`. following: the next operator."""
        buffers = self.buffers
        if isinstance(op, Embedding):
            self._embed(op)
            self._sum("embed", 1, None, following, accumulates=False)
        elif isinstance(op, SelfAttention):
            qkv = qkv_product(self.graph, self.plan, op)
            for rank, shape in enumerate(self.plan.shapes):
                self._linear(qkv, rank, out=buffers.qkv.at(rank, 0, shape.qkv_cols))
            operand = buffers.attention_out[op.o.format]
            self._attention(op, operand)
            self._projection(o_product(self.graph, self.plan, op), operand, buffers.o_splits)
            self._sum(f"{op.name}.o", buffers.o_splits, op, following)
        elif isinstance(op, Mlp):
            operand = buffers.mlp_hidden[op.down.format]
            gate_up = gate_up_product(self.graph, self.plan, op)
            for rank in self.plan.ranks:
                self._linear(gate_up, rank, out=operand.written(rank), out_layout=operand.layout)
            self._projection(down_product(self.graph, self.plan, op), operand, buffers.down_splits)
            self._sum(f"{op.name}.down", buffers.down_splits, op, following)
        else:
            self._head(op)

    def _embed(self, op: Embedding) -> None:
        """scale * table[token]. A rank whose table does not have the token adds zeros."""
        for rank, table in enumerate(embedding_tables(self.graph, self.plan, op)):
            self.graph.add(
                EmbedRows(
                    rank=rank,
                    op="embed",
                    table=table,
                    out=self.buffers.parts_at(rank, self.hidden, 1),
                    batch=self.buffers.batch.at(rank),
                    first_token=self.plan.shards[rank].vocab[0],
                    num_ranks=self.graph.num_ranks,
                    scale=1.0 if self.plan.options.folds_factors else op.scale,
                )
            )

    def _projection(self, product: Product, operand: Operand, num_k_splits: int) -> None:
        """Put the terms of a row-parallel product into the parts of the ranks."""
        for rank in self.plan.ranks:
            self._linear(
                product,
                rank,
                x=operand.read(rank),
                out=self.buffers.parts_at(rank, self.hidden, num_k_splits),
                epilogue=Epilogue.PARTS,
                num_k_splits=num_k_splits,
                first_part=self.buffers.first_part_of(rank),
                num_ranks=self.graph.num_ranks,
            )

    def _linear(self, product: Product, rank: int, out: Region, x: Region | None = None, **operands: Any) -> None:
        """The jobs of a rank's whole matrix, as one task for each of its parts. x: None: the residual stream."""
        runs = product.runs(rank)
        for begin, end in runs:
            divided: dict[str, Any] = {"partition": product.partitions[rank], "part": (begin, end)}
            if len(runs) > 1 and not self.tiled:
                divided = {"partition": Partition(end - begin, 1, step=2)}
            task: dict[str, Any] = {
                "op": product.name,
                "x": x or self._normalized(product.part_of(rank, begin)).at(rank),
                "out": out if len(runs) == 1 else out.buffer.at(rank, out.begin + begin, out.begin + end),
                "batch": self.buffers.batch.at(rank),
                "epilogue": product.epilogue,
                "scale": product.scale,
                "tiled": self.tiled,
            }
            self.graph.add(LinearJobs(rank, **(task | product.operands(rank, (begin, end)) | divided | operands)))

    def _normalized(self, part: Part) -> Buffer:
        """The rows of the residual stream as a part of a product multiplies them."""
        lane_x = self.buffers.lane_x
        return lane_x if lane_x and is_packed(part.weight.format) else self.buffers.normalized_x

    def _attention(self, op: SelfAttention, out: Operand) -> None:
        for rank in self.plan.ranks:
            self._append(op, rank)
        for rank in self.plan.ranks:
            self._attend(op, rank, out)

    def _append(self, op: SelfAttention, rank: int) -> None:
        shape, buffers = self.plan.shapes[rank], self.buffers
        k_cache, v_cache = buffers.caches[op.layer]
        self.graph.add(
            AppendKv(
                rank=rank,
                op=f"{op.name}.append",
                shape=shape,
                qkv=buffers.qkv.at(rank, 0, shape.qkv_cols),
                q=buffers.q.at(rank, 0, shape.num_q * shape.head_dim),
                k_cache=k_cache.at(rank, 0, shape.cache_cols),
                v_cache=v_cache.at(rank, 0, shape.cache_cols),
                page_table=buffers.page_table.at(rank),
                batch=buffers.batch.at(rank),
                rope=buffers.ropes[op.rope][rank],
                q_norm=head_norm(self.graph, self.plan, rank, op.q_norm, op.norm_offset),
                k_norm=head_norm(self.graph, self.plan, rank, op.k_norm, op.norm_offset),
                eps=self.eps,
            )
        )

    def _attend(self, op: SelfAttention, rank: int, out: Operand) -> None:
        shape, buffers = self.plan.shape_of(op, rank), self.buffers
        k_cache, v_cache = buffers.caches[op.layer]
        self.graph.add(
            AttentionJobs(
                rank=rank,
                op=f"{op.name}.attention",
                shape=shape,
                q=buffers.q.at(rank, 0, shape.num_q * shape.head_dim),
                k_cache=k_cache.at(rank, 0, shape.cache_cols),
                v_cache=v_cache.at(rank, 0, shape.cache_cols),
                page_table=buffers.page_table.at(rank),
                out=out.written(rank),
                shares=buffers.attention_shares.at(rank) if buffers.attention_shares else None,
                batch=buffers.batch.at(rank),
                tiled=out.layout,
            )
        )

    def _sum(
        self,
        name: str,
        num_k_splits: int,
        op: SelfAttention | Mlp | None,
        following: Operator | None,
        *,
        accumulates: bool = True,
    ) -> None:
        """Add up the parts of the rows that each rank owns, into the residual stream.

        The rows go to all ranks in the form that the next operator reads.
        """
        norms = post_norms(self.graph, self.plan, op) if op else (None,) * self.graph.num_ranks
        input_norm, lane_x = input_norms(self.graph, self.plan, following), self.buffers.lane_x
        packed = [self.tiled and is_packed(found) for found in input_formats(following)]
        for rank, post_norm in enumerate(norms):
            self.graph.add(
                ReduceRows(
                    rank=rank,
                    op=f"{name}.reduce",
                    parts=self.buffers.parts.at(rank),
                    x=self.buffers.x.at(rank),
                    out=None if all(packed) else self.buffers.normalized_x.at(rank),
                    lane_out=lane_x.at(rank) if lane_x and any(packed) else None,
                    batch=self.buffers.batch.at(rank),
                    num_ranks=self.graph.num_ranks,
                    num_k_splits=num_k_splits,
                    accumulates=accumulates,
                    tiled=self.tiled,
                    eps=self.eps,
                    post_norm=post_norm,
                    applies_rms=_has_norm(following),
                    input_norm=input_norm[rank],
                )
            )

    def _head(self, op: Head) -> None:
        """The logits of the sampled rows, the best candidates of every rank, and the sampled tokens."""
        product = head_product(self.graph, self.plan, op)
        for rank in self.plan.ranks:
            self._rank_head(op, product, rank)
        emit_sampled(self.graph, self.plan, self.buffers, [self.graph.num_workers] * self.graph.num_ranks)

    def _rank_head(self, op: Head, product: Product, rank: int) -> None:
        buffers, batch = self.buffers, self.buffers.batch.at(rank)
        sampled_x = buffers.sampled_x.at(rank)
        first, last = self.plan.shards[rank].vocab
        logits = buffers.sampling.logits_of(rank, self.graph.num_ranks, 0, last - first)
        self.graph.add(
            SelectRows(
                rank=rank,
                op="select_rows",
                x=self._normalized(product.parts[rank][0]).at(rank),
                out=sampled_x,
                batch=batch,
                k=self.hidden,
                num_rows=buffers.bucket.num_sampled,
                tiled=layout_for(self.plan, find_format(op.format)),
            )
        )
        softcap = op.softcap or 0.0
        rows, epilogue = RowSet.SAMPLED, Epilogue.LOGITS
        self._linear(product, rank, x=sampled_x, out=logits, epilogue=epilogue, rows=rows, softcap=softcap)
        out = buffers.candidates.at(rank)
        self.graph.add(ArgmaxRows(rank, "argmax_rows", logits=logits, out=out, batch=batch, first_token=first))
