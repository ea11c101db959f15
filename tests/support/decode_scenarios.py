"""Scenarios of graph_job.py in which a small model decodes: tokens and memory do not depend on how it is launched."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from support.job import Job
from support.tiny_config import tiny_config

from distmk.backends.defaults import backend_choices
from distmk.backends.launch_spec import LaunchSpec
from distmk.backends.weight_upload import fill_weights
from distmk.lower import DecodeOptions, lower_programs
from distmk.models import build_model
from distmk.program.program import Program, decode_args
from distmk.tasks import Put
from distmk.trace import Trace, report
from distmk.trace.summary import messages
from distmk.weights import open_checkpoint
from distmk.weights.dummy import DummyCheckpoint

Decoded = tuple[list[tuple[int, int, int]], dict[str, Any]]
SPEC = LaunchSpec(tuple((i, 3 * i) * (2 * i + 1) for i in range(7)), (5, 9, 2, 30, 8, 1, 12), ignore_eos=True)


def decode(job: Job, attention_launch: str, launch_iterations: int = 0) -> Decoded:
    """(request, token, iteration) of every token and the content of every buffer after a launch of a small model.

    The launch is cut every `launch_iterations` iterations; 0: never.
    """
    os.environ["DISTMK_LAUNCH_ITERATIONS"] = str(launch_iterations)
    options = DecodeOptions(
        job.num_ranks,
        job.workers,
        job.options.get("schedulers"),
        max_seqs=4,
        max_model_len=64,
        page_size=4,
        min_kv_split_len=4,
        attention_launch=attention_launch,  # type: ignore[arg-type]
    )
    with job.session(lower_programs(build_model(tiny_config()), options)[0]) as session:
        fill_weights(session.program, session.backend, job.rank, DummyCheckpoint(tiny_config(), None, 5))
        running = session.launch(SPEC)
        tokens = [(t.request, t.token, t.iteration) for batch in running for t in batch]
        assert running.iterations > 10
        params = running._launch._params  # type: ignore[attr-defined]
        assert params.scheduler_threads == job.options.get("threads", False)
        assert params.first_iteration == (
            running.iterations // launch_iterations * launch_iterations if launch_iterations else 0
        )
        job.bootstrap.barrier()
        return tokens, {b.name: session.view(b).copy() for b in session.program.placement.buffers}


def hosts(job: Job) -> None:
    """A checkpoint's greedy tokens, at several divisions of the ranks into hosts. Rank 0 writes the tokens of each to a file.

    All ranks hold the same bits of the residual stream, and the messages that a trace counts are as many as they should be.
    """
    checkpoint, made = open_checkpoint(job.options["model"]), {}
    prompts = tuple(map(tuple, job.options["prompts"]))
    spec = LaunchSpec(prompts, (job.options["max_new"],) * len(prompts), ignore_eos=True)
    for sizes in map(tuple, job.options["host_sizes"]):
        made_for = backend_choices(job.options.get("backend", "host"))
        options = DecodeOptions(job.num_ranks, job.workers, max_seqs=4, max_model_len=64, host_sizes=sizes, **made_for)
        with job.session(lower_programs(build_model(checkpoint.config), options)[0]) as session:
            fill_weights(session.program, session.backend, job.rank, checkpoint)
            running = session.launch(dataclasses.replace(spec, trace_capacity=session.room_for(4)))
            found: dict[int, list[int]] = {}
            for event in (event for events in running for event in events):
                found.setdefault(event.request, []).append(event.token)
            trace = running.trace(4)
            streams = job.bootstrap.allgather(session.view("x").tobytes())
            assert len(set(streams)) == 1 and np.frombuffer(streams[0], np.float32).any(), f"{sizes}: ranks differ"
            if trace is not None:
                made[str(sizes)] = [tokens for _, tokens in sorted(found.items())]
                assert_messages(trace, session.program, checkpoint.config.num_layers)
    if job.rank == 0:
        Path(job.options["out"]).write_text(json.dumps(made))


def assert_messages(trace: Trace, program: Program, num_layers: int) -> None:
    """Fail unless a trace counts one message for each all-reduce and pair of hosts, as many as there were puts to other hosts."""
    sizes = program.host_sizes
    pairs, others = len(sizes) * (len(sizes) - 1), sum(sizes[1:])
    want = {"embed.exchange": pairs, "o.exchange": num_layers * pairs, "down.exchange": num_layers * pairs}
    want |= {"sample": others, "send_logits": others, "scheduler_step": others}
    assert messages(trace) == want and f"messages between hosts, an iteration: {sum(want.values())} (" in report(trace)
    host_of = [part.header.host for part in program.ranks]
    crossing = {
        desc.order
        for part in program.ranks
        for desc in part.tasks
        if desc.type == Put.type_id and host_of[decode_args(desc).dst_rank] != host_of[part.header.rank]
    }
    ran = np.isin(trace.rows["order"], list(crossing)).sum() / len(np.unique(trace.on_workers()["iteration"]))
    assert ran == sum(count for op, count in want.items() if op.endswith("exchange")), ran


def assert_same_decode(job: Job, one: Decoded, other: Decoded) -> None:
    (tokens, memory), (again, others) = one, other
    assert tokens == again and len(tokens) == (sum(SPEC.max_new) if job.rank == 0 else 0), (tokens, again)
    for name, content in memory.items():
        differ = np.argwhere(content.view(np.uint8) != others[name].view(np.uint8))
        assert not len(differ), f"{name} on rank {job.rank}: {len(differ)} bytes differ, first at {differ[0].tolist()}"


def attention_launches(job: Job) -> None:
    """However attention comes to the workers, a model's tokens are the same, and every buffer holds the same bits; but for
    partial results, which are left zero where they may be taken as they arrive."""
    massive, spread = decode(job, "massive"), decode(job, "spread")
    assert massive[1].pop("attention_partials").any()
    # So small a model's matrices are one worker's: others know too little to take anything as it arrives.
    assert spread[1].pop("attention_partials").any() == (job.workers > 1)
    assert_same_decode(job, massive, spread)


def cut_launches(job: Job) -> None:
    """However many iterations a launch runs before another goes on, the same."""
    for attention_launch in ("massive", "spread"):
        whole = decode(job, attention_launch)
        for launch_iterations in (1, 3, 1000):
            assert_same_decode(job, whole, decode(job, attention_launch, launch_iterations))


def own_schedulers(job: Job) -> None:
    """Schedulers in threads of their own, and the same."""
    apart = decode(job, "massive")
    job.options |= {"threads": False, "schedulers": None}
    assert_same_decode(job, apart, decode(job, "massive"))
