#!/usr/bin/env python
"""Time of a decode step by sampling parameters, beside greedy decoding in the same process.

    python scripts/sample_time.py qwen3-8b

Prints a line for each batch size and set of parameters: milliseconds per token, as the median of --repeats streams of
200 tokens after prompts of 256. Greedy decoding comes first and last. Weights are random, since no value changes how
long a step takes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from distmk import LLM, SamplingParams
from distmk.backends.defaults import BACKENDS
from distmk.cli.exit_status import run_main

PROMPT_TOKENS, NEW_TOKENS, WARM_UP_TOKENS = 256, 200, 20
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8, "seed": 1},
    "top_k": {"temperature": 0.8, "top_k": 50, "seed": 1},
    "top_p": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    "top_p, min_p, penalty": {
        "temperature": 0.8,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "seed": 1,
    },
    "greedy again": {},
}


def time_step(llm: LLM, batch: int, parameters: dict[str, Any]) -> float:
    """Milliseconds per token."""
    prompts = [[(7 * index + i) % 1000 for i in range(PROMPT_TOKENS)] for index in range(batch)]
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, **parameters)
    came_s = [time.perf_counter() for output in llm.stream(prompts, params) if output.index == batch - 1]
    return 1e3 * (came_s[-1] - came_s[WARM_UP_TOKENS]) / (len(came_s) - WARM_UP_TOKENS - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a preset, as of `distmk generate`")
    parser.add_argument("--backend", default="auto", choices=BACKENDS)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with LLM(
        arguments.model,
        backend=arguments.backend,
        load_format="dummy",
        max_model_len=1024,
        enable_prefix_caching=False,
    ) as llm:
        for batch in arguments.batch:
            for name, parameters in CASES.items():
                median = statistics.median(time_step(llm, batch, parameters) for _ in range(arguments.repeats))
                print(f"batch {batch:2}  {name:24} {median:.4f} ms", flush=True)
    return 0


if __name__ == "__main__":
    run_main(main)
