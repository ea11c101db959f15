"""Model weights from Hugging Face folders, GGUF files, or a random generator; see `open_checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distmk.errors import ModelError, UsageError
from distmk.model.config import ModelConfig
from distmk.model.presets import PRESETS
from distmk.models import expected_tensors
from distmk.user_files import exists, is_folder, list_folder
from distmk.weights.checkpoint import Checkpoint

ADAPTER_CONFIG = "adapter_config.json"

__all__ = ["Checkpoint", "expected_tensors", "open_checkpoint", "open_own", "tokenizer_path"]


def open_checkpoint(
    path: str | Path, load_format: str = "auto", seed: int = 0, revision: str | None = None
) -> Checkpoint:
    """Open a model: a Hugging Face folder, a .gguf file, a folder with one .gguf in it, or a name on the Hugging Face Hub.

    A file or folder at `path` comes first, then a preset of that name, then the Hub (`distmk.weights.hub`). `revision`
    is a branch, tag or commit of the model on the Hub.

    With `load_format` "dummy" the weights are random, generated from `seed`, and only a config is needed: any of the
    above, a config.json file, or the name of a preset. Every tensor that the config calls for must exist with the right
    shape; weights are not read yet. ModelError: `path` cannot be used. UsageError: unknown `load_format`.
    """
    if load_format not in ("auto", "dummy"):
        raise UsageError(f"load format {load_format!r} is not known; expected 'auto' or 'dummy'")
    where = Path(path)
    if not exists(where):
        preset = PRESETS.get(str(path).lower())
        if preset is None:
            where = _from_hub(str(path), load_format, revision)
        elif load_format == "auto":
            raise ModelError(f"{path}: a preset has no weights; use the load format dummy, or give a path to a model")
        else:
            return _dummy(preset, None, seed)
    source = _find(where, load_format)
    if source.suffix.lower() == ".gguf":
        from distmk.weights.gguf_source import open_gguf, read_gguf_config

        if load_format == "auto":
            return open_gguf(source)
        config, first = read_gguf_config(source)
        return _dummy(config, first, seed)
    from distmk.weights.hf_config import read_hf_config
    from distmk.weights.safetensors_source import open_safetensors

    if load_format == "dummy":
        return _dummy(read_hf_config(source), where, seed)
    if exists(source.parent / ADAPTER_CONFIG):
        raise ModelError(
            f"{source.parent / ADAPTER_CONFIG}: the folder holds an adapter beside its model, and leaving it out would change "
            "the result; merge it (PEFT: merge_and_unload, then save_pretrained), or remove the file"
        )
    return open_safetensors(source.parent)


def open_own(config: ModelConfig, weights: str | Mapping[str, Any] | None, load_format: str, seed: int) -> Checkpoint:
    """The weights of a user's own model: tensors by name, or a folder or file of safetensors.

    With `load_format` "dummy" they are random, generated from `seed`. UsageError, ModelError: they cannot be used.
    """
    if load_format == "dummy":
        if weights is not None:
            raise UsageError(
                "weights were given, and load_format='dummy', which makes random ones; leave one of them out"
            )
        return _dummy(config, None, seed)
    if weights is None:
        raise UsageError(
            "a model of your own needs weights: tensors by name, a folder of safetensors, or load_format='dummy'"
        )
    if isinstance(weights, str):
        from distmk.weights.safetensors_source import open_weights

        if not exists(Path(weights)):
            raise ModelError(f"{weights}: no such folder or file; safetensors weights were expected")
        return open_weights(config, Path(weights))
    from distmk.weights.tensors import TensorCheckpoint

    return TensorCheckpoint(config, weights)


def tokenizer_path(path: str, revision: str | None = None) -> Path:
    """The folder or GGUF file of a tokenizer: at `path` if that exists, else of a model on the Hub.

    ModelError: there is none.
    """
    where = Path(path)
    if exists(where):
        return where
    from distmk.weights.hub import fetch_model, is_hub_name

    if is_hub_name(path):
        return fetch_model(path, weights=False, revision=revision, needed="tokenizer.json")
    raise ModelError(
        f"{path}: no such file or folder; a tokenizer is a folder with tokenizer.json, a .gguf file, or a name on the Hub"
    )


def _from_hub(path: str, load_format: str, revision: str | None) -> Path:
    """The folder of a model on the Hugging Face Hub, when nothing exists at `path`.

    ModelError: there is no such model, or it cannot be fetched.
    """
    from distmk.weights.hub import fetch_model, is_hub_name

    if is_hub_name(path):
        return fetch_model(path, weights=load_format == "auto", revision=revision)
    raise ModelError(
        f"{path}: no such file or folder; expected a Hugging Face folder or name (OWNER/NAME), a .gguf file, "
        f"or with dummy weights one of {', '.join(PRESETS)}"
    )


def _dummy(config: ModelConfig, path: Path | None, seed: int) -> Checkpoint:
    from distmk.weights.dummy import DummyCheckpoint

    return DummyCheckpoint(config, path, seed)


def _find(path: Path, load_format: str) -> Path:
    """The .gguf or config.json file that `path` stands for. ModelError: there is none, or more than one."""
    if not is_folder(path):
        if path.suffix.lower() == ".gguf" or (load_format == "dummy" and path.suffix == ".json"):
            return path
        raise ModelError(
            f"{path}: not a model; expected a Hugging Face folder or a .gguf file"
            + (" or a config.json" if load_format == "dummy" else "")
        )
    from distmk.weights.shard_files import has_safetensors

    config = path / "config.json"
    ggufs = list_folder(path, ".gguf")
    # GGUF repositories often have a config.json as well; the weights decide.
    if exists(config) and (has_safetensors(path) or not ggufs):
        return config
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        from distmk.weights.gguf_parts import first_part

        if first := first_part(ggufs):
            return first if first in ggufs else ggufs[0]
        raise ModelError(f"{path}: holds {len(ggufs)} .gguf files; give the path of one of them, such as {ggufs[0]}")
    if exists(path / ADAPTER_CONFIG):
        raise ModelError(f"{path}: holds an adapter without its model; merge the two (PEFT: merge_and_unload)")
    raise ModelError(f"{path}: has no config.json and no .gguf file; expected a Hugging Face folder or a GGUF model")
