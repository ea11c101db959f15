#!/usr/bin/env python
"""Time of a decode step of one model in several weight formats, taking turns, on the host twin.

    python scripts/format_time.py .models/SmolLM2-135M-Instruct.Q4_1.gguf     # as stored, and with matrices in bf16
    python scripts/format_time.py smollm2-135m --formats bf16 fp8 int4        # a preset has random weights

A format is what `quantization` of LLM takes; "stored" is None. Prints one JSON object: for each format the median over
--repeats launches of milliseconds a token, with the fastest and the slowest, and the ratio of the first format to it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from typing import Any

from distmk import LLM, SamplingParams
from distmk.cli.exit_status import run_main
from distmk.model.presets import PRESETS

PROMPT = [[7 * i + 3 for i in range(17)]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a model's folder or file, or a preset")
    parser.add_argument("--formats", nargs="+", default=["bf16", "stored"], metavar="NAME", help="default: bf16 stored")
    parser.add_argument("--workers", type=int, metavar="N", help="workers of the rank (default: one a core)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences at once (default 1)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens to time (default 64)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="times to time them (default 7)")
    return parser.parse_args()


def ms_per_token(llm: LLM, batch: int, num_tokens: int) -> float:
    """Of one launch, from the first token of all sequences to the last."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0)
    times_s: list[float] = []
    for output in llm.run(llm.make_requests(PROMPT * batch, params)):
        if output.index == batch - 1:
            times_s.append(time.perf_counter())
    return 1e3 * (times_s[-1] - times_s[0]) / (len(times_s) - 1)


def main() -> int:
    arguments = parse()
    options: dict[str, Any] = {"backend": "host", "max_model_len": 1024, "enable_prefix_caching": False}
    options |= {"num_workers": arguments.workers, "max_num_seqs": arguments.batch}
    if arguments.model in PRESETS:
        options |= {"load_format": "dummy"}
    found: dict[str, list[float]] = {name: [] for name in arguments.formats}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(LLM(arguments.model, quantization=None if name == "stored" else name, **options))
            for name in found
        }
        for llm in engines.values():
            ms_per_token(llm, arguments.batch, 8)
        for _ in range(arguments.repeats):
            for name, llm in engines.items():
                found[name].append(ms_per_token(llm, arguments.batch, arguments.tokens))
    first = statistics.median(next(iter(found.values())))
    result = {
        name: {
            "ms": round(statistics.median(times), 2),
            "min": round(min(times), 2),
            "max": round(max(times), 2),
            "ratio": round(first / statistics.median(times), 2),
        }
        for name, times in found.items()
    }
    print(json.dumps({"model": arguments.model, "batch": arguments.batch, "formats": result}))
    return 0


if __name__ == "__main__":
    run_main(main)
