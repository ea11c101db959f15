"""All-reduces across hosts: their order of additions, their messages, and the proof of every program."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import pytest
from support.all_reduces import AllReduce
from support.programs import complaint
from support.tiny_config import tiny_config

from distmk.check import check
from distmk.errors import UsageError
from distmk.graph.graph import Graph
from distmk.graph.task import Task
from distmk.lower import DecodeOptions, lower_programs
from distmk.lower.plan import plan_work
from distmk.models import build_model
from distmk.program.messages import messages_by_op
from distmk.program.program import compile_graph
from distmk.tasks import Linear, Put, Sum

SIZES = [(1, 1), (2, 2), (1, 1, 1), (2, 1), (3, 2), (2, 2, 2)]
SIZES_OF_MODEL = {"num_heads": 6, "num_kv_heads": 1, "head_dim": 64, "hidden_size": 1152, "intermediate_size": 2048}
CONFIG = tiny_config(**SIZES_OF_MODEL, num_layers=3)
OPS = ["embed", "layer0.o", "layer0.down", "layer1.o", "layer1.down", "layer2.o", "layer2.down"]
Launch = Literal["massive", "spread"]


def options_of(host_sizes: tuple[int, ...], num_workers: int = 7, launch: Launch = "massive") -> DecodeOptions:
    ranks = sum(host_sizes)
    return DecodeOptions(ranks, num_workers, max_model_len=64, attention_launch=launch, host_sizes=host_sizes)


def graph_of(host_sizes: tuple[int, ...], num_workers: int = 7, launch: Launch = "massive") -> Graph:
    return lower_programs(build_model(CONFIG), options_of(host_sizes, num_workers, launch))[0]


def tasks_of(graph: Graph, op: str) -> list[Task]:
    """The tasks of a projection or embedding and of the all-reduce behind it."""
    return [task for task in graph.tasks if task.op == op or task.op.startswith(f"{op}.")]


@pytest.mark.parametrize("host_sizes", SIZES)
def test_all_ranks_add_up_in_the_order_of_the_hosts(host_sizes: tuple[int, ...], rng: np.random.Generator) -> None:
    graph = graph_of(host_sizes)
    for op in OPS:
        AllReduce(tasks_of(graph, op), rng).check(graph.hosts)


def test_one_host_adds_up_in_rank_order(rng: np.random.Generator) -> None:
    graph = graph_of((3,))
    AllReduce(tasks_of(graph, "layer1.o"), rng).check(graph.hosts)
    assert not [task for task in graph.tasks if isinstance(task, Put)]


def test_planted_mistakes_are_found(rng: np.random.Generator) -> None:
    """Host sums in another order on one leader, a partial sum left out, and each kind of put left out on one rank."""
    graph = graph_of((2, 2, 2))
    tasks = tasks_of(graph, "layer1.o")
    AllReduce(tasks, rng).check(graph.hosts)
    for op, change in (
        ("layer1.o.reduce_hosts", lambda task: dataclasses.replace(task, blocks=task.blocks[::-1])),
        ("layer1.o.reduce_host", lambda task: dataclasses.replace(task, blocks=task.blocks[:1])),
        ("layer1.o.broadcast", lambda task: None),
        ("layer1.o.exchange", lambda task: None),
        ("layer1.o.gather", lambda task: None),
    ):
        at = next(index for index, task in enumerate(tasks) if task.op == op)
        planted = [*tasks[:at], *filter(None, [change(tasks[at])]), *tasks[at + 1 :]]
        with pytest.raises(AssertionError, match="block of worker"):
            AllReduce(planted, rng).check(graph.hosts)


@pytest.mark.parametrize("launch", ["massive", "spread"])
@pytest.mark.parametrize("host_sizes", SIZES)
def test_programs_are_proved(host_sizes: tuple[int, ...], launch: Launch) -> None:
    """Every program, with few and many workers; with many, workers that are reserved for attention, and polled inputs."""
    for num_workers in (1, 7, 24):
        graph = graph_of(host_sizes, num_workers, launch)
        program = compile_graph(graph)
        check(program)
        assert program.host_sizes == host_sizes
    if launch == "spread":
        assert plan_work(build_model(CONFIG), options_of(host_sizes, num_workers, launch)).roles.num_reserved == 8
        assert any(task.polls_x for task in graph.tasks if isinstance(task, Linear))
    assert not any(task.polls_blocks for task in graph.tasks if isinstance(task, Sum))


def test_a_message_that_is_not_waited_for_is_refused() -> None:
    """The proof covers the messages between hosts: a sum of the hosts that does not wait for them races with them."""
    program = compile_graph(graph_of((2, 1)))
    part = program.ranks[2]
    part.tasks[part.task_names.index("layer1.o.reduce_hosts")].num_waits = 0
    assert "race" in complaint(program)


@pytest.mark.parametrize("host_sizes", SIZES)
def test_messages_between_hosts(host_sizes: tuple[int, ...]) -> None:
    """One for each all-reduce and ordered pair of hosts; of the scheduler step and of sampling, one for each rank that is not on
    rank 0's host. Nothing else crosses, not even a signal that says that a sum has been read.
    """
    pairs, others = len(host_sizes) * (len(host_sizes) - 1), sum(host_sizes[1:])
    want = {f"{op}.exchange": pairs for op in OPS}
    want |= {"scheduler_step": others, "sample": others, "send_logits": others}
    assert messages_by_op(compile_graph(graph_of(host_sizes))) == want


def test_leaders_rotate() -> None:
    """From one all-reduce to the next, over the ranks of a host."""
    graph = graph_of((3, 2))
    leaders = [{task.rank for task in graph.tasks if task.op == f"{op}.reduce_hosts"} for op in OPS]
    assert leaders == [{0, 3}, {1, 4}, {2, 3}, {0, 4}, {1, 3}, {2, 4}, {0, 3}]


@pytest.mark.parametrize("host_sizes", [(2, 3), (4,), (0, 4), (-1, 5), (4, 0)])
def test_sizes_that_do_not_fit_are_refused(host_sizes: tuple[int, ...]) -> None:
    for make in (DecodeOptions, Graph):
        with pytest.raises(UsageError, match="but there are 3 ranks; give the number of ranks of each host"):
            make(3, 1, host_sizes=host_sizes)


def test_one_size_is_one_host() -> None:
    """And of the same ranks, every other division into hosts makes another program."""
    without = lower_programs(build_model(CONFIG), dataclasses.replace(options_of((3,)), host_sizes=()))[0]
    assert compile_graph(graph_of((3,))).fingerprint() == compile_graph(without).fingerprint()
    prints = {compile_graph(graph_of(sizes)).fingerprint() for sizes in [(4,), (2, 2), (3, 1), (1, 3), (1, 1, 1, 1)]}
    assert len(prints) == 5


def test_wrong_hosts_in_headers_are_refused() -> None:
    for rank, host in ((0, 1), (2, 2), (3, 0)):
        program = compile_graph(graph_of((2, 2)))
        program.ranks[rank].header.host = host
        assert "the ranks are on hosts" in complaint(program)
