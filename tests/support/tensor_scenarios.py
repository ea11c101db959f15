"""Scenario of graph_job.py in which torch fills and reads the buffers of tasks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from support.job import Job

from distmk.abi import Space
from distmk.tasks import Put

if TYPE_CHECKING:
    import torch

COLS, HALF = 24, 12


class Kind(NamedTuple):
    """Of a buffer; on the heap it is copied to the next rank, else to another buffer of the same rank."""

    dtype: str
    space: Space

    def __str__(self) -> str:
        return f"{self.dtype} {self.space.name}"

    def torch_dtype(self) -> torch.dtype:
        import torch

        return {"f32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32, "u8": torch.uint8}[self.dtype]

    def values(self, seed: int, rank: int, launch: int) -> torch.Tensor:
        """[COLS], random bits: numbers and what is no number."""
        import torch

        rng = np.random.default_rng([seed, rank, launch, *map(ord, self.dtype), self.space])
        num_bytes = COLS * self.torch_dtype().itemsize
        return torch.from_numpy(rng.integers(0, 256, num_bytes, np.uint8)).view(self.torch_dtype())


def tensors(job: Job) -> None:
    """Tensors of every dtype and space are the memory of the tasks: copies come out bit by bit, launch after launch.

    What the session leaves of them can be used when it is closed; on the host also slices.
    """
    import torch

    seed = job.options["seed"]
    print(f"repeat with DISTMK_TEST_SEED={seed}", file=sys.stderr)
    kinds = [Kind(dtype, space) for dtype in ("f32", "bf16", "i32", "u8") for space in (Space.HEAP, Space.LOCAL)]
    graph = job.graph()
    sources, copies = (
        {kind: graph.buffer(f"{name} {kind}", COLS, dtype=kind.dtype, space=kind.space) for kind in kinds}
        for name in ("source", "copy")
    )
    table = graph.buffer("table", 3, rows=2, dtype="bf16", space=Space.LOCAL)
    for rank in range(job.num_ranks):
        for kind in kinds:
            to = (rank + 1) % job.num_ranks if kind.space is Space.HEAP else rank
            graph.add(Put(rank, f"copy {kind}", src=sources[kind].at(rank), dst=copies[kind].at(to)))

    def check(kind: Kind, got: torch.Tensor, launch: int) -> None:
        source = (job.rank - 1) % job.num_ranks if kind.space is Space.HEAP else job.rank
        want = kind.values(seed, source, launch).view(torch.uint8)
        wrong = (got.detach().cpu().view(torch.uint8) != want).nonzero().flatten().tolist()
        assert not wrong, (
            f"rank {job.rank}, launch {launch}, {kind}: {len(wrong)} bytes differ, the first at {wrong[0]}"
        )

    with job.session(graph) as session:
        on_gpu = session.backend_name == "cuda"
        filled, found = ({kind: session.tensor(each[kind]) for kind in kinds} for each in (sources, copies))
        assert session.tensor("table").shape == (2, 3) and not session.tensor(table).any()
        session.tensor(table)[1, 2] = 7  # as bf16 0x40e0
        np.testing.assert_array_equal(session.view(table), [[0, 0, 0], [0, 0, 0x40E0]])
        for launch in range(3):
            for kind, tensor in filled.items():
                assert (tensor.shape, tensor.dtype, tensor.is_cuda) == ((1, COLS), kind.torch_dtype(), on_gpu)
                values = kind.values(seed, job.rank, launch)
                tensor[0, :HALF] = values[:HALF]
                tensor[0, HALF:].copy_(values[HALF:])
            job.run(session, 1)
            for kind, tensor in found.items():
                check(kind, tensor[0], launch)
                bits = session.view(copies[kind])
                check(kind, torch.from_numpy(bits[0].copy().view(np.uint8)), launch)
                assert bits.flags.writeable != on_gpu, "what is written to a copy is lost"
        slices = [(tensor, tensor[0, HALF:]) for tensor in found.values() if not on_gpu]
    for kind, tensor in found.items():
        check(kind, tensor[0], launch)
        tensor.zero_()
    for tensor, end in slices:
        end.fill_(1)
        assert (tensor[0, HALF:] == 1).all()
