"""What test_callers.py runs in a process of its own: calls that Ctrl-C cuts off at random moments, and whole ones between."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from types import FrameType

from distmk import LLM, SamplingParams

PROMPTS = [[1, 2, 3], [4, 5]]


def interrupt(number: int, frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    """Arguments: the config, the number of ranks, of interrupted calls, and the seed. Prints what was cut off and what not."""
    config, num_ranks, num_calls, seed = sys.argv[1], *map(int, sys.argv[2:5])
    rng = random.Random(seed)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, interrupt)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    cut = 0
    with LLM(config, load_format="dummy", tensor_parallel_size=num_ranks, num_workers=1, max_model_len=64) as llm:

        def generate() -> list[list[int]]:
            return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]

        expected, usual_s = generate(), 0.0
        for call in range(num_calls):
            if call % 10 == 0:  # what else runs on the machine changes
                began = time.perf_counter()
                assert generate() == expected, call
                usual_s = time.perf_counter() - began
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, max(1e-6, rng.random() * 1.3 * usual_s))
                    found = generate()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                assert found == expected, (call, found, expected)
            except KeyboardInterrupt:
                cut += 1
        assert generate() == expected
    print(f"{cut} of {num_calls} calls were cut off", flush=True)


if __name__ == "__main__":
    main()
