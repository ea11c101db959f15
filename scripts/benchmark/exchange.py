"""How ranks add up partial sums and exchange candidates: alone, by torch.distributed, or by symmetric memory."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange(Protocol):
    """`sums`: the memory for a step's partial sums of attention and of the MLP, each [batch, hidden]."""

    name: str
    num_ranks: int
    sums: tuple[Tensor, Tensor]

    def add_up(self, partial: Tensor) -> Tensor:
        """The sum over ranks, on every rank."""
        ...

    def gather(self, candidates: Tensor) -> Tensor:
        """Every rank's float32 `candidates`, as [ranks, ...]."""
        ...

    def join(self, logits: Tensor) -> Tensor:
        """All ranks' float32 `logits`, one after another. Ranks may have different numbers of them."""
        ...


class Alone:
    """One rank."""

    name, num_ranks = "", 1

    def __init__(self, like: Tensor) -> None:
        self.sums = (torch.empty_like(like), torch.empty_like(like))

    def add_up(self, partial: Tensor) -> Tensor:
        return partial

    def gather(self, candidates: Tensor) -> Tensor:
        return candidates[None]

    def join(self, logits: Tensor) -> Tensor:
        return logits


class Collective:
    """The process group's own all-reduce: NCCL's on GPUs, gloo's elsewhere."""

    def __init__(self, like: Tensor, num_ranks: int, rank: int) -> None:
        self.name, self.num_ranks, self._rank = dist.get_backend(), num_ranks, rank
        self.sums = (torch.empty_like(like), torch.empty_like(like))

    def add_up(self, partial: Tensor) -> Tensor:
        dist.all_reduce(partial)
        return partial

    def gather(self, candidates: Tensor) -> Tensor:
        out = candidates.new_zeros(self.num_ranks, *candidates.shape)
        out[self._rank] = candidates
        return self.add_up(out)  # the other rows are zero here

    def join(self, logits: Tensor) -> Tensor:
        sizes = self.gather(torch.tensor([float(logits.numel())], device=logits.device))[:, 0].long().tolist()
        padded = torch.cat([logits, logits.new_zeros(max(sizes) - logits.numel())])
        return torch.cat([part[:size] for part, size in zip(self.gather(padded), sizes, strict=True)])


def choose_symmetric_memory(device: torch.device) -> None:
    """Select torch's own backend for symmetric memory. RuntimeError on every rank: torch was built without it."""
    import torch.distributed._symmetric_memory as symmetric

    if symmetric.get_backend(device) != "CUDA":  # torch refuses to set its default again
        symmetric.set_backend("CUDA")


class Symmetric(Collective):
    """One-shot all-reduces over symmetric memory, for steps only: every rank reads the others' `sums` in place.

    They never use NVLink multicast, and use torch's own backend for symmetric memory, because NVSHMEM belongs to the
    runtime. Call `choose_symmetric_memory` first.
    """

    def __init__(self, like: Tensor, num_ranks: int, rank: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.name, self.num_ranks, self._rank = "symm_mem", num_ranks, rank
        self._group = dist.group.WORLD.group_name
        sums = symmetric.empty(*like.shape, dtype=like.dtype, device=like.device)
        self._slots = symmetric.empty(num_ranks, len(like), 2, dtype=torch.float32, device=like.device)
        self._handles = [symmetric.rendezvous(memory, self._group) for memory in (sums, self._slots)]
        self._slots.zero_()
        # An all-reduce ends when every rank has read, so both sums can share memory.
        self.sums = (sums, sums)

    def add_up(self, partial: Tensor) -> Tensor:
        return torch.ops.symm_mem.one_shot_all_reduce(partial, "sum", self._group)

    def gather(self, candidates: Tensor) -> Tensor:
        self._slots[self._rank] = candidates
        return torch.ops.symm_mem.one_shot_all_reduce(self._slots, "sum", self._group)
