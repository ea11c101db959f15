"""What every rank of test_launches.py runs: generate calls, with a record of the kernels that the GPU ran for each.

    python tests/gpu/launches_job.py BACKEND

Rank 0 prints a JSON object a rank and call: rank, kernels (names, as CUPTI recorded them; null where it records nothing),
started (launches that the backend asked for), tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from support import jobs

import distmk

PROMPTS = [[1, 2, 3], list(range(5, 45)), [7] * 17]
CALLS = 3


def count_starts(backend: str, llm: distmk.LLM) -> list[int]:
    """A list that grows by an element with each launch."""
    starts: list[int] = []

    def counted(start: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            starts.append(1)
            return start(*arguments, **named)

        return wrapped

    if backend == "cuda":
        import cuda.core

        cuda.core.launch = counted(cuda.core.launch)
    else:
        library = llm.engine.session.backend._library  # type: ignore[attr-defined]
        library.distmk_start = counted(library.distmk_start)
    return starts


@contextmanager
def kernels(backend: str) -> Iterator[list[str] | None]:
    """Names of the kernels that run inside the block; complete after it."""
    if backend == "host":
        yield None
        return
    import torch
    from torch.profiler import ProfilerActivity, profile

    names: list[str] = []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield names
        torch.cuda.synchronize()
    for event in profiler.profiler.kineto_results.events():
        # Copies and memsets are recorded on the device too, under names of their own.
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.name().startswith(("Memcpy", "Memset")):
            names.append(event.name())


def main() -> None:
    backend = sys.argv[1]
    params = distmk.SamplingParams(max_tokens=12, ignore_eos=True)
    options: dict[str, Any] = {"load_format": "dummy", "max_model_len": 64, "backend": backend}
    if backend == "host":
        options["num_workers"] = 1
    with distmk.LLM("smollm2-135m", **options) as llm:
        starts = count_starts(backend, llm)
        llm.generate(PROMPTS, params)  # makes what the first call needs
        found = []
        for _ in range(CALLS):
            starts.clear()
            with kernels(backend) as names:
                outputs = llm.generate(PROMPTS, params)
            tokens = [output.outputs[0].token_ids for output in outputs]
            found.append({"rank": llm.rank, "kernels": names, "started": len(starts), "tokens": tokens})
        everyone = llm.bootstrap.allgather(json.dumps(found).encode())
        if llm.rank == 0:
            for part in everyone:
                for record in json.loads(part):
                    print(json.dumps(record))


if __name__ == "__main__":
    jobs.run(main)
