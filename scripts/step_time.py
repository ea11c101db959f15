#!/usr/bin/env python
"""Time of a decode step inside one launch: a prompt of --context tokens, then --tokens more, with real feedback.

    python scripts/step_time.py qwen3-8b                        # one GPU, or the host twin
    mpirun -n 4 python scripts/step_time.py qwen3-8b --trace    # tensor parallel; and where the time of a step goes

Prints one JSON object: the median over --repeats launches of the time per token between the first and the last one.
Weights are random, since no value changes how long a step takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from distmk import LLM, SamplingParams
from distmk.errors import DistmkError
from distmk.trace import report


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a preset such as qwen3-8b, or a config.json")
    parser.add_argument("--backend", default="auto", choices=("auto", "host", "cuda"))
    parser.add_argument("--context", type=int, default=512, metavar="N", help="tokens of the prompt (default 512)")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="tokens to time (default 256)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences at once (default 1)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="launches (default 5)")
    parser.add_argument("--trace", action="store_true", help="also print where the time went (costs a little time)")
    return parser.parse_args()


def launch_ms(llm: LLM, arguments: argparse.Namespace) -> float:
    """Milliseconds a token of one launch on rank 0; other ranks take part and get nan."""
    vocab = 1000  # ids that every model has
    prompts = [
        [(7 * i + 3 + sequence) % vocab for i in range(arguments.context)] for sequence in range(arguments.batch)
    ]
    requests = llm.make_requests(prompts, SamplingParams(max_tokens=arguments.tokens + 1, ignore_eos=True))
    times = [time.perf_counter() for _ in llm.run(requests)]
    if not times:
        return float("nan")
    # All sequences are in step once the last prompt is through: count from their first common token.
    last = times[-(arguments.tokens // 2) * arguments.batch :]
    return 1e3 * (last[-1] - last[0]) / (len(last) - 1) * arguments.batch


def main() -> int:
    arguments = parse()
    with LLM(
        arguments.model,
        backend=arguments.backend,
        load_format="dummy",
        max_num_seqs=arguments.batch,
        max_model_len=arguments.context + arguments.tokens + 1,
        trace_iterations=8 if arguments.trace else 0,
    ) as llm:
        launch_ms(llm, arguments)  # the first one warms up
        steps = [launch_ms(llm, arguments) for _ in range(arguments.repeats)]
        if llm.rank == 0:
            result = {
                "model": arguments.model,
                "backend": llm.backend,
                "tensor_parallel": llm.tensor_parallel_size,
                "workers": llm.num_workers,
                "context": arguments.context,
                "batch": arguments.batch,
                "ms_per_step": round(statistics.median(steps), 4),
                "min": round(min(steps), 4),
                "max": round(max(steps), 4),
                "repeats": arguments.repeats,
            }
            print(json.dumps(result), flush=True)
            if llm.trace is not None:
                print(report(llm.trace))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DistmkError as error:
        print(f"step_time: {error}", file=sys.stderr)
        sys.exit(2)
