"""Rows gathered from a checkpoint's matrices, in this process' memory or in a GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from distmk.weights.bf16 import F32, U16, bf16_to_f32, f32_to_bf16
from distmk.weights.checkpoint import Checkpoint, RowRange
from distmk.weights.dummy import DummyCheckpoint

if TYPE_CHECKING:
    import torch


class Rows(Protocol):
    """Where rows are read to. `piece_bytes`: how much to ask for at a time."""

    piece_bytes: int

    def read(self, parts: Sequence[RowRange], cols: slice) -> Any:
        """Columns `cols` of `parts` in turn: bits of bfloat16 [rows, columns]. Errors are those of `Checkpoint.read`."""
        ...

    def scale(self, block: Any, by: F32) -> None:
        """Multiply rows that were read by `by`, column by column, in place: float32 products, rounded to bfloat16."""
        ...


def open_rows(checkpoint: Checkpoint, device: str) -> Rows:
    """The rows of `checkpoint` as numpy arrays (device "cpu") or as torch tensors on another device."""
    return HostRows(checkpoint) if device == "cpu" else DeviceRows(checkpoint, device)


class HostRows:
    """Reads numpy uint16 arrays; pieces are small, as what is in flight counts towards peak memory."""

    piece_bytes = 4 << 20

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def read(self, parts: Sequence[RowRange], cols: slice) -> U16:
        out = np.empty((_num_rows(parts), cols.stop - cols.start), np.uint16)
        _read_parts(self._checkpoint, parts, cols, out)
        return out

    def scale(self, block: U16, by: F32) -> None:
        wide = bf16_to_f32(block)
        wide *= by
        block[:] = f32_to_bf16(wide)


class DeviceRows:
    """Reads torch int16 tensors: file data by way of pinned memory, so that a copy runs while the next piece is read;
    dummy weights are made where they belong.
    """

    piece_bytes = 64 << 20

    def __init__(self, checkpoint: Checkpoint, device: str) -> None:
        import torch

        self._checkpoint, self._device = checkpoint, torch.device(device)
        self._staging = [_Staging(self._device), _Staging(self._device)]

    def read(self, parts: Sequence[RowRange], cols: slice) -> torch.Tensor:
        import torch

        out = torch.empty((_num_rows(parts), cols.stop - cols.start), dtype=torch.int16, device=self._device)
        if isinstance(self._checkpoint, DummyCheckpoint):
            self._checkpoint.make(parts, cols, out)
            return out
        self._staging.reverse()
        staging = self._staging[0]
        staged = staging.take(out.numel()).view(out.shape)
        _read_parts(self._checkpoint, parts, cols, staged.numpy().view(np.uint16))
        out.copy_(staged, non_blocking=True)
        staging.copying()
        return out

    def scale(self, block: torch.Tensor, by: F32) -> None:
        import torch

        values = block.view(torch.bfloat16)
        values.copy_(values.float().mul_(torch.from_numpy(by).to(self._device)))


class _Staging:
    """Memory that a GPU copies from by itself; taken again only once it has."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._pinned = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.int16)
        self._copied = torch.cuda.Event() if self._pinned else None  # type: ignore[no-untyped-call]

    def take(self, num_elements: int) -> torch.Tensor:
        """int16 [num_elements], to be filled."""
        import torch

        if self._copied:
            self._copied.synchronize()
        if num_elements > self._memory.numel():
            self._memory = torch.empty(num_elements, dtype=torch.int16, pin_memory=self._pinned)
        return self._memory[:num_elements]

    def copying(self) -> None:
        """A copy from it was started."""
        if self._copied:
            self._copied.record()


def _num_rows(parts: Sequence[RowRange]) -> int:
    return sum(end - begin for _, begin, end in parts)


def _read_parts(checkpoint: Checkpoint, parts: Sequence[RowRange], cols: slice, out: U16) -> None:
    at = 0
    for name, begin, end in parts:
        checkpoint.read(name, slice(begin, end), cols, out=out[at : at + end - begin])
        at += end - begin
