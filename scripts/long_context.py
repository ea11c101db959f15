#!/usr/bin/env python
"""Time of a decode step of several sequences with long contexts, beside the time that its bytes need.

    python scripts/long_context.py qwen3-4b --cases 1x8192,4x8192,8x8192,16x8192,64x4096,8x32768 --repeats 3
    python scripts/long_context.py qwen3-4b --peer vllm                      # and vLLM with the same lengths, if it is installed
    torchrun --nproc-per-node 4 scripts/long_context.py qwen3-8b             # tensor parallel

Contexts are random prompts of about that many tokens, whose reading is not timed. Prints one JSON object a case: the median
over --repeats of the milliseconds a step, and its ratio to the floor. The floor is the time that weights, keys and values
take at the bandwidth that the project's own probe measures in the same run. Cases that do not fit into memory are left out,
with a line on stderr. --result writes a file for scripts/result_tables.py. Weights are random.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark import machine
from benchmark.bandwidth import measure_bandwidth
from benchmark.long_contexts import (
    Case,
    TimedCase,
    longest,
    missing_pages,
    parse_cases,
    serving,
    step_bytes,
    time_case,
)
from benchmark.work import read_config

import distmk
from distmk import connect
from distmk.abi import MAX_SEQUENCES
from distmk.backends.cuda.gpus import gpu_of
from distmk.backends.defaults import choose_backend
from distmk.bootstrap import Bootstrap, agree
from distmk.cli.exit_status import run_main
from distmk.errors import UsageError
from distmk.model.config import ModelConfig

CASES = "1x8192,4x8192,8x8192,16x8192,64x4096,8x32768"

Result = dict[str, Any]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a preset such as qwen3-4b, or a config.json")
    parser.add_argument("--cases", default=CASES, help=f"sequences x context (default {CASES})")
    parser.add_argument("--layers", type=int, metavar="N", help="as many layers instead of the model's own")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="steps to time (default 64)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="times to time them (default 3)")
    parser.add_argument("--backend", default="auto", choices=("auto", "host", "cuda"))
    parser.add_argument("--peer", choices=("vllm",), help="also time vLLM, if it is installed")
    parser.add_argument("--result", type=Path, metavar="FILE", help="write a result file for scripts/result_tables.py")
    return parser.parse_args()


def check(arguments: argparse.Namespace) -> tuple[ModelConfig, list[Case], str]:
    """The model, the cases and the backend. UsageError (ModelError): they are not possible."""
    for name in ("tokens", "repeats"):
        if getattr(arguments, name) < 1:
            raise UsageError(f"--{name} is {getattr(arguments, name)}; it must be at least 1")
    cases = parse_cases(arguments.cases)
    if (most := max(case.batch for case in cases)) > MAX_SEQUENCES:
        raise UsageError(f"--cases has {most} sequences; at most {MAX_SEQUENCES} run at once")
    if arguments.result and not arguments.result.absolute().parent.is_dir():
        raise UsageError(f"{arguments.result}: no folder {arguments.result.absolute().parent}; make it first")
    return read_config(arguments.model, arguments.layers), cases, choose_backend(arguments.backend)


class Run:
    """All cases of one model. `results` grows with each side and case."""

    def __init__(self, arguments: argparse.Namespace, bootstrap: Bootstrap) -> None:
        self._arguments, self._bootstrap = arguments, bootstrap
        self._config, self._cases, self._backend = agree(bootstrap, lambda: check(arguments))
        on_gpu = self._backend == "cuda"
        self._bandwidth = max(measure_bandwidth(bootstrap).values()) if on_gpu else None
        self.machine = machine.gpu(gpu_of(bootstrap.local_rank)) if on_gpu else machine.cpu()
        self.results: list[Result] = []

    def time_ours(self) -> None:
        """Leave out the longest contexts until one sequence of those left fits. UsageError: none does."""
        cases = self._cases
        while True:
            try:
                return self._time_fitting(cases)
            except UsageError as error:
                most = max(case.context for case in cases)
                left = [case for case in cases if case.context < most]
                if not left or self.results:
                    raise
                self._leave_out([case for case in cases if case.context == most], str(error))
                cases = left

    def _time_fitting(self, cases: Sequence[Case]) -> None:
        tokens = self._arguments.tokens
        with serving(self._config, cases, tokens, self._backend) as llm:
            for case in cases:
                if (missing := missing_pages(llm, case, tokens)) > 0:
                    pages = llm.engine.num_kv_pages
                    self._leave_out([case], f"its KV cache takes {pages + missing} pages, and there are {pages}")
                    continue
                timed = time_case(llm, case, tokens, self._arguments.repeats)
                if timed is None:
                    self._leave_out([case], "its prompts did not stay in the KV cache until all sequences decoded")
                    continue
                self._add("distmk", case, timed)
        del llm  # the peer needs its memory
        gc.collect()
        if self._backend == "cuda":
            import torch

            torch.cuda.empty_cache()

    def time_vllm(self) -> None:
        """The cases that ours has timed."""
        from benchmark.vllm_peer import VllmPeer, why_not

        if reason := why_not():
            return self._tell(reason)
        arguments = self._arguments
        ours = json.loads(self._bootstrap.broadcast(json.dumps(self.results).encode()))
        timed = [(Case(each["sequences"], each["tokens_each"]), each["context"]) for each in ours]
        if not timed:
            return
        cases = [case for case, _ in timed]
        most = max(case.batch for case in cases)
        vllm = VllmPeer(
            self._config, self._bootstrap, longest(cases, arguments.tokens), most, memory=0.9, caches_prefixes=True
        )
        for case, context in timed:
            prompts = case.prompts(self._config.vocab_size)
            self._add("vllm", case, TimedCase(vllm.times_ms(prompts, arguments.tokens, arguments.repeats), context))

    def _add(self, engine: str, case: Case, timed: TimedCase) -> None:
        num_bytes = step_bytes(self._config, self._bootstrap.world_size, case, timed.context, self._arguments.tokens)
        floor_ms = 1e3 * num_bytes / self._bandwidth if self._bandwidth else None
        median = statistics.median(timed.times_ms)
        result = {
            "engine": engine,
            "model": self._arguments.model,
            "layers": self._config.num_layers,
            "backend": self._backend,
            "tensor_parallel": self._bootstrap.world_size,
            "sequences": case.batch,
            "tokens_each": case.context,
            "context": timed.context,
            "tokens": self._arguments.tokens,
            "ms_per_step": round(median, 4),
            "min": round(min(timed.times_ms), 4),
            "max": round(max(timed.times_ms), 4),
            "repeats": len(timed.times_ms),
            "gb_per_step": round(num_bytes / 1e9, 3),
            "floor_ms": round(floor_ms, 4) if floor_ms else None,
            "times_floor": round(median / floor_ms, 3) if floor_ms else None,
        }
        self.results.append(result)
        if self._bootstrap.rank == 0:
            print(json.dumps(result), flush=True)

    def _leave_out(self, cases: Sequence[Case], reason: str) -> None:
        self._tell(f"{', '.join(map(str, cases))} left out: {reason}")

    def _tell(self, text: str) -> None:
        if self._bootstrap.rank == 0:
            print(f"long_context: {text}", file=sys.stderr, flush=True)


def result_file(run: Run, model: str) -> Result:
    """The results as a file of scripts/benchmark/results: a row a case, engines side by side."""
    ours = [each for each in run.results if each["engine"] == "distmk"]
    others = {(each["sequences"], each["tokens_each"]): each for each in run.results if each["engine"] != "distmk"}
    columns = ["sequences x context", "floor, ms", "times the floor", "distmk, ms a step"]
    rows = [
        [f"{each['sequences']} x {each['tokens_each']}", each["floor_ms"], each["times_floor"], each["ms_per_step"]]
        for each in ours
    ]
    if others:
        columns.append("vLLM")
        for row, each in zip(rows, ours, strict=True):
            row.append(others.get((each["sequences"], each["tokens_each"]), {}).get("ms_per_step"))
    return {
        "version": distmk.__version__,
        "commit": machine.commit(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": str(run.machine.get("gpu", run.machine.get("cpu", ""))),
        "model": f"{model}, bf16",
        "command": shlex.join(["python", *sys.argv]),
        **({"beside": columns[3]} if others else {}),
        "columns": columns,
        "rows": rows,
    }


def main() -> int:
    os.environ.update(machine.NO_MULTICAST)  # before any library reads the environment
    arguments = parse()
    with connect() as bootstrap:
        run = Run(arguments, bootstrap)
        run.time_ours()
        if arguments.peer:
            run.time_vllm()
        if arguments.result and bootstrap.rank == 0:
            arguments.result.write_text(json.dumps(result_file(run, arguments.model), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    run_main(main)
