"""An LLM that is closed, dropped, left open at exit, or forked: nothing of it is left, and nothing of others is touched."""

from __future__ import annotations

import gc
import os
import re
import sys
from pathlib import Path

import pytest
from support.helpers import Runner, abandoned_segments

from distmk import LLM, SamplingParams
from distmk.errors import UsageError

pytestmark = pytest.mark.timeout(120)

FEW = SamplingParams(max_tokens=3, ignore_eos=True)


def resources() -> dict[str, object]:
    """What this process holds: children, descriptors, shared memory."""
    gc.collect()
    children = [
        child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()
    ]
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]
    descriptors = len(os.listdir("/proc/self/fd"))
    return {"children": children, "descriptors": descriptors, "maps": maps, "segments": abandoned_segments()}


def use_and_drop(model: Path, num_ranks: int, how: int) -> None:
    llm = LLM(str(model), tensor_parallel_size=num_ranks, num_workers=1, max_model_len=64)
    assert len(llm.generate([1, 2, 3], FEW)[0].outputs[0].token_ids) == 3
    if how % 3 == 1:
        stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
        next(stream)
    if how % 3 == 2:
        llm.itself = llm  # type: ignore[attr-defined]  # for the garbage collector to find


@pytest.mark.drawn(1)
@pytest.mark.whole
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_dropped(num_ranks: int, tiny_model: Path) -> None:
    use_and_drop(tiny_model, num_ranks, 0)
    before = resources()
    for round_number in range(1, 5):
        use_and_drop(tiny_model, num_ranks, round_number)
        assert resources() == before, f"round {round_number}"


AT_EXIT = """
import sys
from distmk import LLM, SamplingParams
llm = LLM(sys.argv[1], load_format="dummy", tensor_parallel_size=int(sys.argv[2]), num_workers=1, max_model_len=30000)
stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=6000, ignore_eos=True))
print(next(stream).index)
"""


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_open_at_exit(num_ranks: int, endless: Path, runner: Runner) -> None:
    done = runner.run([sys.executable, "-c", AT_EXIT, str(endless), str(num_ranks)])
    assert (done.status, done.stdout, done.stderr) == (0, "0\n", "")


@pytest.mark.whole
def test_constructor_that_fails(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the engine is made, and after."""

    def fail(*_: object, **__: object) -> None:
        raise UsageError("of the tokenizer")

    monkeypatch.setattr("distmk.api.llm_engine.load_input_processor", fail)
    before = resources()
    for model, text in (tiny_model / "nowhere", "nowhere: no such"), (tiny_model, "of the tokenizer"):
        for num_ranks in (1, 2, 2):
            with pytest.raises(UsageError, match=text):
                LLM(str(model), tensor_parallel_size=num_ranks, num_workers=1, max_model_len=64)
            assert resources() == before


def test_calls_after_close(tiny_model: Path) -> None:
    for num_ranks in (1, 2):
        with LLM(str(tiny_model), tensor_parallel_size=num_ranks, num_workers=1, max_model_len=64) as llm:
            requests = llm.make_requests([1, 2, 3], FEW)
        llm.close()  # a second time
        with pytest.raises(UsageError, match="this LLM is closed; make a new one"):
            next(llm.run(requests))
        for call in (
            lambda: llm.generate([1, 2, 3]),
            lambda: next(llm.stream([1, 2, 3])),
            lambda: llm.compute_logits([1, 2, 3]),
            llm.peak_memory_bytes,
        ):
            with pytest.raises(UsageError, match="this LLM is closed; make a new one"):
                call()


FORKED = """
import gc, os, sys
from distmk import LLM, SamplingParams
from distmk.errors import UsageError

few, many = SamplingParams(max_tokens=5, ignore_eos=True), SamplingParams(max_tokens=600, ignore_eos=True)

def in_child(work):
    child = os.fork()
    if child == 0:
        work()
        sys.exit(0)  # runs what is registered for the exit
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def use():
    for call in (lambda: llm.generate([1, 2, 3], few), lambda: next(llm.stream([1, 2, 3])), llm.peak_memory_bytes):
        try:
            call()
        except UsageError as error:
            assert str(error).startswith(f"this LLM belongs to process {os.getppid()}, from which this one was forked; ")
        else:
            raise AssertionError

def drop():
    del globals()["llm"]
    gc.collect()

def go_on():
    try:
        list(stream)
    except UsageError as error:
        assert "from which this one was forked" in str(error)
    else:
        raise AssertionError

def leave():
    with llm:
        pass

llm = LLM(sys.argv[1], load_format="dummy", tensor_parallel_size=int(sys.argv[2]), num_workers=1, max_model_len=3000)
before = llm.generate([1, 2, 3], few)[0].outputs[0].token_ids
for work in (use, lambda: llm.close(), lambda: llm.session.close(), drop, go_on, leave, lambda: None):
    stream = llm.stream([1, 2, 3], many)
    first = next(stream)
    in_child(work)
    assert len(list(stream)) == 599
    assert llm.generate([1, 2, 3], few)[0].outputs[0].token_ids == before
print("done")
"""


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_forked_child(num_ranks: int, endless: Path, runner: Runner) -> None:
    """Whatever a child does with its parent's LLM, the parent's stream goes on, and so do its ranks."""
    done = runner.run([sys.executable, "-c", FORKED, str(endless), str(num_ranks)])
    lines = [line for line in done.stderr.splitlines() if not re.match("distmk: warning", line)]
    assert (done.status, done.stdout, lines) == (0, "done\n", [])
