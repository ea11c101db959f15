"""The buffers of a program whose tasks are slabs: activations of up to MAX_ROWS rows, and the blocks of all-reduces."""

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
    """Index of a layer's down projection among these writes. Layer -1 stands for the embedding, whose result layer 0 reads."""
    return EMBED_WRITE + 2 + 2 * layer


class Bf16Output(TypedDict, total=False):
    """Output operands of a task that writes columns of the residual stream: their bf16 copy, and columns to be reset.

    If the next matrix does not contain the weight of its norm, also that weight and the region for the columns' sums of
    squares.
    """

    out_bf16: Region
    lamport_reset: Region | None
    input_norm: Slab | None
    squares: Region | None


@dataclass(frozen=True)
class HostSums:
    """Memory of an all-reduce across hosts; each buffer is f32 [MAX_ROWS, hidden_size] (`lower/hierarchical.py`).

    ranks: partial sums, by rank within the host. hosts: the sums of the hosts. total: their sum.
    """

    ranks: tuple[Buffer, ...]
    hosts: tuple[Buffer, ...]
    total: Buffer


@dataclass(frozen=True)
class SlabBuffers(ProgramBuffers):
    """The buffers of a program whose tasks are slabs, sized for the rank with the largest shard.

    Activations are [MAX_ROWS, columns]; a row is a token of the iteration.

    x: f32 [MAX_ROWS, hidden_size], the residual stream.
    x_bf16: the residual stream in bf16, by write; multiplied by the write's `input_norms`, if it has some.
    input_norms: by write and rank, the weight of the next norm, unless it is folded into the columns of a matrix.
    squares: f32 [MAX_ROWS, worker], the sums of squares of the columns of x that each worker wrote last.
    post_norm_input: f32 [MAX_ROWS, hidden_size], the input of a post-norm; None: the model has no post-norms.
    qkv: f32 [MAX_ROWS, q, k and v columns of a rank], by layer.
    partials: attention's partial results, by layer.
    attention_out: bf16 [MAX_ROWS, query columns of a rank], by layer.
    mlp_hidden: bf16 [MAX_ROWS, MLP columns of a rank], by layer.
    host_sums: the memory of all-reduces across hosts, which then do not use the buffers below.
    o_allreduce_blocks: f32 [rank, hidden_size * MAX_ROWS], blocks that ranks push for the all-reduce after o.
    mlp_allreduce_blocks: two buffers of that shape, for the embedding and down. With a single one, a worker without rows of o
      could push too early.
    """

    x: Buffer
    x_bf16: RotatingBuffers
    input_norms: tuple[tuple[Slab | None, ...], ...]
    squares: Buffer | None
    post_norm_input: Buffer | None
    qkv: RotatingBuffers
    partials: tuple[AttentionPartials, ...]
    attention_out: RotatingBuffers
    mlp_hidden: RotatingBuffers
    host_sums: tuple[HostSums, ...]
    o_allreduce_blocks: Buffer
    mlp_allreduce_blocks: tuple[Buffer, Buffer]

    def allreduce_blocks_at(self, write: int) -> Buffer:
        """The blocks of the all-reduce that belongs to write `write` of the residual stream."""
        return (self.o_allreduce_blocks, *self.mlp_allreduce_blocks)[_allreduce_index(write)]

    def host_sums_at(self, write: int) -> HostSums:
        """The memory of the all-reduce across hosts that belongs to write `write`."""
        return self.host_sums[_allreduce_index(write)]

    def bf16_output(self, write: int, rank: int, worker: int, cols: Range) -> Bf16Output:
        """Output operands of `worker` for columns `cols` in write `write`: the bf16 copy, and what the next norm needs."""
        output: Bf16Output = {
            "out_bf16": self.x_bf16.at(write).at(rank, *cols),
            "lamport_reset": self.x_bf16.reset_at(write, rank, *cols),
        }
        if self.squares and (norm := self.input_norms[write][rank]):
            output |= {"input_norm": Slab(norm.weight, *cols), "squares": self.squares.at(rank, worker, worker + 1)}
        return output

    def x_squares(self, plan: WorkPlan, write: int, rank: int) -> Region | None:
        """The sums of squares that the tasks of a write store; None: no norm, or its weight is folded into a matrix."""
        if not self.squares or not self.input_norms[write][rank]:
            return None
        cols = plan.embed if write == EMBED_WRITE else plan.o if write % 2 == attention_write(0) % 2 else plan.down
        return self.squares.at(rank, cols.first_worker, cols.first_worker + cols.num_tasks)


def _allreduce_index(write: int) -> int:
    """The index of a write's blocks: 0 for o; 1 or 2 for down and the embedding."""
    if write % 2 == attention_write(0) % 2:
        return 0
    layer = write // 2 - 1  # -1: the embedding
    return 1 + layer % 2


def declare_slab_buffers(graph: Graph, plan: WorkPlan, bucket: Bucket) -> SlabBuffers:
    """Add the buffers of a program whose tasks are slabs to `graph`, and set its batch."""
    config, shapes = plan.config, plan.shapes
    mlp_cols = max(shard.mlp[1] - shard.mlp[0] for shard in plan.shards)
    one_shot = plan.options.all_reduces and not plan.options.crosses_hosts
    block_cols = graph.num_ranks * MAX_ROWS * config.hidden_size if one_shot else 1
    per_layer = plan.attention_rotation
    return SlabBuffers(
        **vars(declare_buffers(graph, plan, bucket)),
        x=graph.buffer("x", config.hidden_size, rows=MAX_ROWS, space=Space.LOCAL),
        x_bf16=_rows(graph, "x_bf16", config.hidden_size, plan.residual_rotation),
        input_norms=tuple(input_norms(graph, plan, op) for op in plan.readers),
        squares=None if plan.options.folds_factors else _squares(graph),
        post_norm_input=graph.buffer("post_norm_input", config.hidden_size, rows=MAX_ROWS, space=Space.LOCAL)
        if plan.has_post_norms
        else None,
        qkv=_rows(graph, "qkv", max(shape.qkv_cols for shape in shapes), per_layer, "f32"),
        partials=declare_partials(graph, plan),
        attention_out=_rows(graph, "attention_out", max(s.num_q * s.head_dim for s in shapes), per_layer),
        mlp_hidden=_rows(graph, "mlp_hidden", mlp_cols, plan.mlp_rotation),
        host_sums=tuple(_declare_host_sums(graph, plan, i) for i in range(3 if plan.options.crosses_hosts else 0)),
        o_allreduce_blocks=graph.buffer("o_allreduce_blocks", block_cols, lamport=True),
        mlp_allreduce_blocks=(
            graph.buffer("mlp_allreduce_blocks", block_cols, lamport=True),
            graph.buffer("mlp_allreduce_blocks1", block_cols, lamport=True),
        ),
    )


def _declare_host_sums(graph: Graph, plan: WorkPlan, index: int) -> HostSums:
    hosts, cols = plan.options.hosts, plan.config.hidden_size

    def declare(name: str) -> Buffer:
        return graph.buffer(f"{name}_{index}", cols, rows=MAX_ROWS)

    return HostSums(
        ranks=tuple(declare(f"sum_of_local_rank{local}") for local in range(max(map(len, hosts)))),
        hosts=tuple(declare(f"sum_of_host{host}") for host in range(len(hosts))),
        total=declare("sum_of_hosts"),
    )


def _squares(graph: Graph) -> Buffer:
    return graph.buffer("squares", graph.num_workers, rows=MAX_ROWS, space=Space.LOCAL)


def _rows(graph: Graph, name: str, cols: int, rotation: Rotation, dtype: str = "bf16") -> RotatingBuffers:
    return RotatingBuffers.declare(graph, name, cols, rotation, rows=MAX_ROWS, dtype=dtype)
