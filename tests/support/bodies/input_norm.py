"""What a task that writes columns of the residual stream leaves for a matrix without the weight of its norm."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from support.bodies.board import Board, f32

from distmk.graph.regions import Region
from distmk.testing.arrays import assert_close
from distmk.testing.memory import Memory


class InputNorm:
    """The norm of `n` columns of up to `room` rows, where a task may have one: with a bf16 copy, on the host twin."""

    def __init__(self, board: Board, rank: int, n: int, room: int, num_rows: int, out_bf16: Region | None) -> None:
        self.num_rows, self.out_bf16 = num_rows, out_bf16
        self.weight: torch.Tensor | None = None
        self.operands: dict[str, Any] = {}
        if out_bf16 and not board.gpu_layout and board.rng.random() < 0.5:
            self.weight = torch.randn(n)
            self.squares = board.writable(board.padded(rank, 1, room), num_rows)
            self.operands = {"input_norm": board.vector(rank, self.weight), "squares": self.squares}

    def check(self, memory: Memory, x: np.ndarray) -> None:
        """`x`: the columns as the task has written them. The copy has the same bits as theirs."""
        if not self.out_bf16:
            return
        columns = torch.from_numpy(x.copy())
        want = columns if self.weight is None else columns * self.weight
        assert_close("rounded ", f32(memory, self.out_bf16, self.num_rows), want.bfloat16().float(), 0)
        if self.weight is not None:
            squares = columns.double().square().sum(1, keepdim=True)
            assert_close("squares ", f32(memory, self.squares, self.num_rows), squares, 1e-5 * squares)
