"""Programs whose matrices have several weight formats: proved, and with one part of a matrix for each format."""

from __future__ import annotations

from typing import Any

import pytest
from support.tiny_config import tiny_config

from distmk.check import check
from distmk.errors import UsageError
from distmk.formats import FORMATS
from distmk.graph.graph import Graph
from distmk.graph.regions import WeightKind
from distmk.lower import DecodeOptions, lower_programs
from distmk.model.config import ModelConfig
from distmk.models import build_model
from distmk.program.program import compile_graph
from distmk.tasks import LinearJobs, ReduceRows

LAYER = "model.layers.{}."
ATTENTION, MLP = LAYER + "self_attn.", LAYER + "mlp."
BUCKETS = (16, 64)


def config_of(formats: dict[str, str], **changes: Any) -> ModelConfig:
    """The formats of matrices in both layers, or of tables."""
    sizes = {"hidden_size": 96, "intermediate_size": 256, "head_dim": 64, **changes}
    pairs = {name.format(layer): kind for name, kind in formats.items() for layer in range(2)}
    return tiny_config(**sizes, formats=tuple(pairs.items()))


def lowered(config: ModelConfig, num_ranks: int = 1, num_workers: int = 3) -> tuple[Graph, ...]:
    options = DecodeOptions(num_ranks, num_workers, max_model_len=64, row_buckets=BUCKETS)
    return lower_programs(build_model(config), options)


MIXED = {
    ATTENTION + "q_proj": "fp8_block",
    ATTENTION + "v_proj": "int4",
    ATTENTION + "o_proj": "int4",
    MLP + "gate_proj": "fp8",
    MLP + "up_proj": "fp8",
    MLP + "down_proj": "q4_k",
    "model.embed_tokens": "q8_0",
}


@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 3), (2, 1), (3, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_mixed_formats(num_ranks: int, num_workers: int, tied: bool) -> None:
    graphs = lowered(config_of(MIXED, tie_embeddings=tied), num_ranks, num_workers)
    check(compile_graph(*graphs))
    for graph in graphs:
        matrices = [weight for weight in graph.weights if weight.kind is WeightKind.MATRIX and weight.rank == 0]
        formats = [(weight.name, weight.format.name) for weight in matrices if "layer0" in weight.name]
        assert formats == [
            ("layer0.qkv", "fp8_block"),
            ("layer0.qkv.1", "bf16"),
            ("layer0.qkv.2", "int4"),
            ("layer0.o", "int4"),
            ("layer0.gate_up", "fp8"),
            ("layer0.down", "q4_k"),
        ]
        tables = [weight.format.name for weight in matrices if "layer" not in weight.name]
        assert tables == (["q8_0"] if tied else ["q8_0", "bf16"]), "a tied table is held once"


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_shards_have_whole_groups(num_ranks: int) -> None:
    """Of o with heads of 64 columns in groups of 128, and of down in blocks of 256, which every rank has as a whole."""
    (slabs, _) = lowered(config_of(MIXED, num_heads=6, num_kv_heads=2), num_ranks)
    for name, num_cols, group in (("layer1.o", 6 * 64, 128), ("layer1.down", 256, 256)):
        shards = sorted((weight for weight in slabs.weights if weight.name == name), key=lambda weight: weight.rank)
        assert [weight.col_begin for weight in shards] == [
            num_cols * rank // num_ranks for rank in range(num_ranks)
        ] or (name == "layer1.o")
        assert sum(weight.cols for weight in shards) == num_cols
        for weight in shards:
            first = weight.col_begin - weight.lead
            assert first % group == 0 and weight.lead < group and weight.tail < group
            assert weight.stored_cols % group == 0 and first + weight.stored_cols <= num_cols


def test_gate_and_up_of_two_formats_become_bf16() -> None:
    model = build_model(config_of({MLP + "gate_proj": "fp8", ATTENTION + "k_proj": "fp8"}))
    found = {name: kind for name, kind in model.matrix_formats if "layers.0" in name and kind != "bf16"}
    assert found == {"model.layers.0.self_attn.k_proj": "fp8"}


def test_layers_are_alike() -> None:
    assert config_of(MIXED).layers_are_alike
    assert not tiny_config(formats=(("model.layers.1.self_attn.v_proj", "fp8"),)).layers_are_alike


def test_order_needs_all_columns() -> None:
    """With act-order q and k, which may have different orders, are two parts, and o must not be divided."""
    ordered = {ATTENTION + name: "int4_ordered" for name in ("q_proj", "k_proj")}
    (slabs, _) = lowered(config_of(ordered), 2)
    check(compile_graph(*lowered(config_of(ordered | {ATTENTION + "o_proj": "int4_ordered"}))))
    parts = [weight.name for weight in slabs.weights if weight.name.startswith("layer0.qkv") and weight.rank == 0]
    assert parts == ["layer0.qkv", "layer0.qkv.1", "layer0.qkv.2"]
    with pytest.raises(UsageError, match=r"layers\.0\.self_attn\.o_proj stores .* \(desc_act\), which 2 ranks cannot"):
        lowered(config_of({ATTENTION + "o_proj": "int4_ordered"}), 2)


def test_every_format_is_proved() -> None:
    """As the format of down, whose shards of three ranks begin inside of groups."""
    for found in FORMATS.values():
        num_ranks = 1 if found.is_ordered else 3
        check(compile_graph(*lowered(config_of({MLP + "down_proj": found.name}), num_ranks, 1)))


TILED = {name: kind for name, kind in MIXED.items() if "embed" not in name} | {"lm_head": "int4"}


def in_tiles(num_ranks: int, num_workers: int, **formats: str) -> Graph:
    """The graph of the jobs of a GPU's program, which is proved."""
    sizes = {"num_heads": 6, "num_kv_heads": 2, "intermediate_size": 512}
    more = {"tiled": True, "attention_launch": "spread", "row_buckets": BUCKETS}
    options = DecodeOptions(num_ranks, num_workers, max_model_len=64, **more)
    graphs = lower_programs(build_model(config_of(TILED | formats, **sizes)), options)
    check(compile_graph(*graphs))
    return graphs[1]


@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 3), (1, 16), (2, 5)])
def test_packed_jobs(num_ranks: int, num_workers: int) -> None:
    """Every part of a matrix reads the activations of its format. Where all are packed, there are no others."""
    graph = in_tiles(num_ranks, num_workers)
    jobs = [task for task in graph.tasks if isinstance(task, LinearJobs) and task.rank == 0]
    for task in jobs:
        is_packed = task.slab.weight.format.name != "bf16"
        assert not task.op.endswith("qkv") or task.x.buffer.name == ("job_lane_x" if is_packed else "job_normalized_x")
    assert [task.slab.weight.format.name for task in jobs if task.op == "layer0.qkv"] == ["fp8_block", "bf16", "int4"]
    sums = {task.op: task for task in graph.tasks if isinstance(task, ReduceRows) and task.rank == 0}
    before_qkv, before_gate = sums["embed.reduce"], sums["layer0.o.reduce"]
    assert before_qkv.out and before_qkv.lane_out and before_qkv.input_norm
    assert before_gate.lane_out and before_gate.input_norm and not before_gate.out


def test_shards_that_begin_inside_of_blocks_have_no_jobs() -> None:
    with pytest.raises(UsageError, match=r"with shards of packed weights that begin inside of 64 columns, GPUs and"):
        in_tiles(3, 2)
