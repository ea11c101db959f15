#!/usr/bin/env python
"""A burst of requests on a fresh engine, then a steady stream: how well they share iterations, and what delays tokens.

    python scripts/load_time.py qwen3-8b
    python scripts/load_time.py qwen3-8b --tensor-parallel-size 2 --concurrency 32

`--concurrency` requests are submitted at once. For `--seconds`, each request that ends is replaced. Prints one JSON
object. `tokens_per_iteration` is close to the concurrency if no request waits. `gaps` are the longest times between two
tokens of a request. Each gap lists what happened meanwhile: iterations of the kernel, the collector's passes, starts of
launches, and the longest time in which no thread of this process could run Python. Many iterations in a gap mean that
the host delayed the tokens; no iterations mean that the GPU did. `--heap-objects` stands for the objects that an
application has loaded, `--kept-objects` for the objects that it keeps for each token. Weights are random.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from benchmark.report import latency_summary

from distmk import LLM, SamplingParams
from distmk.backends.defaults import BACKENDS
from distmk.cli.exit_status import run_main
from distmk.engine.token_output import TokenOutput

NUM_GAPS = 5
MAX_PROMPT, MAX_TOKENS = 200, 64
TICK_S = 0.001
STALL_S = 0.02


@dataclass
class Watch:
    """Events that may delay tokens, as (kind, begin, end) in seconds of the monotonic clock."""

    spans: list[tuple[str, float, float]] = field(default_factory=list)
    num_launches: int = 0
    _gc_began_s: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def over(self, llm: LLM) -> Iterator[None]:
        """Watch an engine, the collector and the time for which Python does not run."""
        engine = llm.engine
        launch, ticking = engine.launch, threading.Thread(target=self._tick)

        def timed_launch() -> Any:
            began_s = time.monotonic()
            try:
                return launch()
            finally:
                self.num_launches += 1
                self.spans.append(("launch start", began_s, time.monotonic()))

        engine.launch = timed_launch  # type: ignore[method-assign]
        gc.callbacks.append(self._on_collection)
        ticking.start()
        try:
            yield
        finally:
            self._over.set()
            ticking.join()
            gc.callbacks.remove(self._on_collection)
            engine.launch = launch  # type: ignore[method-assign]

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began_s = time.monotonic()
        else:
            self.spans.append((f"collection {info['generation']}", self._gc_began_s, time.monotonic()))

    def _tick(self) -> None:
        before_s = time.monotonic()
        while not self._over.wait(TICK_S):
            now_s = time.monotonic()
            if now_s - before_s > STALL_S:
                self.spans.append(("no Python", before_s, now_s))
            before_s = now_s

    def during(self, begin_s: float, end_s: float) -> dict[str, float]:
        """Milliseconds of each kind of event between two times."""
        spent_ms: dict[str, float] = {}
        for kind, began_s, ended_s in self.spans:
            if (shared_s := min(ended_s, end_s) - max(began_s, begin_s)) > 0:
                spent_ms[kind] = round(spent_ms.get(kind, 0.0) + 1e3 * shared_s, 1)
        return spent_ms

    def longest_ms(self, kind: str) -> float:
        return round(
            max((1e3 * (end - begin) for each, begin, end in self.spans if each.startswith(kind)), default=0), 1
        )


@dataclass
class Load:
    """Requests under way, and the times of their tokens. Outputs are kept, as callers do."""

    llm: LLM
    rng: random.Random
    num_kept: int  # objects per token
    burst_ms: list[float] = field(default_factory=list)  # to the first token, for the first burst of requests
    first_ms: list[float] = field(default_factory=list)
    gaps: list[tuple[float, float, int]] = field(default_factory=list)  # the longest ones: seconds, end, iterations
    outputs: list[list[object]] = field(default_factory=list)
    over: SimpleQueue[BaseException | None] = field(default_factory=SimpleQueue)

    def submit(self, first_ms: list[float]) -> None:
        prompt = [self.rng.randrange(100) for _ in range(self.rng.randrange(1, MAX_PROMPT))]
        params = SamplingParams(max_tokens=self.rng.randrange(8, MAX_TOKENS), ignore_eos=True)
        began_s = last_s = time.monotonic()
        iterations = 0

        def deliver(output: TokenOutput | BaseException) -> None:
            nonlocal last_s, iterations
            now_s, num_iterations = time.monotonic(), self.llm.stats().num_iterations
            if isinstance(output, BaseException):
                self.over.put(output)
                return
            if iterations:
                self.note_gap(now_s - last_s, now_s, num_iterations - iterations)
            else:
                first_ms.append(1e3 * (now_s - began_s))
            last_s, iterations = now_s, num_iterations
            self.outputs.append([output, *([number] for number in range(self.num_kept))])
            if output.finish_reason is not None:
                self.over.put(None)

        self.llm.submit(prompt, params, deliver)

    def note_gap(self, gap_s: float, end_s: float, num_iterations: int) -> None:
        """Keep the longest gaps. Gaps of several requests at the same time count once."""
        for index, (other_s, other_end_s, _) in enumerate(self.gaps):
            if min(end_s, other_end_s) - max(end_s - gap_s, other_end_s - other_s) > 0.5 * min(gap_s, other_s):
                if gap_s > other_s:
                    self.gaps[index] = (gap_s, end_s, num_iterations)
                return
        self.gaps = sorted([*self.gaps, (gap_s, end_s, num_iterations)], reverse=True)[:NUM_GAPS]

    def take_end(self) -> None:
        """Wait for the end of a request."""
        if (error := self.over.get()) is not None:
            raise error


def measure(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """The results to print."""
    load, watch = Load(llm, random.Random(arguments.seed), arguments.kept_objects), Watch()
    heap = [[number] for number in range(arguments.heap_objects)]
    with watch.over(llm):
        began_s = time.monotonic()
        for _ in range(arguments.concurrency):
            load.submit(load.burst_ms)
        while time.monotonic() - began_s < arguments.seconds:
            load.take_end()
            load.submit(load.first_ms)
        for _ in range(arguments.concurrency):
            load.take_end()
        ended_s = time.monotonic()
    iterations = llm.stats().num_iterations
    return {
        "model": arguments.model,
        "backend": llm.backend,
        "ranks": llm.tensor_parallel_size,
        "concurrency": arguments.concurrency,
        "heap_objects": len(heap),
        "kept_objects": arguments.kept_objects,
        "requests_per_s": round(len(load.burst_ms + load.first_ms) / (ended_s - began_s), 1),
        "tokens_per_iteration": round(len(load.outputs) / iterations, 2),
        "num_launches": watch.num_launches,
        "burst_first_ms": {**latency_summary(load.burst_ms, 1), "max": round(max(load.burst_ms), 1)},
        "first_ms": {**latency_summary(load.first_ms, 1), "max": round(max(load.first_ms), 1)},
        "longest_ms": {kind: watch.longest_ms(kind) for kind in ("collection", "launch start", "no Python")},
        "gaps": [
            {
                "ms": round(1e3 * gap_s, 1),
                "at_s": round(end_s - gap_s - began_s, 2),
                "iterations": num_iterations,
                "meanwhile_ms": watch.during(end_s - gap_s, end_s),
            }
            for gap_s, end_s, num_iterations in sorted(load.gaps, reverse=True)
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a preset, as of `distmk generate`")
    parser.add_argument("--backend", default="auto", choices=BACKENDS)
    parser.add_argument("--tensor-parallel-size", "--ranks", type=int)
    parser.add_argument("--concurrency", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--heap-objects", type=int, default=1_000_000)
    parser.add_argument("--kept-objects", type=int, default=4)
    parser.add_argument("--idle", default="exit", choices=("resident", "exit"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with LLM(
        arguments.model,
        backend=arguments.backend,
        load_format="dummy",
        tensor_parallel_size=arguments.tensor_parallel_size,
        max_model_len=1024,
        idle_exit_s=None if arguments.idle == "resident" else 0.0,
        followed=True,
    ) as llm:
        if llm.rank:
            llm.follow()
        else:
            print(json.dumps(measure(llm, arguments), indent=2))
    return 0


if __name__ == "__main__":
    run_main(main)
