"""What lowering an operator needs: the graph so far, shards, buffers, weights, and the all-reduce operators share."""

from __future__ import annotations

import dataclasses
from typing import TypedDict

from distmk.abi import COMBINE_WIDTH, MAX_FUSED_COMBINE_COLS, MAX_ROWS, POSITIONS_PER_PASS, Epilogue, LaunchKind
from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Region, Segment, Slab, Tiling, Weight, WeightKind
from distmk.lower.buffers import DecodeBuffers, make_buffers
from distmk.lower.options import ATTENTION_LAUNCHES, DecodeOptions, cut, partition_rows, partition_uneven, reduced_rows
from distmk.lower.rotating import RotatingBuffers
from distmk.model.operators import Model
from distmk.model.shards import Shard, shard_model
from distmk.tasks import AttentionShape, Linear, Sum

Cuts = list[tuple[int, int]]


class Rounded(TypedDict, total=False):
    """Operands of a task that writes a vector in bf16, too."""

    out_bf16: Region
    reset: Region | None


class Lowering:
    """Collects the tasks of one iteration on all ranks."""

    def __init__(self, model: Model, options: DecodeOptions) -> None:
        self.config, self.options = model.config, options
        self.shards = shard_model(model.config, options.num_ranks)
        self.graph = Graph(options.num_ranks, options.num_workers, options.num_schedulers)
        self.num_pages = options.num_pages or options.max_pages * options.max_seqs
        self.shapes = [self.attention_shape(shard) for shard in self.shards]
        self.buffers: DecodeBuffers = make_buffers(
            self.graph,
            self.config,
            self.shards,
            self.shapes,
            keep_logits=options.keep_logits,
            fused_partials=self._merges_lone_rows(),
            exchanges=options.exchanges,
        )
        self.graph.batch = self.buffers.batch
        head_dim, positions = self.config.head_dim, options.max_model_len
        self.rope = [
            Slab(self.graph.weight("rope", rank, head_dim, [], WeightKind.ROPE, rows=positions), 0, positions)
            for rank in self.ranks()
        ]

        self.num_reserved = self._num_spared()
        self.num_reduced = self._num_light()
        self.num_polling = [self._num_early(rank) for rank in self.ranks()]

    def ranks(self) -> range:
        return range(self.options.num_ranks)

    def attention_shape(self, shard: Shard) -> AttentionShape:
        shape = AttentionShape(
            num_q=shard.num_q,
            num_kv=shard.num_kv,
            head_dim=self.config.head_dim,
            group=self.config.num_heads // self.config.num_kv_heads,
            q_begin=shard.heads[0],
            kv_begin=shard.kv_heads[0],
            page_size=self.options.page_size,
            max_pages=self.options.max_pages,
            num_pages=self.num_pages,
            max_splits=self.options.max_splits,
            min_split=self.options.min_split,
            num_workers=self.options.num_workers,
        )
        return dataclasses.replace(shape, max_splits=min(shape.max_splits, shape.split_budget))

    def qkv_cuts(self, rank: int, num_reserved: int = 0, num_reduced: int = 0) -> Cuts:
        """Which rows of the query, key and value matrices, one after another, are whose, but for the first `num_reserved`
        workers; the first `num_reduced` of the others have fewer.
        """
        rows = self.shapes[rank].qkv_cols
        return partition_uneven(rows, self.config.hidden_size, self.options.num_workers - num_reserved, num_reduced)

    def mlp_cuts(self, rank: int) -> Cuts:
        """Which columns of the MLP are whose."""
        first, last = self.shards[rank].mlp
        return cut(last - first, 4 * self.config.hidden_size, self.options.num_workers)

    def residual_cuts(self, num_reserved: int = 0) -> Cuts:
        """Which columns of the residual stream are whose, and so which rows of the matrices whose columns ranks share out,
        but for the first `num_reserved` workers. Where none is spared the same of all of them, as a worker that adds to what
        another one wrote has to wait for it.
        """
        widest = max(k for _, k in (*self.o_parts(), *self.down_parts()))
        return partition_rows(self.config.hidden_size, widest, self.options.num_workers - num_reserved)

    def o_parts(self) -> list[tuple[int, int]]:
        """Each rank's (first column, columns) of the projection behind attention."""
        d = self.config.head_dim
        return [(q0 * d, (q1 - q0) * d) for q0, q1 in (shard.heads for shard in self.shards)]

    def down_parts(self) -> list[tuple[int, int]]:
        """Each rank's (first column, columns) of the last matrix of the MLP."""
        return [(first, last - first) for first, last in (shard.mlp for shard in self.shards)]

    @property
    def is_spread(self) -> bool:
        """Whether attention is in every worker's list."""
        return ATTENTION_LAUNCHES[self.options.attention_launch] is LaunchKind.SPREAD

    def _merges_lone_rows(self) -> bool:
        """Whether a lone row of attention is merged by those who multiply it, which spares a hop: they take pieces of
        64 elements from where a layer leaves them by turns.
        """
        fits = all(k <= MAX_FUSED_COMBINE_COLS for _, k in self.o_parts())
        return self.is_spread and fits and self.config.head_dim % 64 == 0 and self.config.num_layers > 1

    def _num_early(self, rank: int) -> int:
        """Workers that may take what arrives before events say so: they have a part of every matrix of a layer, so that
        what they had waited for two operators ago tells them that places are clear and others done with what they clear.
        Where attention is handed out, nobody turns to a task before its waits are met.
        """
        if not self.is_spread:
            return 0
        return min(map(len, (self.qkv_cuts(rank), self.mlp_cuts(rank), self.residual_cuts())))

    def _num_spared(self) -> int:
        """Workers without a part of qkv and o: those that have a single row's attention would come to it late, and to o when
        all others have been through theirs. Where ranks push what o gives, workers need not be those that add to the residual
        stream behind the MLP.
        """
        all_early = all(self._num_early(rank) == self.options.num_workers for rank in self.ranks())
        # Two layers leave the MLP's vector in one place, and who has no part of o does not know when that has been read.
        moves = self.buffers.hidden.buffer.lamport
        if not self.options.exchanges or not self.buffers.fused_partials or not all_early or not moves:
            return 0
        if self.options.num_reserved is not None:
            return self.options.num_reserved
        busy = self._num_busy()
        return busy if 3 * busy <= self.options.num_workers else 0

    def _num_light(self) -> int:
        """Workers with fewer rows of qkv: where none is spared, those that have the attention of the only sequence, as in its
        time they read no weights. Of a long sequence all have some.
        """
        busy, options = self._num_busy(), self.options
        is_short = options.max_model_len <= 2 * COMBINE_WIDTH * POSITIONS_PER_PASS
        alone = options.max_seqs == 1 and is_short and self.buffers.fused_partials
        enough = all(reduced_rows(shape.qkv_cols, options.num_workers) for shape in self.shapes)
        return busy if alone and enough and not self.num_reserved and 2 * busy <= options.num_workers else 0

    def _num_busy(self) -> int:
        """Workers that have a single row's attention, the first ones, while its sequence is short."""
        return max(shape.num_kv for shape in self.shapes) * COMBINE_WIDTH

    def vector(self, rank: int, *parts: tuple[str, int, int]) -> Slab:
        segments = [Segment(f"{tensor}", begin, end) for tensor, begin, end in parts]
        weight = self.graph.weight(parts[0][0], rank, 1, segments, WeightKind.VECTOR)
        return Slab(weight, 0, weight.rows)

    def matrix(
        self,
        name: str,
        rank: int,
        cols: int,
        segments: list[Segment],
        cuts: Cuts | None = None,
        paired: bool = False,
        col_begin: int = 0,
        norm: str | None = None,
    ) -> Weight:
        """A matrix whose tasks stream the rows `cuts`, if any do; `norm`: of the RMSNorm before it."""
        tiling = Tiling(tuple(cuts), paired) if cuts and self.options.tiled else None
        scale = f"{norm}.weight" if norm else None
        return self.graph.weight(
            name, rank, cols, segments, WeightKind.MATRIX, col_begin, tiling=tiling, col_scale=scale
        )

    def table(self, rank: int, tensor: str) -> Slab:
        """This rank's vocabulary rows, to be looked up."""
        begin, end = self.shards[rank].vocab
        rows = [Segment(f"{tensor}.weight", begin, end)]
        return Slab(self.matrix(tensor, rank, self.config.hidden_size, rows), 0, end - begin)

    def row_parallel(
        self,
        name: str,
        tensor: str,
        x: RotatingBuffers,
        slots: Buffer,
        parts: list[tuple[int, int]],
        has_bias: bool,
        fused_partials: RotatingBuffers | None = None,
        num_reserved: int = 0,
    ) -> None:
        """x_residual += sum over ranks of x_local @ columns.T; `parts` holds each rank's (first column, columns). `lone`:
        where attention has left a lone row; the first `num_reserved` workers have no part of it.
        """
        hidden, b = self.config.hidden_size, self.buffers
        cuts = self.residual_cuts(num_reserved)
        b.x_bf16.turn()
        for rank in self.ranks():
            (col_begin, k), num_polling = parts[rank], self.num_polling[rank]
            segment = Segment(f"{tensor}.weight", 0, hidden)
            weight = self.matrix(name, rank, k, [segment], cuts, col_begin=col_begin)
            bias = self.vector(rank, (f"{tensor}.bias", 0, hidden)) if has_bias and rank == 0 else None
            for worker, (begin, end) in enumerate(cuts, num_reserved):
                out, epilogue = self.reduced_out(slots, rank, begin, end)
                self.graph.add(
                    Linear(
                        rank=rank,
                        op=name,
                        worker=worker,
                        x=x.at(rank, 0, k),
                        slab=Slab(weight, begin, end),
                        out=out,
                        batch=b.batch.at(rank),
                        bias=bias and Slab(bias.weight, begin, end),
                        epilogue=epilogue,
                        num_ranks=self.options.num_ranks,
                        polls=(fused_partials or x).buffer.lamport and worker < num_polling,
                        fused_partials=fused_partials.at(rank, 0, self.shapes[rank].fused_partial_cols)
                        if fused_partials
                        else None,
                        shape=self.shapes[rank] if fused_partials else None,
                        **self.out_bf16(rank, begin, end, epilogue),
                    )
                )
        self.all_reduce(name, slots, cuts, add=True, num_reserved=num_reserved)

    def reduced_out(self, slots: Buffer, rank: int, begin: int, end: int) -> tuple[Region, Epilogue]:
        """Where columns [begin, end) that all ranks add up go: the residual stream, or this rank's slot on every rank."""
        if not self.options.exchanges:
            return self.buffers.x.at(rank, begin, end), Epilogue.ADD
        return self.block(slots, rank, rank, begin, end), Epilogue.PUSH

    def out_bf16(self, rank: int, begin: int, end: int, epilogue: Epilogue = Epilogue.ADD) -> Rounded:
        """Operands of who writes columns [begin, end) of the residual stream, for its rounded copy."""
        if epilogue is Epilogue.PUSH:
            return {}
        x = self.buffers.x_bf16
        return {"out_bf16": x.at(rank, begin, end), "reset": x.reset_at(rank, begin, end)}

    def block(self, slots: Buffer, rank: int, source: int, begin: int, end: int) -> Region:
        base = source * MAX_ROWS * self.config.hidden_size
        return slots.at(rank, base + begin * MAX_ROWS, base + end * MAX_ROWS)

    def all_reduce(self, name: str, slots: Buffer, cuts: Cuts, add: bool, num_reserved: int = 0) -> None:
        if not self.options.exchanges:
            return
        for rank in self.ranks():
            for worker, (begin, end) in enumerate(cuts, num_reserved):
                self.graph.add(
                    Sum(
                        rank=rank,
                        op=f"{name}.reduce",
                        worker=worker,
                        blocks=tuple(self.block(slots, rank, source, begin, end) for source in self.ranks()),
                        dst=self.buffers.x.at(rank, begin, end),
                        batch=self.buffers.batch.at(rank),
                        add=add,
                        polls=True,
                        **self.out_bf16(rank, begin, end),
                    )
                )
