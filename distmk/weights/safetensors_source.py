"""The weights of Hugging Face folders: one or more safetensors files.

The `safetensors` library checks each file. The data is then read at the offsets in its header, because the library's numpy
interface has no bfloat16 and its torch interface would import torch on every rank.
"""

from __future__ import annotations

import json
from pathlib import Path

from distmk.errors import ModelError, one_line
from distmk.weights.checkpoint import HEAD, check_tensors
from distmk.weights.files import PLAIN_ENCODINGS, DataFile, FileCheckpoint, StoredTensor
from distmk.weights.hf_config import read_hf_config, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def has_safetensors(folder: Path) -> bool:
    """Whether `folder` holds safetensors weights under the usual names."""
    return (folder / SINGLE_FILE).exists() or (folder / INDEX_FILE).exists()


def open_safetensors(folder: Path) -> FileCheckpoint:
    """Open a Hugging Face folder; ModelError for anything missing, damaged, or not supported."""
    config = read_hf_config(folder / "config.json")
    shards, promised = _shards(folder)
    files: list[DataFile] = []
    tensors: dict[str, StoredTensor] = {}
    for number, path in enumerate(shards):
        file = DataFile(path)
        files.append(file)
        for name, tensor in _read_table(file, number).items():
            if name in tensors:
                raise ModelError(f"{path}: tensor {name} is already in {shards[tensors[name].file].name}")
            tensors[name] = tensor
    for name, shard in promised.items():
        if name not in tensors or shards[tensors[name].file].name != shard:
            raise ModelError(f"{folder / INDEX_FILE}: puts tensor {name} in {shard}, which does not hold it")
    # Old Llama checkpoints store the rotary frequencies, which follow from the config.
    ignored = {name for name in tensors if name.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        ignored.add(HEAD)
    check_tensors({name: t.shape for name, t in tensors.items()}, config, str(folder), ignored)
    kept = {name: t for name, t in tensors.items() if name not in ignored}
    return FileCheckpoint(config, folder, files, kept)


def _shards(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files of `folder`, and by tensor the file that the index names (empty without an index)."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists():
        return [single], {}
    if not index.exists():
        raise ModelError(
            f"{folder}: no {SINGLE_FILE} or {INDEX_FILE}; only safetensors (or GGUF) weights can be loaded, "
            "convert others with transformers' save_pretrained, or use dummy weights"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: `weight_map` is {'missing' if weight_map is None else 'not a filled object'}")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelError(
                f"{index}: tensor {name} is put in {shard!r}; the name of a file in the folder was expected"
            )
    shards = [folder / shard for shard in sorted(set(weight_map.values()))]
    for shard in shards:
        if not shard.exists():
            raise ModelError(f"{shard}: missing, but {INDEX_FILE} names it; fetch it again")
    return shards, weight_map


def _read_table(file: DataFile, number: int) -> dict[str, StoredTensor]:
    """The tensors of one file, checked by the safetensors library (offsets, sizes, overlaps, file length).

    The format: 8 bytes of header length (little endian), the header as JSON, then the data that its offsets are
    relative to; see https://huggingface.co/docs/safetensors.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file.path), framework="np"):
            pass
    except (SafetensorError, OSError, ValueError) as e:
        raise ModelError(f"{file.path}: damaged or cut short ({one_line(e)}); fetch the file again") from None
    header_bytes = int.from_bytes(file.read(0, 8).tobytes(), "little")
    header = json.loads(file.read(8, header_bytes).tobytes())
    header.pop("__metadata__", None)
    table = {}
    for name, entry in header.items():
        dtype = entry["dtype"]
        if dtype not in PLAIN_ENCODINGS:
            raise ModelError(
                f"{file.path}: tensor {name} has dtype {dtype}; supported are {', '.join(PLAIN_ENCODINGS)}"
            )
        start, stop = entry["data_offsets"]
        table[name] = StoredTensor(
            PLAIN_ENCODINGS[dtype], tuple(entry["shape"]), number, 8 + header_bytes + start, stop - start
        )
    return table
