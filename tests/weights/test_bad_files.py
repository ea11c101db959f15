"""Files that are none, too large, or whose parts do not go together: one line each, in bounded time and memory."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as QuantType
from safetensors.numpy import save_file
from support.gguf_files import write_gguf
from support.helpers import ROOT
from test_weights import expect_error, tiny

from distmk.errors import ModelError, UsageError
from distmk.text.tokenizer import load_tokenizer
from distmk.weights import open_checkpoint

Make = Callable[[Path], object]
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json")
FILES = (*JSON_FILES, "model.safetensors", "tokenizer.json")


def sparse(path: Path, num_bytes: int = 64 << 30, start: bytes = b"") -> None:
    """A file of `num_bytes` zeros that take no room, but for its start."""
    path.write_bytes(start)
    os.truncate(path, num_bytes)


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.open(path.parent, os.O_RDONLY)
        server.bind(f"/proc/self/fd/{folder}/{path.name}")  # a path of a socket has at most 107 bytes
        os.close(folder)


KINDS: dict[str, tuple[Make, str]] = {
    "fifo": (os.mkfifo, "is a FIFO; a regular file was expected"),
    "zeros": (lambda path: path.symlink_to("/dev/zero"), "is a device; a regular file"),
    "folder": (Path.mkdir, "is a folder; a regular file"),
    "socket": (bind_socket, "is a socket; a regular file"),
    "loop": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    "sparse": (sparse, "has 68719476736 bytes; a file of this kind has at most"),
}


@contextmanager
def bounded(memory_mib: int = 256, seconds: float = 20.0) -> Iterator[None]:
    """Fail if the block takes longer, or its peak of memory is higher by more."""
    Path("/proc/self/clear_refs").write_text("5")
    before, began = resident_mib("VmRSS"), time.perf_counter()
    yield
    assert time.perf_counter() - began < seconds
    assert resident_mib("VmHWM") - before < memory_mib


def resident_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file(kind: str, tmp_path: Path) -> None:
    """Each in place of every file of a model."""
    make, message = KINDS[kind]
    good = tmp_path / "good"
    tiny("llama", tie_word_embeddings=True).save_pretrained(good)
    for name in FILES:
        model = tmp_path / name
        model.mkdir()
        for path in good.iterdir():
            if path.name != name and not (name == "model.safetensors.index.json" and path.suffix == ".safetensors"):
                (model / path.name).symlink_to(path)
        make(model / name)
        with bounded():
            if name == "tokenizer.json":
                with pytest.raises(UsageError) as e:
                    load_tokenizer(open_checkpoint(model, "dummy"))
                assert message in str(e.value)
            elif (name, kind) == ("model.safetensors", "sparse"):
                expect_error(model, "model.safetensors: damaged or cut short")
            else:
                expect_error(model, f"{name}: ", message)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_model(kind: str, tmp_path: Path) -> None:
    make, message = KINDS[kind]
    for name, sparse_message in (("m.gguf", "not a GGUF file"), ("m.json", "not a model")):
        make(tmp_path / name)
        with bounded():
            expect_error(tmp_path / name, {"folder": "has no config.json", "sparse": sparse_message}.get(kind, message))


def test_paths_that_are_none() -> None:
    for path, message in (("a" * 5000, "File name too long"), ("a\0b", "is not a path"), ("a\udcffb", "no such file")):
        with pytest.raises(ModelError, match=message) as e:
            open_checkpoint(path)
        assert "\n" not in str(e.value)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_folders_that_one_may_not_enter(tmp_path: Path) -> None:
    """As another user: of the model, and of its parent."""
    model = tmp_path / "parent" / "model"
    tiny("llama").save_pretrained(model)
    for path in model.iterdir():
        path.chmod(0o644)
    code = f"""
import os, sys
from distmk.weights import open_checkpoint, hf_config, safetensors_source
from distmk.errors import ModelError
os.seteuid(65534)
try:
    open_checkpoint({str(model)!r})
except ModelError as e:
    print(e)
"""
    parents = [folder for folder in tmp_path.parents if str(folder).startswith("/tmp/")]
    modes = {folder: folder.stat().st_mode for folder in parents}
    try:
        for folder in (*parents, tmp_path, model.parent, model):
            folder.chmod(0o755)
        for folder, mode, message in (
            (model, 0o700, "model: cannot be listed"),
            (model.parent, 0o700, "model: cannot be reached"),
            (model, 0o744, "model/config.json: cannot be reached"),
            (model / "config.json", 0o600, "config.json: cannot be read"),
        ):
            kept = folder.stat().st_mode
            folder.chmod(mode)
            done = subprocess.run(
                [sys.executable, "-c", code],
                capture_output=True,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            folder.chmod(kept)
            assert done.stdout.endswith(f"{message}: Permission denied\n"), done
            assert len(done.stdout.splitlines()) == 1
    finally:
        for folder, mode in modes.items():
            folder.chmod(mode)


def header(num_tensors: int, *keys: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, len(keys)) + b"".join(keys)


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


ROOM = "more than the rest of its header has room for"
CLAIMS = {  # what is said of them in a file without room for them, and in a large one
    "strings": (
        header(0, key("a", 9, struct.pack("<IQ", 8, 1 << 33))),
        f"claims 8589934592 array items, {ROOM}",
        f"claims 8589934592 array items, {ROOM}",
    ),
    "fewer_strings": (
        header(0, key("a", 9, struct.pack("<IQ", 8, 1 << 24))),
        f"claims 16777216 array items, {ROOM}",
        "an array of 16777216 strings; at most",
    ),
    "all_strings": (
        header(0, key("a", 9, struct.pack("<IQ", 8, (1 << 64) - 1))),
        f"claims 18446744073709551615 array items, {ROOM}",
        f"claims 18446744073709551615 array items, {ROOM}",
    ),
    "numbers": (
        header(0, key("a", 9, struct.pack("<IQ", 6, 1 << 40))),
        f"claims 1099511627776 array items, {ROOM}",
        f"claims 1099511627776 array items, {ROOM}",
    ),
    "keys": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 24),
        f"claims 16777216 metadata keys, {ROOM}",
        "has the metadata key '' twice",
    ),
    "more_keys": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 62),
        f"claims 4611686018427387904 metadata keys, {ROOM}",
        f"claims 4611686018427387904 metadata keys, {ROOM}",
    ),
    "tensors": (
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 23, 0),
        f"claims 8388608 tensors, {ROOM}",
        "has the tensor '' twice",
    ),
    "text": (
        header(0, key("a", 8, struct.pack("<Q", 1 << 34))),
        "inside its header",
        "header is longer than 256 MiB",
    ),
}


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("num_bytes", [0, 64 << 30])
def test_what_gguf_headers_claim(claim: str, num_bytes: int, tmp_path: Path) -> None:
    """In a file of that size; a sparse one has room for whatever it claims."""
    start, short, large = CLAIMS[claim]
    sparse(tmp_path / "m.gguf", max(num_bytes, len(start)), start)
    with bounded(memory_mib=32):
        expect_error(tmp_path / "m.gguf", "damaged or cut short", large if num_bytes else short)


def entry_of(data: bytes, name: str) -> int:
    """Position of a tensor's entry behind its name and number of dimensions: dimensions, type, offset."""
    return data.rindex(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) + 4


def test_gguf_tensors_tile_the_file(tmp_path: Path) -> None:
    """A changed type, offsets that overlap, are unaligned or leave gaps, and bytes behind the last tensor."""
    model = tiny("llama")
    path = tmp_path / "m.gguf"
    for alignment in (32, 256):
        write_gguf(path, model.config, model.state_dict(), edit=lambda w, a=alignment: w.add_custom_alignment(a))
        open_checkpoint(path).close()
        data = path.read_bytes()
        at = entry_of(data, "blk.0.attn_q.weight") + 16  # two dimensions
        (offset,) = struct.unpack_from("<Q", data, at + 4)
        for change in (-alignment, alignment, 1, -offset, 1 << 40, (1 << 64) - offset - 1):
            path.write_bytes(data[: at + 4] + struct.pack("<Q", offset + change) + data[at + 12 :])
            expect_error(path, "m.gguf: ")
        for kind in (QuantType.F16, QuantType.BF16):
            path.write_bytes(data[:at] + struct.pack("<I", kind) + data[at + 4 :])
            expect_error(path, "damaged: the data of tensor blk.0.", "was expected")
        path.write_bytes(data + bytes(alignment))
        expect_error(path, "damaged: has", "its tensors end at byte")
        sparse(path, 64 << 30, data)
        with bounded():
            expect_error(path, "damaged: has 68719476736 bytes")
    last = struct.pack("<I", QuantType.F16)
    names = [tensor.name for tensor in gguf.GGUFReader(path).tensors]
    at = entry_of(data, names[-1]) + 8 * (1 if "norm" in names[-1] else 2)
    path.write_bytes(data[:at] + last + data[at + 4 :])
    expect_error(path, "damaged: has", "its tensors end at byte")


def test_large_rope_factors(tmp_path: Path) -> None:
    model = tiny("llama")
    path = tmp_path / "m.gguf"
    write_gguf(
        path, model.config, model.state_dict(), edit=lambda w: w.add_tensor("rope_freqs.weight", np.zeros(70000, "f4"))
    )
    expect_error(path, "rope_freqs.weight has shape [70000], too large")


def test_safetensors_tile_the_file(tmp_path: Path) -> None:
    """The library's own rule; whatever the header claims, nothing large is allocated."""
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    (num_bytes,) = struct.unpack_from("<Q", data)
    table = json.loads(data[8 : 8 + num_bytes])
    first = min((t for t in table if t != "__metadata__"), key=lambda t: table[t]["data_offsets"][0])
    for wrong in ([0, 1 << 40], [1, 8], [-1, 8], [8, 0], ["a", "b"], [0.5, 8], [0, 4]):
        text = json.dumps(table | {first: table[first] | {"data_offsets": wrong}}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + num_bytes :])
        expect_error(tmp_path, "model.safetensors: damaged or cut short")
    for claimed in (0, 1 << 27, 1 << 40, (1 << 64) - 1):
        sparse(path, 64 << 30, struct.pack("<Q", claimed) + data[8:])
        with bounded():
            expect_error(tmp_path, "model.safetensors: damaged or cut short")
    sparse(path, 64 << 30, data)
    with bounded():
        expect_error(tmp_path, "model.safetensors: damaged or cut short")
    save_file({}, path)
    expect_error(tmp_path, "is missing")


@pytest.mark.parametrize("form", ["gguf", "safetensors", "config"])
def test_random_damage(form: str, tmp_path: Path) -> None:
    """Bits and bytes of headers changed at random: an error in one line, or no harm."""
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    path = tmp_path / {"gguf": "m.gguf", "safetensors": "model.safetensors", "config": "config.json"}[form]
    opened = path if form == "gguf" else tmp_path
    if form == "gguf":
        tokens = [f"t{i}" for i in range(101)]
        write_gguf(path, model.config, model.state_dict(), edit=lambda w: w.add_token_list(tokens))
    data = path.read_bytes()
    end = {"gguf": lambda: gguf.GGUFReader(path).data_offset, "safetensors": lambda: 8 + data[0] + 256 * data[1]}.get(
        form, lambda: len(data)
    )()
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    rounds = int(os.environ.get("DISTMK_TEST_ROUNDS", "150"))
    with bounded(seconds=5.0 + rounds / 10):
        for _ in range(rounds):
            damaged = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 8))):
                at = rng.randrange(end)
                damaged[at] = rng.choice((damaged[at] ^ 1 << rng.randrange(8), 0, 255, rng.randrange(256)))
            path.write_bytes(damaged)
            try:
                open_checkpoint(opened).close()
            except ModelError as e:
                assert "\n" not in str(e) and len(str(e)) < 1000, seed
            except BaseException:
                print("seed", seed)
                raise
