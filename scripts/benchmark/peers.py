"""The peers, one after another with the same weights: the time that each takes, and whether its tokens equal distmk's."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmark.exchange import Alone, Collective, Exchange, Symmetric, choose_symmetric_memory
from benchmark.model import Model, Step
from benchmark.ours import Timed
from benchmark.steps import capture, compile_parts, compiled_step, eager_step, time_steps
from benchmark.weights import read_weights
from benchmark.work import Work
from distmk.bootstrap import Bootstrap
from distmk.weights.dummy import DummyCheckpoint

Tell = Callable[[str], None]
EAGER_TOKENS = 32  # steps that eager is timed over, because it is slow


@dataclass(frozen=True)
class Agreement:
    """How many tokens the peer's and distmk's output share from the beginning, and out of how many. `margin`: at the
    first difference, by how much the peer's logits prefer its own token.
    """

    same: int
    of: int
    margin: float | None

    def __str__(self) -> str:
        behind = "" if self.margin is None else f", then by {self.margin:.3g}"
        return f"{self.same} of {self.of}{behind}"


def join(bootstrap: Bootstrap, device: torch.device) -> None:
    """Make the process group of these ranks, whatever has started them. Collective."""
    if bootstrap.world_size == 1:
        return
    lead = bootstrap.rank == 0
    host = bootstrap.hostnames[0] if bootstrap.local_size < bootstrap.world_size else "127.0.0.1"
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if lead else None
    port = int(bootstrap.broadcast(str(store.port).encode() if store else None))
    if store is None:
        store = dist.TCPStore(host, port, wait_for_workers=False)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=bootstrap.rank,
        world_size=bootstrap.world_size,
        device_id=device if device.type == "cuda" else None,
    )


def leave() -> None:
    """Leave the process group. Graphs that contain its all-reduces must be gone."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


class Peers:
    """This rank's part of the model, with the prompts read. All calls are collective."""

    def __init__(
        self, work: Work, bootstrap: Bootstrap, device: torch.device, tell: Tell = print, note: Tell = print
    ) -> None:
        self._work, self._tell, self._note = work, tell, note
        num_ranks, rank = bootstrap.world_size, bootstrap.rank
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        checkpoint = DummyCheckpoint(work.config, None, 0)
        weights = read_weights(checkpoint, num_ranks, rank, -(-work.max_len // 64) * 64, device, dtype)
        self.model = Model(weights, rank, work.batch)
        like = torch.empty(work.batch, work.config.hidden_size, dtype=dtype, device=device)
        self._exchanges: list[Exchange] = [Alone(like)]
        if num_ranks > 1:
            self._exchanges = [Collective(like, num_ranks, rank)]
            if device.type == "cuda":
                try:
                    choose_symmetric_memory(device)
                except RuntimeError as error:
                    note(f"no symmetric memory for the peers: {error}")
                else:
                    self._exchanges.insert(0, Symmetric(like, num_ranks, rank))
        self._plain = self._exchanges[-1]
        self.model.read_prompts(work.prompts, self._plain)

    def run(self, names: Sequence[str]) -> Iterator[Timed]:
        """Run every peer of `names`: compiled (with each exchange), graphed, eager."""
        if "compiled" in names:
            self._tell("compiling")
            step = compiled_step(self.model, self._exchanges[0], self._note)
            compile_parts(step)
            for exchange in self._exchanges:
                yield self._time("compiled", dataclasses.replace(step, exchange=exchange), graphed=True)
        if "graphed" in names:
            yield self._time("graphed", eager_step(self.model, self._exchanges[0]), graphed=True)
        if "eager" in names:
            yield self._time("eager", eager_step(self.model, self._plain), graphed=False)

    def _time(self, name: str, step: Step, graphed: bool) -> Timed:
        exchange = step.exchange.name
        name = f"{name}, {exchange}" if exchange else name
        self._tell(name)
        run = capture(step) if graphed else step
        tokens = self._work.tokens if graphed else min(EAGER_TOKENS, self._work.tokens)
        times_ms, new = time_steps(run, self.model, self._work, tokens)
        return Timed(name, times_ms, new, tokens)

    def compare(self, ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Agreement:
        """Compare the first sequence; `ours` must be rank 0's on every rank. Reads its prompt anew, so it must come last."""
        mine, peer = ours[0], theirs[0]
        of = min(len(mine), len(peer))
        same = next((i for i in range(of) if mine[i] != peer[i]), of)
        if same == of:
            return Agreement(same, of, None)
        logits = self.model.logits([*self._work.prompts[0], *mine[:same]], self._plain)
        return Agreement(same, of, float(logits[peer[same]] - logits[mine[same]]))
