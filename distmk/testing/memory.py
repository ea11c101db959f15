"""A rank's memory around a launch: poison where no contents are given, so that any undeclared change shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from distmk.abi import Space
from distmk.engine.session import Session
from distmk.graph.regions import Buffer
from distmk.program.layout import Placed
from distmk.program.program import Program, decode_args
from distmk.tasks import TASK_TYPES
from distmk.testing.arrays import Bytes, poison

Memory = dict[Buffer, Bytes]  # [rows, row_bytes] of every buffer of a rank


@dataclass(frozen=True)
class Extent:
    """One address space of a rank, from its first buffer or weight to its end. `pieces` are sorted by offset."""

    whole: Placed
    pieces: tuple[Placed, ...]

    def rows_of(self, piece: Placed, image: Bytes) -> Bytes:
        """The bytes of a piece in an image of this extent, [rows, row_bytes]."""
        begin = piece.offset - self.whole.offset
        return image[begin : begin + piece.num_bytes].reshape(piece.rows, piece.row_bytes)

    def gaps(self) -> Iterable[slice]:
        """The bytes between the pieces and after the last one."""
        end = self.whole.offset
        for piece in self.pieces:
            yield slice(end - self.whole.offset, piece.offset - self.whole.offset)
            end = piece.offset + piece.num_bytes
        yield slice(end - self.whole.offset, self.whole.num_bytes)

    def locate(self, index: int) -> tuple[Placed | None, str]:
        """The piece at a byte of an image, and a description of the place.

        A byte of a gap belongs to the piece before the gap.
        """
        offset = self.whole.offset + index
        piece = next((piece for piece in reversed(self.pieces) if piece.offset <= offset), None)
        if piece is None:
            return None, f"byte {index} before all buffers"
        inside = offset - piece.offset
        if inside >= piece.num_bytes:
            return piece, f"{inside - piece.num_bytes} bytes behind {piece.name}"
        return piece, f"{piece.name} row {inside // piece.row_bytes} byte {inside % piece.row_bytes}"


class RankMemory:
    """The heap and the local memory of a rank of a program, with one image for each space."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank, self.placement = program, rank, program.placement
        ends = {Space.HEAP: self.placement.heap_bytes, Space.LOCAL: self.placement.local_bytes[rank]}
        self.extents = {space: self._extent(space, end) for space, end in ends.items()}

    def _extent(self, space: Space, end: int) -> Extent:
        own = [piece for piece in self.placement.pieces if piece.space is space and piece.rank in (-1, self.rank)]
        pieces = tuple(sorted(own, key=lambda piece: piece.offset))
        begin = pieces[0].offset if pieces else end
        return Extent(Placed(space.name, space, self.rank, begin, 1, end - begin), pieces)

    def read(self, session: Session) -> dict[Space, Bytes]:
        return {
            space: session.backend.view(extent.whole, np.uint8)[0].copy()
            for space, extent in self.extents.items()
            if extent.whole.num_bytes
        }

    def write(self, session: Session, images: dict[Space, Bytes]) -> None:
        for space, image in images.items():
            session.backend.write(self.extents[space].whole, 0, image[None])

    def buffers(self, images: dict[Space, Bytes]) -> Memory:
        """Views of all buffers in the images."""
        placed = self.placement.buffers.items()
        return {buffer: self.extents[at.space].rows_of(at, images[at.space]) for buffer, at in placed}

    def poison(self, images: dict[Space, Bytes], rng: np.random.Generator) -> None:
        """Fill buffers and gaps with poison, but not weights.

        Memory that a launch zeroes first, such as Lamport buffers, becomes zero.
        """
        for space, image in images.items():
            extent = self.extents[space]
            for piece in extent.pieces:
                if not piece.read_only:
                    rows = extent.rows_of(piece, image)
                    rows[:] = poison(rng, rows.size).reshape(rows.shape)
            for gap in extent.gaps():
                image[gap] = poison(rng, image[gap].size)
        zeroed = self.placement.zeroed_heap_bytes - self.extents[Space.HEAP].whole.offset
        images[Space.HEAP][: max(0, zeroed)] = 0

    def accessed(self) -> dict[Space, npt.NDArray[np.bool_]]:
        """The bytes of this rank that tasks of any rank write, according to the encoded tasks."""
        masks = {space: np.zeros(extent.whole.num_bytes, bool) for space, extent in self.extents.items()}
        for part in self.program.ranks:
            for desc in part.tasks:
                args: Any = decode_args(desc)
                accesses = TASK_TYPES[desc.type].accesses(args, part.header.rank, self.program.num_ranks)
                for access in accesses:
                    if access.write and access.rank == self.rank:
                        space = Space(access.space)
                        for row in range(access.num_rows):
                            begin = access.offset + row * access.stride - self.extents[space].whole.offset
                            masks[space][begin : begin + access.row_bytes] = True
        return masks
