"""Finds the safetensors files of a folder that contain the weights: one file, those of an index, or a complete numbered set."""

from __future__ import annotations

import re
from pathlib import Path

from distmk.errors import ModelError
from distmk.user_files import exists, list_folder
from distmk.weights.hf_config import MAX_INDEX_BYTES, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


def has_safetensors(folder: Path) -> bool:
    """Whether `folder` has safetensors weights."""
    return exists(folder / INDEX_FILE) or bool(_weight_files(folder))


def find_shards(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files of `folder`, and for each tensor the file that the index names (empty without an index).

    The search has the order of transformers: model.safetensors, then the index. Without either: a complete set of files
    named NAME-00001-of-00003.safetensors, or else the only file. ModelError: there is none, there are several
    candidates, or a set is incomplete.
    """
    if exists(folder / SINGLE_FILE):
        return [folder / SINGLE_FILE], {}
    if exists(folder / INDEX_FILE):
        return _indexed(folder, folder / INDEX_FILE)
    files = _weight_files(folder)
    sets: dict[tuple[str, int], list[Path]] = {}
    for path in files:
        if (match := _NUMBERED.fullmatch(path.name)) and 1 <= int(match[2]) <= int(match[3]):
            sets.setdefault((match[1], int(match[3])), []).append(path)
    if len(sets) == 1:
        ((stem, count), shards), *_ = sets.items()
        return _complete(folder, stem, count, shards), {}
    if len(files) == 1:
        return files, {}
    if files:
        raise ModelError(
            f"{folder}: holds {len(files)} safetensors files ({files[0].name}, {files[1].name}, ...) and no {INDEX_FILE}, "
            f"so nothing says which of them are the model; name one {SINGLE_FILE}, or fetch the index"
        )
    raise ModelError(
        f"{folder}: no {SINGLE_FILE} or {INDEX_FILE}; only safetensors (or GGUF) weights can be loaded, "
        "convert others with transformers' save_pretrained, or use dummy weights"
    )


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of `folder` that do not belong to an adapter, by name."""
    return [path for path in list_folder(folder, ".safetensors") if not path.name.startswith("adapter_")]


def _complete(folder: Path, stem: str, count: int, files: list[Path]) -> list[Path]:
    """All `count` files of a numbered set; ModelError, with their names, if some are missing."""
    wanted = [folder / f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    missing = [path.name for path in wanted if path not in files]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise ModelError(f"{folder}: {', '.join(missing[:4])}{more} of {count} files missing; fetch the model again")
    return wanted


def _indexed(folder: Path, index: Path) -> tuple[list[Path], dict[str, str]]:
    weight_map = read_json(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: `weight_map` is {'missing' if weight_map is None else 'not a filled object'}")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelError(
                f"{index}: tensor {name} is put in {shard!r}; the name of a file in the folder was expected"
            )
    shards = [folder / shard for shard in sorted(set(weight_map.values()))]
    for shard in shards:
        if not exists(shard):
            raise ModelError(f"{shard}: missing, but {INDEX_FILE} names it; fetch it again")
    return shards, weight_map
