"""The memory that a model takes on a rank, by use, before anything is loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from distmk.abi import MAX_BUCKET_ROWS, MAX_ROWS
from distmk.backends.defaults import backend_choices, choose_model_len
from distmk.backends.host.room import available_memory
from distmk.doctor.finding import Finding
from distmk.doctor.gpus import read_gpus
from distmk.engine.engine_args import EngineArgs
from distmk.errors import UsageError
from distmk.lower.memory import least_memory
from distmk.lower.options import DecodeOptions
from distmk.weights import open_checkpoint
from distmk.weights.choose_formats import bytes_by_format, choose_formats

GPU_WORKERS = 132


@dataclass(frozen=True)
class ModelUse:
    """How a model is to be used: the options of the same names of `distmk generate`."""

    model: str
    revision: str | None = None
    quantization: str | None = None
    ranks: int = 1
    max_model_len: int | None = None


def check_model_memory(use: ModelUse, backend: str) -> Finding:
    """A table of the memory of a rank, and how many tokens its KV cache has room for here.

    backend: host or cuda. UsageError: no such model, or as the engine would raise it for these options.
    """
    checkpoint = open_checkpoint(use.model, _load_format(use.model), revision=use.revision)
    choices = backend_choices(backend)
    formats = choose_formats(checkpoint, use.quantization, choices["tiled"])
    config = dataclasses.replace(checkpoint.config, formats=formats)
    length = choose_model_len(use.max_model_len, config)
    options = DecodeOptions(
        num_ranks=use.ranks,
        num_workers=GPU_WORKERS if backend == "cuda" else 1,
        max_model_len=length,
        row_buckets=(MAX_ROWS, MAX_BUCKET_ROWS),
        **choices,
    )
    options = dataclasses.replace(options, num_pages=options.max_pages)
    need = least_memory(config, options)
    token_bytes = need.kv_cache / (options.max_pages * options.page_size)
    fixed = need.weights + need.heap + need.jobs
    rows = [(f"weights, {each.format}", each.listed, each.num_bytes / use.ranks) for each in bytes_by_format(config)]
    rows += [("activations and exchanges", "", need.heap + need.jobs)]
    rows += [("KV cache, bf16", f"{token_bytes / 1e3:.1f} KB a token; {length} tokens", need.kv_cache)]
    details = tuple(f"{what:<26}{which:<34}{size / 1e9:>8.2f} GB" for what, which, size in rows)
    where = f"a rank of {use.ranks}" if use.ranks > 1 else "one rank"
    total = f"{where} takes {(fixed + need.kv_cache) / 1e9:.2f} GB with one sequence of {length} tokens"
    room = _room(backend, use.ranks)
    if room is None:
        return Finding("model memory", "ok", total, details=details)
    tokens = int((room - fixed) / token_bytes)
    if tokens >= length:
        return Finding("model memory", "ok", f"{total}; there is room for {tokens} tokens", details=details)
    lacking = f"room for {tokens} tokens" if tokens > 0 else "no room for its weights"
    less = "lower --max-model-len" if tokens > 0 else "try --quantization int4"
    text = f"{total}; there is {lacking}: {less}, or use more {'GPUs' if backend == 'cuda' else 'hosts'}"
    return Finding("model memory", "warn", text, details=details)


def _load_format(model: str) -> str:
    """Files on disk say in which formats their weights are. Nothing is fetched from the Hub but a config."""
    path = Path(model)
    has_weights = path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.safetensors")))
    return "auto" if has_weights else "dummy"


def _room(backend: str, num_ranks: int) -> float | None:
    """Bytes of a rank that weights and KV cache may take here. None: there is no GPU to ask."""
    if backend == "host":
        return EngineArgs.gpu_memory_utilization * available_memory() / num_ranks
    try:
        found = read_gpus()
    except UsageError:
        return None
    return EngineArgs.gpu_memory_utilization * min(gpu.memory_bytes for gpu in found) if found else None
