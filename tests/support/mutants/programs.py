"""Programs of every kind that the mutation test damages, with the content of their memory before a launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from support import graphs
from support.batches import decode_batch
from support.programs import SMALLEST, with_attention
from support.tiny_config import tiny_config

from distmk.abi import MAX_BUCKET_ROWS, Batch, Scores
from distmk.graph.graph import Graph
from distmk.graph.regions import ITEM_BYTES, WeightKind
from distmk.lower import DecodeOptions, lower_programs
from distmk.models import build_model
from distmk.program.layout import Placed
from distmk.program.program import Program, compile_graph

Content = dict[tuple[str, int], npt.NDArray[np.uint8]]  # by name and rank of an allocation


@dataclass(frozen=True)
class Subject:
    """A program, the content of its allocations, and how many ranks a virtual host has (0: all share memory)."""

    name: str
    program: Program
    content: Content
    node_size: int = 0

    @property
    def decodes(self) -> bool:
        return bool(self.program.ranks[0].header.iteration_batch)


def _decode(
    num_ranks: int = 1, num_workers: int = 2, layers: tuple[dict[str, Any], ...] = ({},), **changes: Any
) -> Callable[[], Graph]:
    """`layers`: fields of the attention of successive layers, over and over."""
    names = {
        "hidden_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "tie_embeddings",
        "intermediate_size",
        "formats",
    }
    config = {name: changes.pop(name) for name in names & set(changes)}
    options: dict[str, Any] = {
        "max_seqs": 3,
        "max_model_len": 48,
        "page_size": 8,
        "max_kv_splits": 3,
        "min_kv_split_len": 4,
    }
    options |= changes

    def build() -> Graph:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
        model = with_attention(build_model(tiny_config("qwen3-0.6b", vocab_size=128, **(sizes | config))), layers)
        return lower_programs(model, DecodeOptions(num_ranks, num_workers, **options))[0]

    return build


def _graph(shape: str, num_ranks: int, num_workers: int) -> Callable[[], Graph]:
    return lambda: graphs.SHAPES[shape](num_ranks, num_workers)


FUSED = {
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 64,
    "max_seqs": 1,
    "attention_launch": "spread",
    "num_layers": 2,
}
LAYER = "model.layers.0."
PACKED = (
    ("model.embed_tokens", "q8_0"),
    (f"{LAYER}self_attn.q_proj", "int4_g32_ordered"),
    (f"{LAYER}self_attn.v_proj", "fp8"),
    (f"{LAYER}self_attn.o_proj", "int4"),
    (f"{LAYER}mlp.gate_proj", "fp8_block"),
    (f"{LAYER}mlp.up_proj", "fp8_block"),
    (f"{LAYER}mlp.down_proj", "q4_1"),
)
KINDS: dict[str, Callable[[], Graph]] = {
    "decode, 1 rank": _decode(),
    "decode, 2 ranks": _decode(2),
    "decode, 3 ranks": _decode(3, num_heads=6, num_kv_heads=3),
    "decode, fused combine": _decode(1, 3, **FUSED),
    "decode, fused combine up to a length": _decode(
        1, 20, **(FUSED | {"num_kv_heads": 1, "max_kv_splits": 16, "min_kv_split_len": 1})
    ),
    "decode, fused combine, 2 ranks": _decode(2, 3, **FUSED),
    "decode, layers that differ": _decode(
        1, 3, layers=({}, {"window": 9, "scores": Scores(0.3, 2.0)}), **(FUSED | {"num_layers": 4})
    ),
    "decode, spread attention, 2 ranks": _decode(2, 3, attention_launch="spread"),
    "decode, one scheduler": _decode(2, 3, num_schedulers=1),
    "decode, tied embeddings, logits": _decode(1, 2, tie_embeddings=True, keep_logits=True),
    "decode, loopback": _decode(1, 2, loopback=True),
    "decode, factors left": _decode(2, 3, folds_factors=False),
    "decode, packed weights": _decode(2, 3, formats=PACKED),
    "decode, packed weights, jobs": _decode(2, 2, formats=PACKED, row_buckets=(MAX_BUCKET_ROWS,), max_seqs=18),
    "decode, long splits": _decode(1, 2, max_model_len=400, max_kv_splits=2, page_size=16, num_layers=2),
    "decode, over a network": _decode(2, 2, attention_launch="spread", max_seqs=2),
    "decode, 2 hosts": _decode(3, 3, num_heads=6, num_kv_heads=3, host_sizes=(2, 1)),
    "decode, 2 hosts, over a network": _decode(3, 2, num_heads=6, num_kv_heads=3, host_sizes=(2, 1)),
    "decode, jobs": _decode(2, 2, row_buckets=(MAX_BUCKET_ROWS,), max_seqs=18),
    "ring": _graph("ring", 3, 2),
    "ring, over a network": _graph("ring", 3, 2),
    "allreduce": _graph("all_reduce", 2, 2),
    "push and reduce": _graph("push_reduce", 2, 2),
    "pipeline": _graph("pipeline", 3, 1),
    "just in time": _graph("handed_out", 2, 2),
    "spread": _graph("spread", 2, 3),
    "overtaken": _graph("overtaken", 1, 2),
}


def subject(kind: str) -> Subject:
    """The program of a kind."""
    graph = KINDS[kind]()
    program = compile_graph(graph)
    node_size = max(graph.host_sizes, default=1) if "network" in kind else 0
    return Subject(kind, program, _content(graph, program), node_size)


def _content(graph: Graph, program: Program) -> Content:
    """Small random numbers in buffers of floats and in weights; a batch where no task makes one; else zeros."""
    rng = np.random.default_rng(1)
    found: Content = {}
    for buffer, placed in program.placement.buffers.items():
        for rank in range(graph.num_ranks):
            if buffer.name == "batch" and graph.batch is None:
                raw = np.frombuffer(bytes(decode_batch(5, np.random.default_rng(2))), np.uint8)
            elif buffer.lamport or buffer.dtype not in ("f32", "bf16"):
                raw = np.zeros(placed.num_bytes, np.uint8)
            else:
                raw = _numbers(rng, placed.num_bytes, ITEM_BYTES[buffer.dtype])
            found[(placed.name, rank)] = raw
    for weight, placed in program.placement.weights.items():
        if weight.data is not None:
            raw = np.ascontiguousarray(weight.data).view(np.uint8).reshape(-1)
            if not raw.any():
                raw = _numbers(rng, placed.num_bytes, weight.data.dtype.itemsize)
        else:
            raw = _numbers(rng, placed.num_bytes, 2 if weight.kind is WeightKind.MATRIX else 4)
        found[(placed.name, weight.rank)] = raw
    assert ctypes.sizeof(Batch) == 528
    return found


def _numbers(rng: np.random.Generator, num_bytes: int, item_bytes: int) -> npt.NDArray[np.uint8]:
    numbers = rng.normal(0, 0.3, -(-num_bytes // item_bytes)).astype(np.float32)
    if item_bytes == 2:
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)[:num_bytes].copy()
    return numbers.view(np.uint8)[:num_bytes].copy()


def ranks_of(piece: Placed, num_ranks: int) -> range:
    return range(num_ranks) if piece.rank < 0 else range(piece.rank, piece.rank + 1)


__all__ = ["KINDS", "SMALLEST", "Content", "Subject", "ranks_of", "subject"]
