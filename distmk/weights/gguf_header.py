"""The head of a GGUF file: metadata and tensor table.

The format is ggml's `docs/gguf.md`. The reader of the `gguf` package makes several numpy objects for every string of the
vocabulary (190 MiB and 3 s for 49,152 tokens), on every rank; this one notes the offset of each array instead.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distmk.errors import ModelError, one_line

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

Scalar = int | float | bool | str


@dataclass(frozen=True)
class ArrayRef:
    """An array that was not read: `count` items of GGUF type `kind`, the first at byte `offset`."""

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
    """Metadata by key, with arrays as references, and the tensors in file order."""

    path: Path
    metadata: Mapping[str, Scalar | ArrayRef]
    tensors: tuple[GgufTensor, ...]


class _Cursor:
    """Reads values one after the other from a mapped file; ValueError past its end."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data = data
        self.at = at

    def skip(self, num_bytes: int) -> int:
        """Step over `num_bytes`; returns their offset."""
        start = self.at
        if num_bytes > len(self.data) - start:
            raise ValueError(f"ends at byte {len(self.data)}, inside its header")
        self.at += num_bytes
        return start

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
        """Text of metadata. Files exist whose authors or descriptions are in another encoding; that is no damage."""
        return self.raw_string().decode("utf-8", errors="replace")

    def array(self) -> ArrayRef:
        """Step over an array of scalars or strings."""
        kind, count = self.u32(), self.u64()
        ref = ArrayRef(kind, count, self.at)
        if kind in SCALARS:
            self.skip(count * SCALARS[kind].size)
        elif kind == STRING:
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
    """Read the metadata and tensor table of the GGUF file at `path`; ModelError if it is damaged or no GGUF file."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            if magic != b"GGUF":
                raise ModelError(f"{path}: not a GGUF file: starts with {magic!r} instead of b'GGUF'")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
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
    num_tensors, num_keys = cursor.u64(), cursor.u64()
    metadata: dict[str, Scalar | ArrayRef] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.u32())
    table = []
    for _ in range(num_tensors):
        name = cursor.string()
        num_dims = cursor.u32()
        if num_dims > 4:
            raise ValueError(f"tensor {name[:64]} has {num_dims} dimensions")
        shape = tuple(cursor.u64() for _ in range(num_dims))[::-1]
        table.append(GgufTensor(name, shape, cursor.u32(), cursor.u64()))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r}, not a power of two")
    data_start = -(-cursor.at // alignment) * alignment
    tensors = tuple(GgufTensor(t.name, t.shape, t.type_id, data_start + t.offset) for t in table)
    return GgufHeader(path, metadata, tensors)


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
    """The first index of each of `wanted` in the array of strings under metadata `key`; those that are not in it are left out."""
    ref = _array(header, key)
    if ref is None or ref.kind != STRING:
        return {}
    texts = {text.encode(): text for text in wanted}
    found: dict[str, int] = {}
    with _mapped(header, key) as cursor:
        cursor.at = ref.offset
        for index in range(ref.count):
            raw = cursor.raw_string()
            if raw in texts:
                found.setdefault(texts[raw], index)
    return found


def read_numbers(header: GgufHeader, key: str) -> list[int | float | bool]:
    """The array of numbers under metadata `key`; [] if absent. ModelError: it is something else, or damaged."""
    ref = _array(header, key)
    if ref is None or ref.count == 0:
        return []
    if ref.kind not in SCALARS:
        raise ModelError(f"{header.path}: {key} is not an array of numbers")
    form = SCALARS[ref.kind]
    try:
        with header.path.open("rb") as file:
            file.seek(ref.offset)
            return [item for (item,) in form.iter_unpack(file.read(ref.count * form.size))]
    except (OSError, struct.error) as e:
        raise ModelError(f"{header.path}: {key} cannot be read: {one_line(e)}") from None


@contextmanager
def _mapped(header: GgufHeader, key: str) -> Iterator[_Cursor]:
    """A cursor over the file. ModelError, which names `key`: it cannot be read."""
    try:
        with header.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield _Cursor(data, 0)
    except (OSError, ValueError) as e:
        raise ModelError(f"{header.path}: {key} cannot be read: {one_line(e)}") from None


def _array(header: GgufHeader, key: str) -> ArrayRef | None:
    value = header.metadata.get(key)
    if value is not None and not isinstance(value, ArrayRef):
        raise ModelError(f"{header.path}: {key} is {value!r}; an array was expected")
    return value
