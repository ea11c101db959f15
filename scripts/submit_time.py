#!/usr/bin/env python
"""Time from the submission of a prompt of one token to its first token, and the board's power without requests.

    python scripts/submit_time.py qwen3-8b                 # the launch stays: requests join a running kernel
    python scripts/submit_time.py qwen3-8b --idle exit     # it leaves at once: every request launches it again

Prints one JSON object with medians and 99th percentiles.

write_us: the time to write a request to the memory that the kernel reads, in a thread that does nothing else.
answer_us: from telling the kernel that the request is there until its token is in host memory.
submit_us: both of these and everything around them, for a caller of `LLM.submit`.
step_us: the time between two tokens of a long completion.

Weights are random, since no value changes how long a step takes.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from typing import Any

from benchmark.machine import power_meter
from benchmark.report import latency_summary

from distmk import LLM, SamplingParams
from distmk.abi import CommandKind
from distmk.backends.defaults import BACKENDS
from distmk.cli.exit_status import run_main

ONE = SamplingParams(max_tokens=1, ignore_eos=True)
PROMPT = [7]
IDLE_S = 3.0
STEPS = 256


def time_ring(llm: LLM, repeats: int) -> tuple[list[float], list[float]]:
    """Microseconds of writing and of answering, in a launch of its own."""
    launch = llm.engine.launch()
    block, counts = launch.launch.block, launch.launch.block.counts
    writing, answering = [], []
    for number in range(repeats):
        published = counts.tokens
        began = time.perf_counter()
        block.write_request(0, number, PROMPT, 1, True)
        launch.launch.upload_request(0)
        block.write_command(CommandKind.ADD, 0, number)
        sent = time.perf_counter()
        block.publish_commands()
        while counts.tokens == published:
            pass
        writing.append(1e6 * (sent - began))
        answering.append(1e6 * (time.perf_counter() - sent))
        block.take_tokens()
        time.sleep(0.002)  # the kernel is idle again
    block.send(CommandKind.FINISH)
    for _ in launch:
        pass
    return writing, answering


def time_submit(llm: LLM, repeats: int) -> list[float]:
    """Microseconds from `LLM.submit` to the delivery."""
    delivered = threading.Event()
    times = []
    for _ in range(repeats):
        delivered.clear()
        began = time.perf_counter()
        llm.submit(PROMPT, ONE, lambda _: delivered.set())
        delivered.wait()
        times.append(1e6 * (time.perf_counter() - began))
        time.sleep(0.005)
    return times


def time_step(llm: LLM) -> float:
    """Microseconds between two tokens."""
    came = [time.perf_counter() for _ in llm.stream(PROMPT, SamplingParams(max_tokens=STEPS, ignore_eos=True))]
    return 1e6 * (came[-1] - came[7]) / (len(came) - 8)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a preset, as of `distmk generate`")
    parser.add_argument("--backend", default="auto", choices=BACKENDS)
    parser.add_argument("--idle", default="resident", choices=("resident", "exit"))
    parser.add_argument("--repeats", type=int, default=1000)
    arguments = parser.parse_args()
    with LLM(
        arguments.model,
        backend=arguments.backend,
        load_format="dummy",
        max_model_len=1024,
        idle_exit_s=None if arguments.idle == "resident" else 0.0,
        followed=True,
    ) as llm:
        if llm.rank:
            llm.follow()
        else:
            print(json.dumps(measure(llm, arguments)))
    return 0


def measure(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """The results to print."""
    meter = power_meter(llm.backend, 0)
    alone = arguments.idle == "resident" and llm.tensor_parallel_size == 1
    writing, answering = time_ring(llm, arguments.repeats) if alone else ([], [])
    return {
        "model": arguments.model,
        "backend": llm.backend,
        "idle": arguments.idle,
        "step_us": round(time_step(llm), 1),
        "submit_us": latency_summary(time_submit(llm, arguments.repeats), 1),
        "write_us": latency_summary(writing, 1) if writing else None,
        "answer_us": latency_summary(answering, 1) if answering else None,
        "idle_watts": meter.watts(lambda: time.sleep(IDLE_S)),
        "decoding_watts": meter.watts(lambda: [time_step(llm) for _ in range(3)]),
    }


if __name__ == "__main__":
    run_main(main)
