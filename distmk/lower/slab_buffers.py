"""The buffers of a program whose tasks are slabs: activations of up to MAX_ROWS rows, and the slots of all-reduces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from distmk.abi import MAX_ROWS, Space
from distmk.graph.graph import Graph
from distmk.graph.regions import Buffer, Region, Slab
from distmk.lower.buffers import ProgramBuffers, declare_buffers
from distmk.lower.options import Bucket
from distmk.lower.partials import AttentionPartials, declare_partials
from distmk.lower.plan import WorkPlan
from distmk.lower.products import input_norms
from distmk.lower.rotating import RotatingBuffers, Rotation
from distmk.model.shards import Range

EMBED_WRITE = 0  # index of the embedding among an iteration's writes of the residual stream


def attention_write(layer: int) -> int:
    """Index of a layer's o projection among an iteration's writes of the residual stream."""
    return EMBED_WRITE + 1 + 2 * layer


def mlp_write(layer: int) -> int:
    """Index of a layer's down projection; of layer -1, that of the embedding, whose result layer 0 reads."""
    return EMBED_WRITE + 2 + 2 * layer


class Bf16Output(TypedDict, total=False):
    """Operands of a task that writes columns of the residual stream: their bf16 copy, and the columns that it resets; for a
    matrix that does not have the weight of its norm, that and where the columns' sums of squares go.
    """

    out_bf16: Region
    reset: Region | None
    input_norm: Slab | None
    squares: Region | None


@dataclass(frozen=True)
class HostSlots:
    """Memory of an all-reduce across hosts, f32 [MAX_ROWS, hidden_size] each (`lower/hierarchical.py`).

    ranks: partial sums, by rank within the host. hosts: the sums of the hosts. total: their sum.
    """

    ranks: tuple[Buffer, ...]
    hosts: tuple[Buffer, ...]
    total: Buffer


@dataclass(frozen=True)
class SlabBuffers(ProgramBuffers):
    """The buffers of a program whose tasks are slabs, of the size that the rank with the largest shard needs.

    Activations are [MAX_ROWS, columns]; a row is a token of the iteration.

    x: f32 [MAX_ROWS, hidden_size], the residual stream.
    x_bf16: the same in bf16, by write of the residual stream; times `input_norms` where there are some.
    input_norms: the weight of the norm behind each write on each rank, if it is not in the columns of a matrix.
    squares: f32 [MAX_ROWS, worker], the sums of squares of the columns of x that each worker wrote last.
    y: f32 [MAX_ROWS, hidden_size], what a post-norm normalizes; None: the model has none.
    qkv: f32 [MAX_ROWS, q, k and v columns of a rank], by layer.
    partials: attention's partial results, by layer.
    attention_out: bf16 [MAX_ROWS, query columns of a rank], by layer.
    mlp_hidden: bf16 [MAX_ROWS, MLP columns of a rank], by layer.
    host_slots: where all-reduces cross hosts, what they use instead of the three slots below.
    attention_slots: f32 [rank, hidden_size * MAX_ROWS], blocks that ranks push for the all-reduce behind o.
    mlp_slots: two of the same, for the embedding and down. Two, as a worker without rows of o may push to one early.
    """

    x: Buffer
    x_bf16: RotatingBuffers
    input_norms: tuple[tuple[Slab | None, ...], ...]
    squares: Buffer | None
    y: Buffer | None
    qkv: RotatingBuffers
    partials: tuple[AttentionPartials, ...]
    attention_out: RotatingBuffers
    mlp_hidden: RotatingBuffers
    host_slots: tuple[HostSlots, ...]
    attention_slots: Buffer
    mlp_slots: tuple[Buffer, Buffer]

    def slots_at(self, write: int) -> Buffer:
        """The slots of the all-reduce behind write `write` of the residual stream."""
        return (self.attention_slots, *self.mlp_slots)[_slots_index(write)]

    def host_slots_at(self, write: int) -> HostSlots:
        """The same of an all-reduce across hosts."""
        return self.host_slots[_slots_index(write)]

    def bf16_output(self, write: int, rank: int, worker: int, cols: Range) -> Bf16Output:
        """The bf16 copy of columns `cols` that `worker` makes in write `write` of the residual stream, and what goes with it."""
        output: Bf16Output = {
            "out_bf16": self.x_bf16.at(write).at(rank, *cols),
            "reset": self.x_bf16.reset_at(write, rank, *cols),
        }
        if self.squares and (norm := self.input_norms[write][rank]):
            output |= {"input_norm": Slab(norm.weight, *cols), "squares": self.squares.at(rank, worker, worker + 1)}
        return output

    def x_squares(self, plan: WorkPlan, write: int, rank: int) -> Region | None:
        """The sums of squares that the tasks of a write leave; None: there is no norm, or its weight is in a matrix."""
        if not self.squares or not self.input_norms[write][rank]:
            return None
        cols = plan.embed if write == EMBED_WRITE else plan.o if write % 2 == attention_write(0) % 2 else plan.down
        return self.squares.at(rank, cols.first_worker, cols.first_worker + cols.num_tasks)


def _slots_index(write: int) -> int:
    """Which of the slots behind o and the two behind down or the embedding."""
    if write % 2 == attention_write(0) % 2:
        return 0
    layer = write // 2 - 1  # -1: the embedding
    return 1 + layer % 2


def declare_slab_buffers(graph: Graph, plan: WorkPlan, bucket: Bucket) -> SlabBuffers:
    """Add the buffers of a program whose tasks are slabs to `graph`, and set its batch."""
    config, shapes = plan.config, plan.shapes
    mlp_cols = max(shard.mlp[1] - shard.mlp[0] for shard in plan.shards)
    one_shot = plan.options.all_reduces and not plan.options.crosses_hosts
    slots_cols = graph.num_ranks * MAX_ROWS * config.hidden_size if one_shot else 1
    per_layer = plan.attention_rotation
    return SlabBuffers(
        **vars(declare_buffers(graph, plan, bucket)),
        x=graph.buffer("x", config.hidden_size, rows=MAX_ROWS, space=Space.LOCAL),
        x_bf16=_rows(graph, "x_bf16", config.hidden_size, plan.residual_rotation),
        input_norms=tuple(input_norms(graph, plan, op) for op in plan.readers),
        squares=None if plan.options.folds_factors else _squares(graph),
        y=graph.buffer("y", config.hidden_size, rows=MAX_ROWS, space=Space.LOCAL) if plan.has_post_norms else None,
        qkv=_rows(graph, "qkv", max(shape.qkv_cols for shape in shapes), per_layer, "f32"),
        partials=declare_partials(graph, plan),
        attention_out=_rows(graph, "attention_out", max(s.num_q * s.head_dim for s in shapes), per_layer),
        mlp_hidden=_rows(graph, "mlp_hidden", mlp_cols, plan.mlp_rotation),
        host_slots=tuple(_host_slots(graph, plan, i) for i in range(3 if plan.options.crosses_hosts else 0)),
        attention_slots=graph.buffer("attention_slots", slots_cols, lamport=True),
        mlp_slots=(
            graph.buffer("mlp_slots", slots_cols, lamport=True),
            graph.buffer("mlp_slots1", slots_cols, lamport=True),
        ),
    )


def _host_slots(graph: Graph, plan: WorkPlan, index: int) -> HostSlots:
    hosts, cols = plan.options.hosts, plan.config.hidden_size

    def declare(name: str) -> Buffer:
        return graph.buffer(f"{name}_{index}", cols, rows=MAX_ROWS)

    return HostSlots(
        ranks=tuple(declare(f"sum_of_local_rank{local}") for local in range(max(map(len, hosts)))),
        hosts=tuple(declare(f"sum_of_host{host}") for host in range(len(hosts))),
        total=declare("sum_of_hosts"),
    )


def _squares(graph: Graph) -> Buffer:
    return graph.buffer("squares", graph.num_workers, rows=MAX_ROWS, space=Space.LOCAL)


def _rows(graph: Graph, name: str, cols: int, rotation: Rotation, dtype: str = "bf16") -> RotatingBuffers:
    return RotatingBuffers.declare(graph, name, cols, rotation, rows=MAX_ROWS, dtype=dtype)
