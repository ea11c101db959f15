"""Sampling defaults that a model comes with: generation_config.json, or the metadata that GGUF files have instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distmk.engine.sampling_params import SamplingParams
from distmk.errors import ModelError, UsageError, one_line
from distmk.user_files import exists, is_folder
from distmk.weights.checkpoint import Checkpoint
from distmk.weights.gguf_header import read_header
from distmk.weights.hf_config import read_json

FILE = "generation_config.json"
TEMPERATURE = 1.0
"""Where neither the model nor the user says anything, as in OpenAI and vLLM."""

_FIELDS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_HF_FIELDS = {**_FIELDS, "max_tokens": "max_new_tokens"}
_GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
_GGUF_FIELDS = {field: f"general.sampling.{_GGUF_NAMES.get(field, field)}" for field in _FIELDS}


def sampling_defaults(checkpoint: Checkpoint, source: str = "auto") -> dict[str, Any]:
    """Fields of `SamplingParams` by name, for requests that do not give them; temperature is always among them.

    `source` (vLLM's --generation-config): auto (the model's files), vllm (nothing of the model), or a folder with a
    generation_config.json. UsageError: the folder has none. ModelError: a value is out of range.
    """
    where, values, fields = _read(checkpoint, source)
    given = {field: values[key] for field, key in fields.items() if values.get(key) is not None}
    try:
        params = SamplingParams(**given)
    except UsageError as error:
        raise ModelError(f"{where}: {one_line(error)}; --generation-config vllm goes without it") from None
    return {"temperature": TEMPERATURE} | {field: getattr(params, field) for field in given}


def _read(checkpoint: Checkpoint, source: str) -> tuple[str, Mapping[str, Any], Mapping[str, str]]:
    """Where the values are, the values by their key, and the key of each field."""
    path = checkpoint.path
    if source == "vllm" or (source == "auto" and path is None):
        return "", {}, {}
    if source == "auto" and path is not None and path.suffix.lower() == ".gguf":
        return str(path), read_header(path).metadata, _GGUF_FIELDS
    folder = Path(source) if source != "auto" or path is None else path if is_folder(path) else path.parent
    file = folder / FILE
    if not exists(file):
        if source == "auto":
            return "", {}, {}
        raise UsageError(f"--generation-config {source!r}: it has no {FILE}; expected auto, vllm or a folder with one")
    return str(file), read_json(file), _HF_FIELDS
