"""Which matrices stay packed on GPUs, and what iterations of jobs need of them."""

from __future__ import annotations

from distmk.abi import ACTIVATION_BLOCK_COLS
from distmk.formats import WeightFormat, find_format
from distmk.model.operators import Head, Mlp, Model, Operator, SelfAttention
from distmk.model.shards import shard_model

CUT_BLOCKS = f"shards of packed weights that begin inside of {ACTIVATION_BLOCK_COLS} columns"


def is_packed(found: type[WeightFormat]) -> bool:
    """Whether GPUs multiply packed tiles of the format, which contain no factors."""
    return found.runs_on_gpu and not found.folds_factors


def input_formats(op: Operator | None) -> list[type[WeightFormat]]:
    """The formats of the matrices with which an operator multiplies rows of the residual stream."""
    if isinstance(op, SelfAttention):
        return [find_format(matrix.format) for matrix in (op.q, op.k, op.v)]
    if isinstance(op, Mlp):
        return [find_format(op.gate.format)]
    return [find_format(op.format)] if isinstance(op, Head) else []


def shards_fit_jobs(model: Model, num_ranks: int) -> bool:
    """Whether jobs can multiply the ranks' shards of o and down on GPUs.

    If a shard of a packed matrix begins inside of a group, its activations have columns of zeros for the rest of the
    group: whole blocks. Raises UsageError if there are more ranks than query heads.
    """
    shards, head_dim = shard_model(model.config, num_ranks), model.config.head_dim
    begins = {"o": [shard.heads[0] * head_dim for shard in shards], "down": [shard.mlp[0] for shard in shards]}
    for op in model.operators:
        for name in begins.keys() & vars(op).keys():
            found = find_format(getattr(op, name).format)
            if is_packed(found) and any(begin % found.group_cols % ACTIVATION_BLOCK_COLS for begin in begins[name]):
                return False
    return True
