"""An estimate of a program's memory from config and options, to refuse a model that does not fit before compilation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distmk.abi import MAX_BUCKET_ROWS, MAX_ROWS, ROW_SHARE_FLOATS
from distmk.formats import find_format
from distmk.lower.job_buffers import splits_of
from distmk.lower.options import DecodeOptions, settle_factors
from distmk.model.config import ModelConfig
from distmk.model.nodes import Matrix
from distmk.model.operators import Embedding, Head
from distmk.model.shards import Shard, shard_model
from distmk.models import build_model
from distmk.tasks.activations import owned_rows

BF16_BYTES = 2
F32_BYTES = 4


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a rank needs: private memory by use, and the symmetric heap. jobs: activations of job iterations."""

    weights: int
    kv_cache: int
    heap: int
    jobs: int = 0


def least_memory(config: ModelConfig, options: DecodeOptions) -> MemoryNeed:
    """A lower bound of the memory of each rank: the smallest shard's weights and the largest allocations.

    The computation takes the same time for all widths. UsageError: there are more ranks than query heads, or as
    `settle_factors`.
    """
    shards = shard_model(config, options.num_ranks)
    hidden, head_dim = config.hidden_size, config.head_dim
    num_q, num_kv = (min(getattr(shard, name) for shard in shards) for name in ("num_q", "num_kv"))
    mlp_cols, vocab_rows = config.intermediate_size // options.num_ranks, config.vocab_size // options.num_ranks
    shapes = {
        **dict.fromkeys(("q", "o"), (num_q * head_dim, hidden)),
        **dict.fromkeys(("k", "v"), (num_kv * head_dim, hidden)),
        **dict.fromkeys(("gate", "up", "down"), (mlp_cols, hidden)),
        "table": (vocab_rows, hidden),
    }
    if config.formats:
        matrices = _quantized_bytes(config, options, shapes)
    else:
        # A tied head has its own copy, which is multiplied by the weight of the norm before it.
        layer = sum(rows * cols for name, (rows, cols) in shapes.items() if name != "table")
        matrices = (config.num_layers * layer + 2 * vocab_rows * hidden) * BF16_BYTES
    rope = options.max_model_len * head_dim * F32_BYTES
    cached = 2 * max(shard.num_kv for shard in shards) * head_dim * options.total_pages * options.page_size
    has_slots = options.row_buckets[0] <= MAX_ROWS and options.all_reduces and not options.crosses_hosts
    pushed = 3 * options.num_ranks if has_slots else 0
    jobs, from_peers = _job_bytes(config, options, shards) if options.row_buckets[-1] > MAX_ROWS else (0, 0)
    return MemoryNeed(
        weights=matrices + rope,
        kv_cache=config.num_layers * cached * BF16_BYTES,
        heap=pushed * MAX_ROWS * hidden * F32_BYTES + from_peers,
        jobs=jobs,
    )


def _quantized_bytes(config: ModelConfig, options: DecodeOptions, shapes: Mapping[str, tuple[int, int]]) -> int:
    """Bytes of matrices whose formats differ from bf16. `shapes`: rows and columns by the fields of operators."""
    model, total = build_model(config), 0
    tables: list[tuple[str, str]] = []
    for op in model.operators:
        if isinstance(op, Embedding | Head):
            tables.append((op.table, op.format))
            continue
        for name, matrix in vars(op).items():
            if isinstance(matrix, Matrix):
                rows, cols = shapes[name] if name not in ("o", "down") else shapes[name][::-1]
                total += find_format(matrix.format).slab_bytes(rows, cols, tiled=False)
    # A tied head has its own copy only if factors are multiplied into it.
    for _, name in tables if settle_factors(model, options).folds_factors else set(tables):
        total += find_format(name).slab_bytes(*shapes["table"], tiled=False)
    return total


def _job_bytes(config: ModelConfig, options: DecodeOptions, shards: list[Shard]) -> tuple[int, int]:
    """Bytes of the buffers of `job_buffers.py`: private, and in the symmetric heap."""
    hidden, owned = config.hidden_size, owned_rows(options.num_ranks)
    q_cols = max(shard.num_q for shard in shards) * config.head_dim
    qkv_cols = q_cols + 2 * max(shard.num_kv for shard in shards) * config.head_dim
    mlp_cols = max(shard.mlp[1] - shard.mlp[0] for shard in shards)
    # Queries before and after their norm, attention's output, the MLP's activations, and activations of sampled rows.
    # Operands of further formats on GPUs are not counted.
    activations = MAX_BUCKET_ROWS * (qkv_cols + 2 * q_cols + mlp_cols + hidden) * BF16_BYTES
    least_cols = min(min(shard.num_q * config.head_dim, shard.mlp[1] - shard.mlp[0]) for shard in shards)
    num_k_splits = splits_of(least_cols, options.tiled)
    from_peers = MAX_BUCKET_ROWS * hidden * BF16_BYTES + owned * options.num_ranks * num_k_splits * hidden * F32_BYTES
    shares = options.num_workers * ROW_SHARE_FLOATS * F32_BYTES if options.tiled else 0
    private = activations + owned * hidden * F32_BYTES + shares
    return (private, from_peers) if options.num_ranks > 1 else (private + from_peers, 0)
