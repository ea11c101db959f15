"""Streams of tokens that are left early do not change later calls."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.helpers import Runner, under_mpirun

pytestmark = pytest.mark.timeout(120)

STREAMS = """
import sys
from distmk import LLM, SamplingParams

def main(model, ranks):
    options = dict(load_format="dummy", tensor_parallel_size=ranks or None, num_workers=1, max_model_len=30000)
    few, many = SamplingParams(max_tokens=6, ignore_eos=True), SamplingParams(max_tokens=20000, ignore_eos=True)
    outputs = []
    for _ in range(2):  # a second LLM after the first was closed
        with LLM(model, **options) as llm:
            def generate():
                return [list(o.outputs[0].token_ids) for o in llm.generate([[1, 2, 3], [4, 5]], few)]
            outputs.append(generate())
            for number, token in enumerate(llm.stream([1, 2, 3], many)):
                if number == 3:
                    break
            outputs.append(generate())
            for number, token in enumerate(llm.stream([1, 2, 3], few)):
                if number == 5:  # the last one: the launch is over, or nearly
                    break
            outputs.append(generate())
            held = llm.stream([1, 2, 3], many)  # never read to its end
            taken = next(held, None)
            held.close()
            llm.peak_memory_bytes()
            outputs.append(generate())
            assert list(held) == []
            held = llm.stream([1, 2, 3], many)
            taken = next(held, None)
        rank = llm.rank
    if rank == 0:
        assert [len(ids) for ids in outputs[0]] == [6, 6] and all(o == outputs[0] for o in outputs), outputs
    print("done", flush=True)

main(sys.argv[1], int(sys.argv[2]))
"""


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_streams_left_early(runner: Runner, endless: Path, num_ranks: int) -> None:
    done = runner.run([sys.executable, "-c", STREAMS, str(endless), str(num_ranks)])
    assert (done.status, done.stdout) == (0, "done\n"), done.stderr
    assert all(line.startswith("distmk: warning") for line in done.stderr.splitlines()), done.stderr


def test_streams_left_early_under_mpirun(runner: Runner, endless: Path) -> None:
    done = runner.run(under_mpirun(2)([sys.executable, "-c", STREAMS, str(endless), "0"]))
    assert done.status == 0 and sorted(done.stdout.split()) == ["done", "done"], done.stderr
