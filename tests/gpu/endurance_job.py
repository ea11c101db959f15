"""What every rank of test_endurance.py runs: many generate calls in a row, then one that goes on for long.

    python tests/gpu/endurance_job.py BACKEND CONFIG CALLS TOKENS

Rank 0 prints a JSON object: calls (the number that gave the first call's tokens), differing (number and tokens of the first
that did not, or null), tokens (generated in the long call), same (whether a second long call gave the same), calls_s and long_s
(seconds of either part), memory_mb (of this process, after the first tenth of the calls and after the last).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from support import jobs

import distmk

SHORT = [[1, 2, 3], list(range(5, 30)), [7] * 17, [250, 4]]
MAX_SEQS = 4


def memory_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmRSS"))


def tokens_of(llm: distmk.LLM, prompts: list[list[int]], num: int) -> list[list[int]]:
    outputs = llm.generate(prompts, distmk.SamplingParams(max_tokens=num, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


def many_calls(llm: distmk.LLM, num_calls: int) -> dict[str, Any]:
    first = tokens_of(llm, SHORT, 8)
    same, differing, memory, started = 1, None, [0.0, 0.0], time.perf_counter()
    for number in range(1, num_calls):
        found = tokens_of(llm, SHORT, 8)
        same += found == first
        if found != first and differing is None:
            differing = {"call": number, "tokens": found, "first": first}
        if number == num_calls // 10:
            memory[0] = memory_mb()
    memory[1] = memory_mb()
    seconds = time.perf_counter() - started
    return {"calls": same, "differing": differing, "calls_s": seconds, "memory_mb": memory}


def one_long_call(llm: distmk.LLM, num_tokens: int) -> dict[str, Any]:
    started = time.perf_counter()
    first = tokens_of(llm, [[1, 2, 3]], num_tokens)
    seconds = time.perf_counter() - started
    again = tokens_of(llm, [[1, 2, 3]], num_tokens)
    return {"tokens": sum(map(len, first)), "same": first == again, "long_s": seconds}


def main() -> None:
    backend, config, num_calls, num_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    workers = 1 if backend == "host" else None
    options: dict[str, Any] = {
        "load_format": "dummy",
        "max_model_len": num_tokens + 64,
        "max_num_seqs": MAX_SEQS,
        "enable_prefix_caching": False,  # so that all calls have the same iterations, and round alike
    }
    with distmk.LLM(config, backend=backend, num_workers=workers, **options) as llm:
        found = many_calls(llm, num_calls) | one_long_call(llm, num_tokens)
        if llm.rank == 0:
            print(json.dumps(found))


if __name__ == "__main__":
    jobs.run(main)
