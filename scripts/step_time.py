#!/usr/bin/env python
"""Time of a decode step inside one launch: a prompt of --context tokens, then --tokens more, with real feedback.

    python scripts/step_time.py qwen3-8b                        # one GPU, or the host twin
    mpirun -n 4 python scripts/step_time.py qwen3-8b --trace    # tensor parallel; and where the time of a step goes
    python scripts/step_time.py qwen3-8b --quantization int4    # weights of linear layers in four bits, or fp8

--power adds the mean power of rank 0's board: while it is idle with everything loaded, and while it reads prompts and
decodes. It needs `pip install nvidia-ml-py`.

Prints one JSON object: the median over --repeats launches of the time per token, as `scripts/bench.py step` measures
it. Weights are random, since no value changes how long a step takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from benchmark.machine import power_meter
from benchmark.ours import Timed, serving, time_steps
from benchmark.work import Work, add_quantization, add_work_arguments, work_of

from distmk import LLM
from distmk.cli.exit_status import run_main
from distmk.trace import report

IDLE_S = 2.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_work_arguments(parser)
    add_quantization(parser)
    parser.add_argument("--trace", action="store_true", help="also print where the time went (costs a little time)")
    parser.add_argument("--power", action="store_true", help="also measure the board's power (takes two seconds more)")
    return parser.parse_args()


def time_with_power(llm: LLM, work: Work) -> tuple[Timed, dict[str, float | None]]:
    """`time_steps`, and the board's mean power in watts; None if it cannot be measured."""
    meter = power_meter(llm.backend, 0)
    timed: list[Timed] = []
    idle = meter.watts(lambda: time.sleep(IDLE_S))
    decoding = meter.watts(lambda: timed.append(time_steps(llm, work)))
    return timed[0], {"idle_watts": idle, "watts": decoding}


def main() -> int:
    arguments = parse()
    work = work_of(arguments)
    with serving(work, arguments.backend, trace_iterations=8 if arguments.trace else 0) as llm:
        powered = arguments.power and llm.rank == 0
        timed, power = time_with_power(llm, work) if powered else (time_steps(llm, work), {})
        times_ms = timed.times_ms
        if llm.rank == 0:
            result = {
                "model": arguments.model,
                "layers": work.config.num_layers,
                "quantization": work.quantization,
                "backend": llm.backend,
                "tensor_parallel": llm.tensor_parallel_size,
                "workers": llm.num_workers,
                "context": work.context,
                "tokens": work.tokens,
                "batch": work.batch,
                "ms_per_step": round(statistics.median(times_ms), 4),
                "min": round(min(times_ms), 4),
                "max": round(max(times_ms), 4),
                "repeats": work.repeats,
            }
            print(json.dumps(result | power), flush=True)
            if llm.trace is not None:
                print(report(llm.trace))
    return 0


if __name__ == "__main__":
    run_main(main)
