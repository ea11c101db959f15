"""A decode step of distmk and its peers, on the same GPUs, in the same processes, with the same random weights.

The peers are written in torch: `compiled` (torch.compile and Triton, the whole step in one CUDA graph), `graphed`
(eager code in a CUDA graph) and `eager`. With several GPUs, all-reduces use torch's symmetric memory and NCCL in turn.
`vllm` runs if it is installed. On the host twin there is only `eager`. The floor is the time that a step's weights,
keys and values need at the bandwidth that the project's own streaming probe measures in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path

from benchmark import machine
from benchmark.bandwidth import measure_bandwidth
from benchmark.ours import Timed, time_ours
from benchmark.plot import draw
from benchmark.report import Report, Row
from benchmark.work import Work, add_work_arguments, work_of
from distmk import env
from distmk.backends.cuda.gpus import gpu_of
from distmk.backends.defaults import choose_backend
from distmk.bootstrap import Bootstrap, agree, connect
from distmk.errors import UsageError
from distmk.model.shards import shard_model

PEERS = ("compiled", "graphed", "eager", "vllm")
COMPILER_THREADS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_work_arguments(parser)
    parser.add_argument(
        "--peer",
        action="append",
        choices=(*PEERS, "none"),
        help="one to compare with, or none; may be repeated (default: all but vllm)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here, anew after every side")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it")
    parser.add_argument(
        "--beside", type=Path, nargs="+", default=[], metavar="REPORT", help="earlier ones to draw with it"
    )


def run(arguments: argparse.Namespace) -> int:
    with connect() as bootstrap:
        work, backend = agree(bootstrap, lambda: _check(arguments, bootstrap))
        earlier = agree(bootstrap, lambda: [Report.load(path) for path in arguments.beside])
        comparison = Comparison(arguments.model, work, backend, bootstrap, arguments.json)
        try:
            comparison.run(_peers(arguments, backend))
        finally:  # also the results from before a side failed
            if bootstrap.rank == 0 and comparison.report.rows:
                print(comparison.report.text(), flush=True)
        report = comparison.report
        agree(bootstrap, lambda: _write(report, earlier, arguments) if bootstrap.rank == 0 else None)
    return 0


def _check(arguments: argparse.Namespace, bootstrap: Bootstrap) -> tuple[Work, str]:
    work = work_of(arguments)
    for path in (arguments.json, arguments.plot):
        if path and not path.absolute().parent.is_dir():
            raise UsageError(f"{path}: no folder {path.absolute().parent}; make it first")
    backend = choose_backend(arguments.backend)
    from benchmark.weights import check_peers_can

    peers = _peers(arguments, backend)
    if peers:
        check_peers_can(work.config, bootstrap.world_size)
        if backend == "cuda" and env.ranks_per_gpu() > 1:
            raise UsageError("peers need a GPU for each rank; unset DISTMK_RANKS_PER_GPU, or use --peer none")
    if backend == "host" and (gpu_only := [peer for peer in peers if peer != "eager"]):
        raise UsageError(f"--peer {gpu_only[0]} needs GPUs; the host twin's peer is eager")
    return work, backend


def _peers(arguments: argparse.Namespace, backend: str) -> list[str]:
    """The peers that were asked for; if none was, all that can run here except vllm."""
    if arguments.peer:
        return [peer for peer in arguments.peer if peer != "none"]
    return list(PEERS[:3] if backend == "cuda" else ("eager",))


class Comparison:
    """One run of all sides. `report` grows with it; rank 0's counts, and is saved to `file` if there is one."""

    def __init__(self, model: str, work: Work, backend: str, bootstrap: Bootstrap, file: Path | None = None) -> None:
        self._work, self._backend, self._bootstrap, self._file = work, backend, bootstrap, file
        self._began = time.perf_counter()
        shards = shard_model(work.config, bootstrap.world_size)
        on_gpu = backend == "cuda"
        self.report = Report(
            model=model,
            num_layers=work.config.num_layers,
            num_ranks=bootstrap.world_size,
            backend=backend,
            batch=work.batch,
            context=work.context,
            tokens=work.tokens,
            step_bytes=max(work.step_bytes(shard) for shard in shards),
            bandwidth=measure_bandwidth(bootstrap) if on_gpu else {},
            machine=machine.gpu(gpu_of(bootstrap.local_rank)) if on_gpu else machine.cpu(),
        )
        self.report.machine |= machine.versions("torch", "triton", "nvshmem4py-cu13")

    def run(self, peers: list[str]) -> None:
        """Run ours, then the `peers`."""
        self._tell("distmk")
        ours = time_ours(self._work, self._backend)
        ours.tokens = json.loads(self._bootstrap.broadcast(json.dumps(ours.tokens).encode()))
        self._add(Row(ours.name, ours.times_ms, ours.steps))
        if torch_peers := [name for name in peers if name != "vllm"]:
            self._run_torch(torch_peers, ours)
        if "vllm" in peers:
            self._run_vllm()
        self._tell("done")

    def _tell(self, text: str) -> None:
        """Print what is going on, and the time so far."""
        if self._bootstrap.rank == 0:
            print(f"bench: {time.perf_counter() - self._began:5.1f} s: {text}", file=sys.stderr, flush=True)

    def _add(self, row: Row) -> Row:
        """Record a result at once, so that it is kept even if a later side fails."""
        self.report.rows.append(row)
        if self._bootstrap.rank == 0:
            self._tell(f"{row.name}: {row.median_ms:.3f} ms a step")
            if self._file:
                with contextlib.suppress(UsageError):  # the end of the run reports it, on all ranks
                    self.report.save(self._file)
        return row

    def _note(self, text: str) -> None:
        self.report.notes.append(text)
        self._tell(text)

    def _run_torch(self, names: list[str], ours: Timed) -> None:
        bootstrap = self._bootstrap
        share = len(os.sched_getaffinity(0)) // bootstrap.local_size
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, min(COMPILER_THREADS, share))))
        import torch

        from benchmark.peers import Peers, join, leave

        self._tell("the peers' weights")
        device = torch.device("cuda", bootstrap.local_rank) if self._backend == "cuda" else torch.device("cpu")
        join(bootstrap, device)
        peers = Peers(self._work, bootstrap, device, self._tell, self._note)
        timed = []
        for each in peers.run(names):
            timed.append((each, self._add(Row(each.name, each.times_ms, each.steps))))
        for each, row in timed:  # the comparison overwrites a sequence
            row.agreement = str(peers.compare(ours.tokens, each.tokens))
        del peers
        leave()

    def _run_vllm(self) -> None:
        from benchmark.vllm_peer import time_vllm, why_not

        if reason := why_not():
            self._note(reason)
            return
        self._tell("vllm")
        timed = time_vllm(self._work, self._bootstrap)
        self._add(Row(timed.name, timed.times_ms, timed.steps, "has weights of its own"))


def _write(report: Report, earlier: list[Report], arguments: argparse.Namespace) -> None:
    if arguments.json:
        report.save(arguments.json)
    if arguments.plot:
        draw([*earlier, report], arguments.plot)
