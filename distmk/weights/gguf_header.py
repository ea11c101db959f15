"""The head of a GGUF file: metadata and tensor table.

The format is ggml's `docs/gguf.md`. The reader of the `gguf` package makes several numpy objects for every string of
the vocabulary (190 MiB and 3 s for 49,152 tokens), on every rank. This reader only notes the offset of each array.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from distmk.errors import ModelError, one_line, shown
from distmk.user_files import open_regular

STRING, ARRAY = 8, 9
SCALARS: Mapping[int, struct.Struct] = {
    kind: struct.Struct("<" + code)
    for kind, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")

LEAST_KEY_BYTES = 8 + 4 + 1  # length of an empty name, type, the shortest value
LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8  # length of an empty name, number of dimensions, type, offset
MAX_ALIGNMENT = 1 << 20

Scalar = int | float | bool | str

MAX_HEADER_BYTES = 256 << 20
"""Limit for metadata and tensor table. A vocabulary of 262,144 tokens with its merges takes 15 MB."""

MAX_STRINGS = 1 << 22
"""Limit for an array. An array that claims more is damaged, and stepping over it would take minutes."""


@dataclass(frozen=True)
class ArrayRef:
    """An array that was not read: `count` items of GGUF type `kind`; the first is at byte `offset`."""

    kind: int
    count: int
    offset: int


@dataclass(frozen=True)
class GgufTensor:
    """An entry of the tensor table: `shape` with the slowest dimension first, `offset` from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key, with arrays as references, and the tensors in file order.

    The tensors' data begins at byte `data_start`, each tensor at a multiple of `alignment` bytes.
    """

    path: Path
    metadata: Mapping[str, Scalar | ArrayRef]
    tensors: tuple[GgufTensor, ...]
    alignment: int
    data_start: int


class _Cursor:
    """Reads values one after another from the mapped start of a file. ValueError: it would read beyond the end."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data = data
        self.at = at

    def skip(self, num_bytes: int) -> int:
        """Step over `num_bytes` and return their offset."""
        start = self.at
        if num_bytes > self.bytes_left:
            if len(self.data) == MAX_HEADER_BYTES:
                raise ValueError(f"its header is longer than {MAX_HEADER_BYTES >> 20} MiB")
            raise ValueError(f"ends at byte {len(self.data)}, inside its header")
        self.at += num_bytes
        return start

    @property
    def bytes_left(self) -> int:
        return len(self.data) - self.at

    def count(self, least_bytes: int, what: str) -> int:
        """The number of items that follow, each of at least `least_bytes`. ValueError: there is no room for so many."""
        count = self.u64()
        if count * least_bytes > self.bytes_left:
            raise ValueError(f"claims {count} {what}, more than the rest of its header has room for")
        return count

    def scalar(self, form: struct.Struct) -> int | float | bool:
        value: int | float | bool = form.unpack_from(self.data, self.skip(form.size))[0]
        return value

    def u32(self) -> int:
        return int(self.scalar(U32))

    def u64(self) -> int:
        return int(self.scalar(U64))

    def raw_string(self) -> bytes:
        num_bytes = self.u64()
        start = self.skip(num_bytes)
        return self.data[start : start + num_bytes]

    def string(self) -> str:
        """A name or a token, which must be UTF-8 as the format demands."""
        return self.raw_string().decode("utf-8")

    def label(self) -> str:
        """Text of metadata. Some files have authors or descriptions in another encoding, so that is not an error."""
        return self.raw_string().decode("utf-8", errors="replace")

    def array(self) -> ArrayRef:
        """Step over an array of scalars or strings."""
        kind = self.u32()
        size = SCALARS[kind].size if kind in SCALARS else U64.size  # a string has at least its length
        count = self.count(size, "array items")
        ref = ArrayRef(kind, count, self.at)
        if kind in SCALARS:
            self.skip(count * size)
        elif kind == STRING:
            if count > MAX_STRINGS:
                raise ValueError(f"has an array of {count} strings; at most {MAX_STRINGS} are believable")
            for _ in range(count):
                self.skip(self.u64())
        else:
            raise ValueError(f"has an array of unknown type {kind}")
        return ref

    def value(self, kind: int) -> Scalar | ArrayRef:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.label()
        if kind == ARRAY:
            return self.array()
        raise ValueError(f"has a value of unknown type {kind}")


def read_header(path: Path) -> GgufHeader:
    """Read the metadata and tensor table of the GGUF file at `path`. ModelError: it is damaged or not a GGUF file."""
    try:
        with open(open_regular(path), "rb") as file:
            magic = file.read(4)
            if magic != b"GGUF":
                raise ModelError(f"{path}: not a GGUF file: starts with {magic!r} instead of b'GGUF'")
            with _map_header(file) as data:
                return _parse(path, _Cursor(data, 4))
    except OSError as e:
        raise ModelError(f"{path}: cannot be read: {e.strerror}") from None
    except (ValueError, struct.error, OverflowError) as e:
        raise ModelError(f"{path}: damaged or cut short: {one_line(e)}; fetch the file again") from None


def _parse(path: Path, cursor: _Cursor) -> GgufHeader:
    version = cursor.u32()
    if version not in (2, 3):
        order = "; it is big-endian" if version & 0xFFFF == 0 else ""
        raise ModelError(f"{path}: GGUF version {version} is not supported{order}; little-endian 2 or 3 was expected")
    num_tensors, num_keys = cursor.count(LEAST_TENSOR_BYTES, "tensors"), cursor.count(LEAST_KEY_BYTES, "metadata keys")
    metadata: dict[str, Scalar | ArrayRef] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"has the metadata key {key[:64]!r} twice")
        metadata[key] = cursor.value(cursor.u32())
    table: list[GgufTensor] = []
    names: set[str] = set()
    for _ in range(num_tensors):
        name = cursor.string()
        if name in names:
            raise ValueError(f"has the tensor {name[:64]!r} twice")
        names.add(name)
        num_dims = cursor.u32()
        if num_dims > 4:
            raise ValueError(f"tensor {name[:64]} has {num_dims} dimensions")
        shape = tuple(cursor.u64() for _ in range(num_dims))[::-1]
        table.append(GgufTensor(name, shape, cursor.u32(), cursor.u64()))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r}, not a power of two up to {MAX_ALIGNMENT}")
    data_start = -(-cursor.at // alignment) * alignment
    tensors = tuple(GgufTensor(t.name, t.shape, t.type_id, data_start + t.offset) for t in table)
    return GgufHeader(path, metadata, tensors, alignment, data_start)


def read_strings(header: GgufHeader, key: str) -> list[str]:
    """The array of strings under metadata `key`; [] if absent. ModelError: it is something else, or damaged."""
    ref = _array(header, key)
    if ref is None or ref.count == 0:
        return []
    if ref.kind != STRING:
        raise ModelError(f"{header.path}: {key} is not an array of strings")
    with _mapped(header, key) as cursor:
        cursor.at = ref.offset
        return [cursor.string() for _ in range(ref.count)]


def find_strings(header: GgufHeader, key: str, wanted: Collection[str]) -> dict[str, int]:
    """The first index of each of `wanted` in the array of strings under metadata `key`.

    Strings that are not in the array are left out.
    """
    ref = _array(header, key)
    if ref is None or ref.kind != STRING:
        return {}
    texts = {text.encode(): text for text in wanted}
    indices: dict[str, int] = {}
    with _mapped(header, key) as cursor:
        cursor.at = ref.offset
        for index in range(ref.count):
            raw = cursor.raw_string()
            if raw in texts:
                indices.setdefault(texts[raw], index)
    return indices


def read_numbers(header: GgufHeader, key: str) -> list[int | float | bool]:
    """The array of numbers under metadata `key`; [] if absent. ModelError: it is something else, or damaged."""
    ref = _array(header, key)
    if ref is None or ref.count == 0:
        return []
    if ref.kind not in SCALARS:
        raise ModelError(f"{header.path}: {key} is not an array of numbers")
    form = SCALARS[ref.kind]
    try:
        with open(open_regular(header.path), "rb") as file:
            file.seek(ref.offset)
            return [item for (item,) in form.iter_unpack(file.read(ref.count * form.size))]
    except (OSError, struct.error) as e:
        raise ModelError(f"{header.path}: {key} cannot be read: {one_line(e)}") from None


def _map_header(file: BinaryIO) -> mmap.mmap:
    num_bytes = min(os.fstat(file.fileno()).st_size, MAX_HEADER_BYTES)
    return mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ)


@contextmanager
def _mapped(header: GgufHeader, key: str) -> Iterator[_Cursor]:
    """A cursor over the file. ModelError, which names `key`: the file cannot be read."""
    try:
        with open(open_regular(header.path), "rb") as file, _map_header(file) as data:
            yield _Cursor(data, 0)
    except (OSError, ValueError) as e:
        raise ModelError(f"{header.path}: {key} cannot be read: {one_line(e)}") from None


def _array(header: GgufHeader, key: str) -> ArrayRef | None:
    value = header.metadata.get(key)
    if value is not None and not isinstance(value, ArrayRef):
        raise ModelError(f"{header.path}: {key} is {shown(value)}; an array was expected")
    return value
