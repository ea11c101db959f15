"""Traces of launches on the host twin: they are complete, and no task starts before its producers."""

from __future__ import annotations

import collections
import gzip
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.graph_runs import assert_done, run_job
from support.helpers import Finished, Runner, alone, under_mpirun, with_ranks

from distmk.abi import LaunchKind
from distmk.backends.defaults import backend_choices
from distmk.lower import DecodeOptions, lower_programs
from distmk.models import build_model
from distmk.program.program import Program, compile_graph
from distmk.tasks import TASK_TYPES
from distmk.weights import open_checkpoint

pytestmark = pytest.mark.timeout(120)

KEPT = 5
PROMPTS = ("--prompt-ids", "1,2,3", "4,5,6,7,8", "--max-new-tokens", "9", "--ignore-eos")
NUM_ITERATIONS = 9  # the prompts fit into the first, which ends with the first tokens
Event = dict[str, Any]


@pytest.mark.drawn(3)
@pytest.mark.whole
@pytest.mark.parametrize("threads", [False, True], ids=["riding", "threads"])
@pytest.mark.parametrize(
    ("ranks", "workers", "schedulers", "iterations"), [(1, 1, 1, 20), (2, 3, 2, 40), (3, 1, 1, KEPT)]
)
def test_graph(tmp_path: Path, ranks: int, workers: int, schedulers: int, iterations: int, threads: bool) -> None:
    sizes = {"workers": workers, "schedulers": schedulers, "iterations": iterations, "instances": 7}
    assert_done(run_job(tmp_path, "traced", ranks, kept=KEPT, threads=threads, **sizes))


def generate(model: Path, runner: Runner, launcher: Any, name: str, *more: str) -> tuple[Finished, dict[str, Any]]:
    """The output of a generate, and its trace."""
    path = runner.folder / name
    arguments = ("generate", "--model", str(model), "--workers", "2", "--trace", str(path), *PROMPTS, *more)
    finished = runner.distmk(*arguments, launcher=launcher)
    assert finished.status == 0, finished.stderr
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return finished, json.loads(text)


def program_of(model: Path, num_ranks: int) -> Program:
    config = open_checkpoint(str(model)).config
    options = DecodeOptions(num_ranks, 2, max_model_len=config.max_position, **backend_choices("host"))
    return compile_graph(*lower_programs(build_model(config), options))


def slices(data: dict[str, Any], category: str) -> list[Event]:
    return [event for event in data["traceEvents"] if event["ph"] == "X" and event["cat"] == category]


def assert_complete(events: list[Event], program: Program, iterations: range) -> None:
    """Fail unless every task is there once an iteration and instance, on the worker whose queue has it."""
    found = collections.Counter(
        (e["pid"], e["args"]["order"], e["args"]["iteration"], e["args"]["instance"]) for e in events
    )
    assert set(found.values()) == {1}, [key for key, times in found.items() if times > 1][:5]
    place = {(e["pid"], e["args"]["order"]): (e["tid"], e["name"], e["args"]["launch"]) for e in events}
    num_instances = collections.Counter(key[:3] for key in found)
    for rank, part in enumerate(program.ranks):
        worker = {queue.begin + i: w for w, queue in enumerate(part.queues) for i in range(queue.count)}
        for index, desc in enumerate(part.tasks):
            if desc.launch == LaunchKind.SCHEDULER:
                continue
            tid, name, launch = place[rank, desc.order]
            assert (name, launch) == (part.task_names[index], LaunchKind(desc.launch).name.lower())
            assert tid == worker.get(index, tid), (rank, name)
            for iteration in iterations:
                there = num_instances[rank, desc.order, iteration]
                assert there == 1 if index in worker else there >= 1, (rank, name, iteration, there)
                assert (rank, desc.order, iteration, there - 1) in found, "instances are numbered through"
    tasks = {(rank, desc.order) for rank, part in enumerate(program.ranks) for desc in part.tasks}
    assert {key[2] for key in found} == set(iterations) and {key[:2] for key in found} <= tasks


def assert_in_order(events: list[Event], program: Program) -> None:
    """Fail if a task starts before its producers signaled: at the end of their bodies, or, where bodies signal themselves, after
    their start. Tasks that may idle are left out: with nothing to do they start before their waits are met.
    """
    by_task: dict[tuple[int, int, int], list[Event]] = collections.defaultdict(list)
    for event in events:
        by_task[event["pid"], event["args"]["order"], event["args"]["iteration"]].append(event)
    producers: dict[tuple[int, int], list[tuple[int, int, bool]]] = collections.defaultdict(list)
    for rank, part in enumerate(program.ranks):
        for desc in part.tasks:
            triggers = part.triggers[desc.trigger_begin : desc.trigger_begin + desc.num_triggers]
            pushes = any(trigger.rank != rank for trigger in triggers)
            for trigger in triggers:
                producers[trigger.rank, trigger.event].append((rank, desc.order, pushes))
    num_compared = 0
    for rank, part in enumerate(program.ranks):
        for desc in part.tasks:
            if TASK_TYPES[desc.type].may_idle:
                continue
            for wait in part.waits[desc.wait_begin : desc.wait_begin + desc.num_waits]:
                for source, order, pushes in producers[rank, wait.event]:
                    for iteration in {key[2] for key in by_task}:
                        after = by_task[rank, desc.order, iteration]
                        for before in by_task[source, order, iteration - wait.lag]:
                            sent = before["ts"]
                            if not pushes:
                                sent += before["dur"] - before["args"]["finish_us"]
                            first = min((e["ts"] for e in after), default=np.inf)
                            text = f"{before['name']} on {source} -> {desc.order} on {rank}, iteration {iteration}"
                            assert first >= sent - 1e-3, f"{text}: {first} < {sent}"
                            num_compared += 1
    assert num_compared > 100


@pytest.mark.parametrize(("num_ranks", "name"), [(1, "t.json.gz"), (2, "t.json")])
def test_generate(num_ranks: int, name: str, tiny_model: Path, runner: Runner) -> None:
    launcher = alone if num_ranks == 1 else with_ranks(num_ranks)
    finished, data = generate(tiny_model, runner, launcher, name, "--trace-iterations", str(KEPT))
    program, tasks = program_of(tiny_model, num_ranks), slices(data, "task")
    assert_complete(tasks, program, range(NUM_ITERATIONS - KEPT, NUM_ITERATIONS))
    prepared = [event for event in slices(data, "schedule") if event["name"] == "scheduler_step"]
    assert [event["args"]["iteration"] for event in prepared] == list(range(NUM_ITERATIONS - KEPT, NUM_ITERATIONS + 1))
    assert_in_order(tasks + prepared, program)
    for kind in ("task", "schedule", "wait"):
        events = slices(data, kind)
        assert events and all(event["dur"] >= 0 and event["ts"] >= 0 for event in events), kind
    assert min(event["ts"] for event in tasks + slices(data, "schedule")) == 0
    assert data["otherData"]["num_dropped"] > 0
    named = {(e["name"], e["pid"], e.get("tid")): e["args"].get("name") for e in data["traceEvents"] if e["ph"] == "M"}
    for rank in range(num_ranks):
        assert named["process_name", rank, None] == f"rank {rank}"
        assert [named["thread_name", rank, tid] for tid in range(4)] == [
            "worker 0",
            "worker 1",
            "scheduler 0",
            "scheduler 1",
        ]
        for tid in range(2):  # a worker does one thing at a time
            line = sorted(
                (e["ts"], e["dur"]) for e in tasks + slices(data, "wait") if (e["pid"], e["tid"]) == (rank, tid)
            )
            assert all(a + d <= b + 1e-3 for (a, d), (b, _) in itertools.pairwise(line)), (rank, tid)
    if num_ranks == 2:  # processes of one machine share a clock
        (offset,) = np.diff(data["otherData"]["offsets_ns"])
        assert abs(offset) <= data["otherData"]["uncertainty_ns"][1]
    assert_tables(finished.stderr, tasks)
    again = runner.distmk("trace", str(runner.folder / name))
    assert (again.status, again.stderr) == (0, "") and again.stdout in finished.stderr


def assert_tables(text: str, tasks: list[Event]) -> None:
    """Fail unless counts and times of the printed table are those of the file."""
    want: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for event in tasks:
        want[re.sub(r"layer\d+\.", "", event["name"]), event["args"]["type"]].append(event["dur"])
    lines = text[text.index("time on workers by operator") :].splitlines()[2 : 2 + len(want)]
    found = {(cells[0], cells[1]): cells[2:6] for cells in map(str.split, lines)}
    assert set(found) == set(want)
    for key, durations in want.items():
        count, total_ms, mean_us, p50_us = map(float, found[key])
        assert count == len(durations), key
        assert total_ms == pytest.approx(np.sum(durations) / 1000, abs=0.006), key
        assert mean_us == pytest.approx(np.mean(durations), abs=0.51), key  # whole from 1000 us on
        assert p50_us == pytest.approx(np.median(durations), abs=0.51), key


def test_under_mpirun(tiny_model: Path, runner: Runner) -> None:
    """Only rank 0 writes, and the completions are the same without a trace."""
    finished, data = generate(tiny_model, runner, under_mpirun(2), "t.json")
    assert_complete(slices(data, "task"), program_of(tiny_model, 2), range(NUM_ITERATIONS - 8, NUM_ITERATIONS))
    assert finished.stderr.count("time on workers by operator") == 1
    plain = runner.distmk("generate", "--model", str(tiny_model), *PROMPTS)
    assert plain.stdout == finished.stdout and "time on workers" not in plain.stderr


def test_messages_between_hosts(tiny_model: Path, runner: Runner) -> None:
    """The engine compiles for the hosts that it finds: as many messages for each all-reduce as there are pairs of hosts."""
    path = runner.folder / "t.json"
    command = ("generate", "--model", str(tiny_model), "--workers", "2", "--ranks", "3", "--trace", str(path), *PROMPTS)
    finished = runner.distmk(*command, env={"DISTMK_VIRTUAL_NODE_SIZE": "2"})
    assert finished.status == 0, finished.stderr
    (line,) = (line for line in finished.stderr.splitlines() if line.startswith("messages between hosts"))
    counts = dict(re.findall(r"([a-z_.]+) (\d+)", line.partition("(")[2]))
    assert counts == {
        "embed.exchange": "2",
        "o.exchange": "4",
        "down.exchange": "4",
        "sample": "1",
        "send_logits": "1",
        "scheduler_step": "1",
    }
    assert line.startswith("messages between hosts, an iteration: 13 (")
    plain = runner.distmk("generate", "--model", str(tiny_model), *PROMPTS)
    assert plain.stdout == finished.stdout and "messages between hosts" not in plain.stderr


def test_a_stream_that_is_left(tiny_model: Path, runner: Runner) -> None:
    """The next call, which may share its launch, has a trace of the last iterations."""
    script = f"""
from distmk import LLM, SamplingParams
with LLM({str(tiny_model)!r}, tensor_parallel_size=2, num_workers=1, trace_iterations=2) as llm:
    for _ in llm.stream([[1, 2, 3]], SamplingParams(max_tokens=100)):
        break
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    iterations = sorted(set(llm.trace.on_workers()["iteration"].tolist()))
    print(len(iterations), iterations[-1] - iterations[0])
"""
    finished = runner.run([sys.executable, "-c", script])
    assert (finished.status, finished.stdout) == (0, "2 1\n"), finished.stderr


def test_trace_of_no_trace(runner: Runner) -> None:
    (runner.folder / "x.json").write_text("{}")
    finished = runner.distmk("trace", "x.json")
    assert finished.status == 2 and finished.stderr.startswith("distmk: x.json is no trace that distmk wrote")
