"""What tests of the host twin's task bodies store, and room for what comes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from support.arena import Arena
from support.arrays import assert_close

from distmk.abi import Space

CANDIDATE = np.dtype([("value", np.float32), ("token", np.int32)])


def any_space(rng: np.random.Generator) -> Space:
    return Space.HEAP if rng.random() < 0.5 else Space.LOCAL


def rows_of(arena: Arena, x: torch.Tensor, stride: int, space: Space = Space.HEAP) -> int:
    """Store the rows of x `stride` elements apart, with poison between them."""
    padded = torch.full((x.shape[0], stride), torch.nan, dtype=x.dtype)
    padded[:, : x.shape[1]] = x
    return arena.store(padded, space)


class RoundedOutput:
    """Room for the bf16 copy of a task's columns."""

    def __init__(self, arena: Arena, args: Any, rows: int, n: int) -> None:
        self.arena, self.at, self.rows, self.n, self.stride = arena, arena.alloc(2 * rows * (n + 3)), rows, n, n + 3
        args.out_bf16, args.out_bf16_stride = self.at, self.stride
        arena.output(self.at, 2 * n, rows=rows, stride=2 * self.stride)

    def check(self, want: np.ndarray | torch.Tensor) -> None:
        got = self.arena.floats(self.at, (self.rows, self.stride), "bf16")[:, : self.n]
        assert_close("rounded ", got, torch.as_tensor(want).float().bfloat16().float(), 0)
