"""Rows gathered from a checkpoint's matrices, in this process' memory or in a GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from distmk.formats import QuantizedRows, WeightFormat
from distmk.formats.arrays import library
from distmk.formats.weight_format import U8
from distmk.model.bf16 import F32, U16, bf16_to_f32, f32_to_bf16
from distmk.models import expected_tensors
from distmk.weights.checkpoint import Checkpoint, RowRange
from distmk.weights.dummy import DummyCheckpoint

if TYPE_CHECKING:
    import torch


class Tiled(NamedTuple):
    """Rows that a GPU streams: consecutive slabs of `slabs` rows each. paired: see `Tiling`."""

    slabs: Sequence[int]
    paired: bool


class Rows(Protocol):
    """A reader of rows. `piece_bytes`: how many bytes a caller should request at a time."""

    piece_bytes: int

    def read(self, parts: Sequence[RowRange], cols: slice) -> Any:
        """Columns `cols` of `parts`, one below the other: bfloat16 bits [rows, columns]. Errors of `Checkpoint.read`."""
        ...

    def scale(self, block: Any, by: F32) -> None:
        """Multiply rows that `read` returned by float32 [columns], in place: products in float32, rounded to bfloat16."""
        ...

    def read_packed(
        self,
        parts: Sequence[RowRange],
        cols: slice,
        weight_format: type[WeightFormat],
        factors: F32 | None,
        tiled: Tiled | None,
    ) -> Any:
        """Whole groups `cols` of `parts` in a quantized format: as the host stores them (`WeightFormat.pack_rows`), or in
        tiles (`WeightFormat.pack`).

        Rows that the checkpoint does not have in that format are quantized from bfloat16, whole rows at a time, so that
        every division into shards gives the same codes. factors: of the columns `cols`, before that.
        """
        ...


def open_rows(checkpoint: Checkpoint, device: str) -> Rows:
    """The rows of `checkpoint` as numpy arrays (device "cpu") or as torch tensors on another device."""
    return HostRows(checkpoint) if device == "cpu" else DeviceRows(checkpoint, device)


class HostRows:
    """Reads to numpy uint16 arrays, in small pieces, because they count towards peak memory."""

    piece_bytes = 4 << 20

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def read(self, parts: Sequence[RowRange], cols: slice) -> U16:
        out = np.empty((_num_rows(parts), cols.stop - cols.start), np.uint16)
        _read_parts(self._checkpoint, parts, cols, out)
        return out

    def scale(self, block: U16, by: F32) -> None:
        values = bf16_to_f32(block)
        values *= by
        block[:] = f32_to_bf16(values)

    def read_packed(
        self,
        parts: Sequence[RowRange],
        cols: slice,
        weight_format: type[WeightFormat],
        factors: F32 | None,
        tiled: Tiled | None,
    ) -> U8:
        quantized = (self._quantized(part, cols, weight_format, factors) for part in parts)
        if tiled is None:
            return np.concatenate([weight_format.pack_rows(rows) for rows in quantized])
        packed: U8 = weight_format.pack(_joined(list(quantized)), tiled.slabs, tiled.paired)
        return packed

    def _quantized(
        self, part: RowRange, cols: slice, weight_format: type[WeightFormat], factors: F32 | None
    ) -> QuantizedRows:
        name, begin, end = part
        if self._checkpoint.formats.get(name) == weight_format.name:
            return self._checkpoint.read_quantized(name, slice(begin, end), cols)
        block = self._checkpoint.read(name, slice(begin, end))
        if factors is not None:
            self.scale(block, factors)
        return weight_format.cut(weight_format.quantize(block), cols.start, cols.stop)


class DeviceRows:
    """Reads to torch int16 tensors on a device.

    File data goes through two pinned buffers: one is copied to the device while the next piece is read into the other.
    Dummy weights are generated on the device.
    """

    piece_bytes = 64 << 20

    def __init__(self, checkpoint: Checkpoint, device: str) -> None:
        import torch

        self._checkpoint, self._device = checkpoint, torch.device(device)
        self._shapes = expected_tensors(checkpoint.config)
        self._staging = [_Staging(self._device), _Staging(self._device)]

    def read(self, parts: Sequence[RowRange], cols: slice) -> torch.Tensor:
        import torch

        out = torch.empty((_num_rows(parts), cols.stop - cols.start), dtype=torch.int16, device=self._device)
        if isinstance(self._checkpoint, DummyCheckpoint):
            self._checkpoint.make(parts, cols, out)
            return out
        self._staging.reverse()
        staging = self._staging[0]
        staged = staging.acquire(out.numel()).view(out.shape)
        _read_parts(self._checkpoint, parts, cols, staged.numpy().view(np.uint16))
        out.copy_(staged, non_blocking=True)
        staging.record_copy()
        return out

    def scale(self, block: torch.Tensor, by: F32) -> None:
        import torch

        values = block.view(torch.bfloat16)
        values.copy_(values.float().mul_(torch.from_numpy(by).to(self._device)))

    def read_packed(
        self,
        parts: Sequence[RowRange],
        cols: slice,
        weight_format: type[WeightFormat],
        factors: F32 | None,
        tiled: Tiled | None,
    ) -> torch.Tensor:
        assert tiled, "GPUs have tiles alone"
        formats, quantized = self._checkpoint.formats, []
        # Many parts at once, because on a GPU every operation takes some microseconds.
        for is_stored, group in groupby(parts, lambda part: formats.get(part[0]) == weight_format.name):
            together = list(group)
            if is_stored:
                quantized.append(self._stored(together, cols))
            else:
                quantized.append(self._quantized(together, cols, weight_format, factors))
        packed: torch.Tensor = weight_format.pack(_joined(quantized), tiled.slabs, tiled.paired)
        return packed

    def _stored(self, parts: Sequence[RowRange], cols: slice) -> QuantizedRows:
        import torch

        rows = _joined([self._checkpoint.read_quantized(name, slice(begin, end), cols) for name, begin, end in parts])
        tensors: list[Any] = [torch.from_numpy(array).to(self._device) for array in rows]
        return QuantizedRows(*tensors)

    def _quantized(
        self, parts: Sequence[RowRange], cols: slice, weight_format: type[WeightFormat], factors: F32 | None
    ) -> QuantizedRows:
        num_cols = self._shapes[parts[0][0]][1]
        pieces = []
        # As bfloat16, a piece of packed rows is more than one piece.
        for piece in _divided(parts, max(1, self.piece_bytes // (2 * num_cols))):
            block: Any = self.read(piece, slice(0, num_cols))
            if factors is not None:
                self.scale(block, factors)
            pieces.append(weight_format.cut(weight_format.quantize(block), cols.start, cols.stop))
        return _joined(pieces)


class _Staging:
    """Pinned memory that a GPU copies from asynchronously. It is reused only after the copy."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._pinned = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.int16)
        self._copied = torch.cuda.Event() if self._pinned else None  # type: ignore[no-untyped-call]

    def acquire(self, num_elements: int) -> torch.Tensor:
        """int16 [num_elements], ready to be written."""
        import torch

        if self._copied:
            self._copied.synchronize()
        if num_elements > self._memory.numel():
            self._memory = torch.empty(num_elements, dtype=torch.int16, pin_memory=self._pinned)
        return self._memory[:num_elements]

    def record_copy(self) -> None:
        """Note that a copy from the buffer has been started."""
        if self._copied:
            self._copied.record()


def _joined(pieces: Sequence[QuantizedRows]) -> QuantizedRows:
    """The rows one below the other."""
    whole: list[Any] = [library(arrays[0]).concatenate(arrays) for arrays in zip(*pieces, strict=True)]
    return QuantizedRows(*whole)


def _divided(parts: Sequence[RowRange], max_rows: int) -> Iterator[list[RowRange]]:
    """The parts in order, in pieces of up to `max_rows` rows."""
    piece: list[RowRange] = []
    room = max_rows
    for name, first, end in parts:
        begin = first
        while begin < end:
            stop = min(end, begin + room)
            piece.append((name, begin, stop))
            room -= stop - begin
            begin = stop
            if not room:
                yield piece
                piece, room = [], max_rows
    if piece:
        yield piece


def _num_rows(parts: Sequence[RowRange]) -> int:
    return sum(end - begin for _, begin, end in parts)


def _read_parts(checkpoint: Checkpoint, parts: Sequence[RowRange], cols: slice, out: U16) -> None:
    row = 0
    for name, begin, end in parts:
        checkpoint.read(name, slice(begin, end), cols, out=out[row : row + end - begin])
        row += end - begin
