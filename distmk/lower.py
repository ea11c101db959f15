"""Model -> task graph: each operator is cut into tasks by the number of workers and the bytes they move."""

from __future__ import annotations

from dataclasses import dataclass

from distmk.abi import MAX_ROWS, Epilogue, LaunchKind, Space
from distmk.errors import UsageError
from distmk.graph import Graph
from distmk.model import Embedding, Head, Mlp, Model, SelfAttention
from distmk.regions import Buffer, Region, Segment, Slab, Weight, WeightKind
from distmk.shard import Shard, deal, shard_model
from distmk.state import DecodeBuffers, make_buffers
from distmk.tasks import Attention, AttentionShape, Embed, Linear, Merge, Prepare, Sample, Sum
from distmk.tasks.batching import CANDIDATES_BYTES

MIN_TASK_BYTES = 16384  # cutting finer costs more in events than it saves


@dataclass(frozen=True)
class DecodeOptions:
    """Compile-time choices of a decode program. Lengths are in tokens, `page_size` in positions."""

    num_ranks: int = 1
    num_workers: int = 1
    num_schedulers: int | None = None
    max_rows: int = MAX_ROWS
    max_model_len: int = 2048
    page_size: int = 16
    num_pages: int = 0  # 0: enough for `max_rows` full-length sequences
    max_splits: int = 16
    min_split: int = 64
    keep_logits: bool = False

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_workers < 1:
            raise UsageError(f"{self.num_ranks} ranks of {self.num_workers} workers; at least one of each is needed")
        if not 1 <= self.max_rows <= MAX_ROWS:
            raise UsageError(f"max_num_seqs is {self.max_rows}; 1 to {MAX_ROWS} sequences can run at once")
        if self.max_model_len < 1 or self.page_size < 1 or self.max_splits < 1 or self.min_split < 1:
            raise UsageError("max_model_len, page_size, max_splits and min_split must be positive")

    @property
    def max_pages(self) -> int:
        """Pages of one sequence of full length."""
        return -(-self.max_model_len // self.page_size)


def cut(total: int, item_bytes: int, num_workers: int) -> list[tuple[int, int]]:
    """Deal `total` items of `item_bytes` to at most `num_workers` tasks of a worthwhile size."""
    num_parts = min(num_workers, total, max(1, total * item_bytes // MIN_TASK_BYTES))
    return [deal(total, num_parts, part) for part in range(num_parts)]


def cut_rows(num_rows: int, num_cols: int, num_workers: int) -> list[tuple[int, int]]:
    """Deal the rows of a bf16 matrix likewise, in pairs: an odd number of odd rows would end between two words."""
    pairs = cut((num_rows + 1) // 2, 4 * num_cols, num_workers)
    return [(2 * begin, min(2 * end, num_rows)) for begin, end in pairs]


def lower(model: Model, options: DecodeOptions) -> Graph:
    """The task graph of one iteration on all ranks; UsageError if the model cannot be dealt to that many ranks."""
    lowering = _Lowering(model, options)
    lowering.prepare()
    for operator in model.operators:
        if isinstance(operator, Embedding):
            lowering.embed(operator)
        elif isinstance(operator, SelfAttention):
            lowering.attention(operator)
        elif isinstance(operator, Mlp):
            lowering.mlp(operator)
        else:
            lowering.head(operator)
    return lowering.graph


class _Lowering:
    def __init__(self, model: Model, options: DecodeOptions) -> None:
        self.config, self.options = model.config, options
        self.shards = shard_model(model.config, options.num_ranks)
        self.graph = Graph(options.num_ranks, options.num_workers, options.num_schedulers)
        self.num_pages = options.num_pages or options.max_pages * options.max_rows
        self.shapes = [self._attention_shape(shard) for shard in self.shards]
        self.buffers: DecodeBuffers = make_buffers(self.graph, self.config, self.shards, self.shapes, options.keep_logits)
        self.graph.batch = self.buffers.batch
        self.tables: dict[tuple[str, int], Weight] = {}
        head_dim, positions = self.config.head_dim, options.max_model_len
        self.rope = [
            Slab(self.graph.weight("rope", rank, head_dim, [], WeightKind.ROPE, rows=positions), 0, positions)
            for rank in self._ranks()
        ]

    def _ranks(self) -> range:
        return range(self.options.num_ranks)

    def _attention_shape(self, shard: Shard) -> AttentionShape:
        return AttentionShape(
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

    # --- weights

    def _vector(self, rank: int, *parts: tuple[str, int, int]) -> Slab:
        segments = [Segment(f"{tensor}", begin, end) for tensor, begin, end in parts]
        weight = self.graph.weight(parts[0][0], rank, 1, segments, WeightKind.VECTOR)
        return Slab(weight, 0, weight.rows)

    def _norm(self, rank: int, tensor: str) -> Slab:
        return self._vector(rank, (f"{tensor}.weight", 0, self.config.hidden_size))

    def _table(self, rank: int, tensor: str) -> Slab:
        """This rank's vocabulary rows; a tied head and the embedding are one copy."""
        begin, end = self.shards[rank].vocab
        if (tensor, rank) not in self.tables:
            segment = Segment(f"{tensor}.weight", begin, end)
            self.tables[(tensor, rank)] = self.graph.weight(
                tensor, rank, self.config.hidden_size, [segment], WeightKind.MATRIX
            )
        return Slab(self.tables[(tensor, rank)], 0, end - begin)

    # --- operators

    def prepare(self) -> None:
        b = self.buffers
        self.graph.add(
            Prepare(
                rank=0,
                op="prepare",
                launch=LaunchKind.SCHEDULER,
                candidates=b.sampled.at(0),
                batch=b.batch.at(0),
                page_table=b.page_table.at(0),
                state=b.state.at(0),
                num_ranks=self.options.num_ranks,
                page_size=self.options.page_size,
                num_pages=self.num_pages,
                max_rows=self.options.max_rows,
                max_slots=self.options.max_rows,
                max_positions=self.options.max_model_len,
            )
        )

    def embed(self, op: Embedding) -> None:
        hidden, b = self.config.hidden_size, self.buffers
        cuts = cut(hidden, 4 * MAX_ROWS, self.options.num_workers)
        for rank in self._ranks():
            table = self._table(rank, op.table)
            for worker, (begin, end) in enumerate(cuts):
                out, epilogue = self._reduced_out(b.mlp_slots, rank, begin, end)
                self.graph.add(
                    Embed(
                        rank=rank,
                        op="embed",
                        worker=worker,
                        table=table,
                        out=out,
                        batch=b.batch.at(rank),
                        col_begin=begin,
                        num_cols=end - begin,
                        first_token=self.shards[rank].vocab[0],
                        epilogue=Epilogue.STORE if epilogue is Epilogue.ADD else epilogue,
                        num_ranks=self.options.num_ranks,
                    )
                )
        self._all_reduce("embed", b.mlp_slots, cuts, add=False)

    def attention(self, op: SelfAttention) -> None:
        layer, d = self.buffers.next_cache(), self.config.head_dim
        for rank in self._ranks():
            (q0, q1), (k0, k1) = self.shards[rank].heads, self.shards[rank].kv_heads
            parts = [(op.q, q0 * d, q1 * d), (op.k, k0 * d, k1 * d), (op.v, k0 * d, k1 * d)]
            self._qkv(op, rank, parts)
            self._attend(op, rank, *layer)
        o_parts = [(q0 * d, (q1 - q0) * d) for q0, q1 in (shard.heads for shard in self.shards)]
        self._row_parallel(f"{op.name}.o", op.o, self.buffers.attn, self.buffers.attn_slots, o_parts, op.o_bias)

    def _qkv(self, op: SelfAttention, rank: int, parts: list[tuple[str, int, int]]) -> None:
        hidden, b = self.config.hidden_size, self.buffers
        segments = [Segment(f"{tensor}.weight", begin, end) for tensor, begin, end in parts]
        weight = self.graph.weight(f"{op.name}.qkv", rank, hidden, segments, WeightKind.MATRIX)
        bias = self._vector(rank, *((f"{t}.bias", s, e) for t, s, e in parts)) if op.qkv_bias else None
        norm = self._norm(rank, op.norm)
        for worker, (begin, end) in enumerate(cut_rows(weight.rows, hidden, self.options.num_workers)):
            self.graph.add(
                Linear(
                    rank=rank,
                    op=f"{op.name}.qkv",
                    worker=worker,
                    x=b.x.at(rank),
                    slab=Slab(weight, begin, end),
                    out=b.qkv.at(rank, begin, end),
                    batch=b.batch.at(rank),
                    norm=norm,
                    bias=bias and Slab(bias.weight, begin, end),
                    eps=self.config.rms_norm_eps,
                )
            )

    def _attend(self, op: SelfAttention, rank: int, k_cache: Buffer, v_cache: Buffer) -> None:
        shape, b, d = self.shapes[rank], self.buffers, self.config.head_dim
        self.graph.add(
            Attention(
                rank=rank,
                op=f"{op.name}.attention",
                launch=LaunchKind.MASSIVE,
                shape=shape,
                qkv=b.qkv.at(rank, 0, shape.qkv_cols),
                k_cache=k_cache.at(rank, 0, shape.cache_cols),
                v_cache=v_cache.at(rank, 0, shape.cache_cols),
                page_table=b.page_table.at(rank),
                part=b.part.at(rank, 0, shape.num_q * shape.part_cols),
                batch=b.batch.at(rank),
                rope=self.rope[rank],
                q_norm=self._vector(rank, (f"{op.q_norm}.weight", 0, d)) if op.q_norm else None,
                k_norm=self._vector(rank, (f"{op.k_norm}.weight", 0, d)) if op.k_norm else None,
                eps=self.config.rms_norm_eps,
            )
        )
        for worker, (h0, h1) in enumerate(cut(shape.num_q, 4 * shape.part_cols, self.options.num_workers)):
            self.graph.add(
                Merge(
                    rank=rank,
                    op=f"{op.name}.merge",
                    worker=worker,
                    shape=shape,
                    part=b.part.at(rank, h0 * shape.part_cols, h1 * shape.part_cols),
                    out=b.attn.at(rank, h0 * d, h1 * d),
                    batch=b.batch.at(rank),
                )
            )

    def mlp(self, op: Mlp) -> None:
        b, hidden = self.buffers, self.config.hidden_size
        for rank in self._ranks():
            first, last = self.shards[rank].mlp
            cuts = cut(last - first, 4 * hidden, self.options.num_workers)
            # A task's gate rows and its up rows lie together: one slab, one stream.
            parts = [(t, first + begin, first + end) for begin, end in cuts for t in (op.gate, op.up)]
            segments = [Segment(f"{tensor}.weight", begin, end) for tensor, begin, end in parts]
            weight = self.graph.weight(f"{op.name}.gate_up", rank, hidden, segments, WeightKind.MATRIX)
            bias = self._vector(rank, *((f"{t}.bias", s, e) for t, s, e in parts)) if op.bias else None
            norm = self._norm(rank, op.norm)
            for worker, (begin, end) in enumerate(cuts):
                self.graph.add(
                    Linear(
                        rank=rank,
                        op=f"{op.name}.gate_up",
                        worker=worker,
                        x=b.x.at(rank),
                        slab=Slab(weight, 2 * begin, 2 * end),
                        out=b.hidden.at(rank, begin, end),
                        batch=b.batch.at(rank),
                        norm=norm,
                        bias=bias and Slab(bias.weight, 2 * begin, 2 * end),
                        epilogue=Epilogue.SWIGLU,
                        eps=self.config.rms_norm_eps,
                    )
                )
        down_parts = [(first, last - first) for first, last in (shard.mlp for shard in self.shards)]
        self._row_parallel(f"{op.name}.down", op.down, b.hidden, b.mlp_slots, down_parts, op.bias)

    def _row_parallel(
        self, name: str, tensor: str, x: Buffer, slots: Buffer, parts: list[tuple[int, int]], has_bias: bool
    ) -> None:
        """x_residual += sum over ranks of x_local @ columns.T; `parts` holds each rank's (first column, columns)."""
        hidden, b = self.config.hidden_size, self.buffers
        cuts = cut_rows(hidden, max(k for _, k in parts), self.options.num_workers)
        for rank in self._ranks():
            col_begin, k = parts[rank]
            segment = Segment(f"{tensor}.weight", 0, hidden)
            weight = self.graph.weight(name, rank, k, [segment], WeightKind.MATRIX, col_begin)
            bias = self._vector(rank, (f"{tensor}.bias", 0, hidden)) if has_bias and rank == 0 else None
            for worker, (begin, end) in enumerate(cuts):
                out, epilogue = self._reduced_out(slots, rank, begin, end)
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
                    )
                )
        self._all_reduce(name, slots, cuts, add=True)

    def _reduced_out(self, slots: Buffer, rank: int, begin: int, end: int) -> tuple[Region, Epilogue]:
        """Where columns [begin, end) that all ranks add up go: the residual itself, or this rank's slot on every rank."""
        if self.options.num_ranks == 1:
            return self.buffers.x.at(rank, begin, end), Epilogue.ADD
        return self._block(slots, rank, rank, begin, end), Epilogue.PUSH

    def _block(self, slots: Buffer, rank: int, source: int, begin: int, end: int) -> Region:
        base = source * MAX_ROWS * self.config.hidden_size
        return slots.at(rank, base + begin * MAX_ROWS, base + end * MAX_ROWS)

    def _all_reduce(self, name: str, slots: Buffer, cuts: list[tuple[int, int]], add: bool) -> None:
        if self.options.num_ranks == 1:
            return
        for rank in self._ranks():
            for worker, (begin, end) in enumerate(cuts):
                self.graph.add(
                    Sum(
                        rank=rank,
                        op=f"{name}.reduce",
                        worker=worker,
                        blocks=tuple(self._block(slots, rank, source, begin, end) for source in self._ranks()),
                        dst=self.buffers.x.at(rank, begin, end),
                        batch=self.buffers.batch.at(rank),
                        add=add,
                    )
                )

    def head(self, op: Head) -> None:
        b, hidden = self.buffers, self.config.hidden_size
        for rank in self._ranks():
            first = self.shards[rank].vocab[0]
            table, norm = self._table(rank, op.table), self._norm(rank, op.norm)
            cuts = cut_rows(table.rows, hidden, self.options.num_workers)
            for worker, (begin, end) in enumerate(cuts):
                self.graph.add(
                    Linear(
                        rank=rank,
                        op="head",
                        worker=worker,
                        x=b.x.at(rank),
                        slab=Slab(table.weight, begin, end),
                        out=b.candidates.at(rank, worker * CANDIDATES_BYTES, (worker + 1) * CANDIDATES_BYTES),
                        batch=b.batch.at(rank),
                        norm=norm,
                        epilogue=Epilogue.ARGMAX,
                        eps=self.config.rms_norm_eps,
                        first_token=first + begin,
                        logits=b.logits.at(rank, begin, end) if b.logits else None,
                    )
                )
            self.graph.add(
                Sample(
                    rank=rank,
                    op="sample",
                    worker=0,
                    candidates=b.candidates.at(rank, 0, len(cuts) * CANDIDATES_BYTES),
                    out=b.sampled.at(0, rank * CANDIDATES_BYTES, (rank + 1) * CANDIDATES_BYTES),
                    batch=b.batch.at(rank),
                )
            )
