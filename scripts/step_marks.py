#!/usr/bin/env python
"""Where a decode step spends its time within tasks: when each warp of each SM reached which place.

    python scripts/step_marks.py qwen3-8b                    # one GPU; compiles a kernel for it the first time
    mpirun -n 2 python scripts/step_marks.py qwen3-8b        # of rank 0
    python scripts/step_marks.py qwen3-8b --workers 0:16     # of some workers, such as those with attention

A trace (`scripts/step_time.py --trace`) says when tasks ran. This table says at which place they were; abi.Mark names
the places. It covers the last 64 tasks of each worker, about twelve layers. Recording takes time itself, so the step is
slower than without it.
"""

from __future__ import annotations

import argparse
import os

from benchmark.ours import serving, time_steps
from benchmark.work import add_quantization, add_work_arguments, work_of

from distmk.backends.defaults import choose_backend
from distmk.cli.exit_status import run_main
from distmk.errors import UsageError
from distmk.trace.marks import marked_tasks, marks_report, read_marks


def workers_of(text: str) -> slice:
    begin, _, end = text.partition(":")
    if not (begin.isdigit() or begin == "") or not (end.isdigit() or end == ""):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of workers; give one as FIRST:END")
    return slice(int(begin or 0), int(end) if end else None)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_work_arguments(parser)
    add_quantization(parser)
    parser.add_argument("--workers", type=workers_of, default=slice(None), metavar="FIRST:END", help="of these alone")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if choose_backend(arguments.backend) == "host":
        raise UsageError("the host twin has no warps; this is of a GPU's kernel")
    os.environ["DISTMK_NVCC_FLAGS"] = f"{os.environ.get('DISTMK_NVCC_FLAGS', '')} -DDISTMK_MARKS"
    work = work_of(arguments)
    with serving(work, arguments.backend) as llm:
        timed, session = time_steps(llm, work), llm.session
        if llm.rank == 0:
            words = read_marks(session.backend, llm.num_workers)
            tasks = marked_tasks(words, session.rank_program.task_names)
            wanted = range(*arguments.workers.indices(llm.num_workers))
            print(f"{arguments.model}: {min(timed.times_ms):.3f} ms a step")
            print(marks_report([task for task in tasks if task.worker in wanted]), end="")
    return 0


if __name__ == "__main__":
    run_main(main)
