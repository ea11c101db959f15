"""`check` accepts what is right, and says what is wrong: against a slow oracle, on damaged and on random programs."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import random
from typing import Any

import graphs
import pytest
from mutate import Mutator
from mutate_spread import SpreadMutator, queue_lists, rebuild
from oracle import Oracle

from distmk.abi import NO_EVENT, JitRing, LaunchKind, TaskDesc, Trigger, Wait
from distmk.check import Verdict, check
from distmk.config import PRESETS, ModelConfig
from distmk.errors import CheckError, UsageError
from distmk.events import derive
from distmk.graph import Graph
from distmk.lower import DecodeOptions, lower
from distmk.model import build_model
from distmk.program import Program, compile_graph, decode_args
from distmk.tasks import Affine, Put, Sum

NUM_MUTATIONS = 400
NUM_RANDOM_GRAPHS = 300


def tiny(preset: str = "qwen3-0.6b", **sizes: int) -> ModelConfig:
    """A model of a preset's family with everything small."""
    small: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 1, "head_dim": 16}
    small |= {"num_heads": 4, "num_kv_heads": 2, "vocab_size": 128}
    return dataclasses.replace(PRESETS[preset], **small | sizes)


def model_graph(num_ranks: int, num_workers: int, config: ModelConfig | None = None) -> Graph:
    options = DecodeOptions(num_ranks=num_ranks, num_workers=num_workers, max_model_len=64, max_splits=2)
    return lower(build_model(config or tiny()), options)


def refusal(program: Program) -> str:
    with pytest.raises(CheckError) as caught:
        check(program)
    return str(caught.value)


def find(program: Program, name: str, rank: int = 0) -> TaskDesc:
    part = program.ranks[rank]
    found: TaskDesc = part.tasks[part.task_names.index(name)]
    return found


@pytest.mark.parametrize("shape", list(graphs.SHAPES))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_accepts_small_programs(shape: str, num_ranks: int) -> None:
    for num_workers in (1, 2, 3, 7):
        program = compile_graph(graphs.SHAPES[shape](num_ranks, num_workers))
        verdict = check(program)
        assert isinstance(verdict, Verdict)
        assert verdict.num_tasks == len({desc.order for part in program.ranks for desc in part.tasks})
        assert not Oracle(program).faults


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_accepts_models(num_ranks: int) -> None:
    for num_workers in (1, 2, 5, 16):
        check(compile_graph(model_graph(num_ranks, num_workers, tiny(num_layers=3, hidden_size=256))))
    check(compile_graph(model_graph(num_ranks, 4, PRESETS["smollm2-135m"])))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_oracle_accepts_models(num_ranks: int) -> None:
    assert not Oracle(compile_graph(model_graph(num_ranks, 2))).faults


def test_mutations() -> None:
    """Every damage that changes the meaning is refused, every harmless one accepted: the oracle says which is which."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    seen: collections.Counter[str] = collections.Counter()
    models = [model_graph(num_ranks, 2) for num_ranks in (1, 2)]
    while seen["drawn"] < NUM_MUTATIONS:
        draw, random_ = source.randrange(2**32), random.Random()
        random_.seed(draw)
        if random_.random() < 0.03:
            name, graph = "model", random_.choice(models)
        else:
            name = random_.choice(list(graphs.SHAPES))
            graph = graphs.SHAPES[name](random_.randint(1, 4), random_.randint(1, 4))
        program = compile_graph(graph)
        did = Mutator(program, random_).mutate()
        faults = Oracle(program).faults
        try:
            check(program)
            text = ""
        except CheckError as error:
            text = str(error)
        assert bool(text) == bool(faults), f"seed {seed} draw {draw} {name} {did}: oracle {faults}, check {text!r}"
        assert "the program cannot be read" not in text, f"seed {seed} draw {draw} {name} {did}: {text}"
        seen.update(["drawn", "caught" if faults else "harmless", *faults])
    print(dict(seen))
    assert seen["caught"] > NUM_MUTATIONS // 2 and seen["harmless"] > 0 and seen["race"] > 0


def test_random_graphs() -> None:
    """What events derives for random graphs is correct, by check and by the oracle."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    num_proved = 0
    for _ in range(NUM_RANDOM_GRAPHS):
        draw = source.randrange(2**32)
        graph = graphs.random_graph(random.Random(draw))
        try:
            program = compile_graph(graph)
        except UsageError as error:
            assert "read it in between" in str(error), f"draw {draw}"
            continue
        assert not Oracle(program).faults, f"seed {seed} draw {draw}"
        try:
            check(program)
        except CheckError as error:
            pytest.fail(f"seed {seed} draw {draw}: {error}")
        num_proved += 1
    assert num_proved > NUM_RANDOM_GRAPHS // 2


def test_random_bytes_are_refused_politely() -> None:
    """Whatever is in the arrays, check answers quickly with a CheckError (or accepts a change that means nothing)."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    for _ in range(300):
        program = compile_graph(graphs.handed_out(2, 2))
        part = source.choice(program.ranks)
        target = source.choice([part.header, part.tasks, part.waits, part.triggers, part.queues, part.launches])
        at = source.randrange(ctypes.sizeof(target))
        value = source.choice([0x00, 0x7F, 0xFF, source.randrange(256)])
        ctypes.memset(ctypes.addressof(target) + at, value, min(source.choice([1, 4, 8]), ctypes.sizeof(target) - at))
        try:
            check(program)
        except CheckError as error:
            assert "cannot be read:" not in str(error).splitlines()[0], f"seed {seed}: {error}"


def test_race_names_tasks_buffer_and_ranks() -> None:
    program = compile_graph(graphs.pipeline(2, 1))
    for part in program.ranks:
        for task in part.tasks:
            kept = [part.waits[task.wait_begin + i] for i in range(task.num_waits)]
            kept = [Wait.from_buffer_copy(wait) for wait in kept if not wait.lag]
            for i, wait in enumerate(kept):
                part.waits[task.wait_begin + i] = wait
            task.num_waits = len(kept)
    text = refusal(program)
    assert "race: pass0 (rank 0, worker 0) in the next iteration writes in1[bytes 0:64] on rank 1" in text
    assert "stage1 (rank 1, worker 0) in an iteration, which reads it" in text


def test_threshold_names_task_and_event() -> None:
    program = compile_graph(graphs.ring(2, 1))
    part = program.ranks[1]
    task = find(program, "scale", 1)
    part.waits[task.wait_begin].count = 2
    text = refusal(program)
    assert "threshold: scale (rank 1, worker 0) waits for 2 of event" in text
    assert "'send done' of rank 1, which is triggered 1 times" in text
    find(program, "send", 0).num_triggers = 0
    part.waits[task.wait_begin].count = 1
    assert "which nobody triggers" in refusal(program)


def test_cycle_names_tasks() -> None:
    program = compile_graph(graphs.ring(2, 1))
    find(program, "scale", 0)
    for part in program.ranks:
        for wait in part.waits:
            wait.lag = 0
    text = refusal(program)
    assert "cycle: " in text and " -> " in text
    for name in ("scale (rank 0, worker 0)", "send (rank 0, worker 0)", "scale (rank 1, worker 0)"):
        assert name in text


def test_launch_order_can_deadlock() -> None:
    """A scheduler that must hand out the second task first is stuck."""
    graph = Graph(1, 1)
    a = graph.buffer("a", 4)
    b = graph.buffer("b", 4)
    c = graph.buffer("c", 4)
    graph.add(Affine(0, "early", launch=LaunchKind.SINGLE, src=a.at(0), dst=b.at(0)))
    graph.add(Affine(0, "late", launch=LaunchKind.SINGLE, src=b.at(0), dst=c.at(0)))
    program = compile_graph(graph)
    check(program)
    launches = program.ranks[0].launches
    launches[0], launches[1] = launches[1], launches[0]
    text = refusal(program)
    assert "cycle: " in text and "hand out late (rank 0, handed out)" in text
    assert Oracle(program).faults == {"deadlock"}


def test_counting_names_both() -> None:
    """Two producers of one counter, one of which nothing holds back."""
    graph = Graph(1, 3)
    sources = [graph.buffer(f"s{i}", 4) for i in range(2)]
    both, out = graph.buffer("both", 8), graph.buffer("out", 8)
    for i, source in enumerate(sources):
        graph.add(Affine(0, f"part{i}", i, src=source.at(0), dst=both.at(0, 4 * i, 4 * i + 4)))
    graph.add(Affine(0, "whole", 2, src=both.at(0), dst=out.at(0)))
    program = compile_graph(graph)
    find(program, "part0").num_waits = 0
    text = refusal(program)
    assert "counting: part0 (rank 0, worker 0) may fire event" in text
    assert "before part1 (rank 0, worker 1) has for this one" in text
    assert "race: " in text


def test_bounds_names_task_and_buffer() -> None:
    program = compile_graph(graphs.ring(2, 1))
    args = decode_args(find(program, "send", 1))
    args.dst += 8
    assert "bounds: send (rank 1, worker 0): write of 1 x 64 bytes" in refusal(program)
    assert "is not inside buffer got (64 bytes" in refusal(program)
    args.dst -= 6
    assert "is not aligned" in refusal(program)
    args.dst -= 2
    args.dst_rank = 2**31
    assert "rank that is not there" in refusal(program)


def test_writes_to_weights_are_refused() -> None:
    program = compile_graph(graphs.push_reduce(2, 1))
    args = decode_args(find(program, "sum0"))
    args.dst, args.batch, args.num, args.dst_stride = decode_args(find(program, "push0")).weight, 0, 4, 4
    assert "which is read only" in refusal(program)


def test_overlap_names_both() -> None:
    program = compile_graph(graphs.ring(2, 1))
    placement = program.placement
    have, got = placement.pieces
    events = placement.events_heap_offset
    for moved, name in ((have.offset, "buffer have"), (0, "the control block"), (events, "the events")):
        pieces = (have, dataclasses.replace(got, offset=moved))
        program.placement = dataclasses.replace(placement, pieces=pieces)
        text = refusal(program)
        assert "overlap: " in text and name in text and "buffer got" in text and "memory of rank 0" in text


def test_headers_must_agree() -> None:
    program = compile_graph(graphs.ring(2, 1))
    program.ranks[1].header.rings_heap_offset += ctypes.sizeof(JitRing)
    assert "header: rank 1 has rings_heap_offset" in refusal(program)
    program = compile_graph(graphs.ring(2, 1))
    program.ranks[1].header.abi_hash ^= 1
    assert "header: rank 1 has another magic or ABI hash" in refusal(program)
    program.ranks.reverse()
    assert "rank 0 of 2 says it is rank 1 of 2" in refusal(program)


def test_queues_and_launches_hold_each_task_once() -> None:
    program = compile_graph(graphs.handed_out(1, 1))
    program.ranks[0].queues[0].count -= 1
    assert "queue: away (rank 0, handed out) is in 0 queues, expected 1" in refusal(program)
    program = compile_graph(graphs.handed_out(1, 1))
    launches = program.ranks[0].launches
    launches[0] = launches[1]
    assert "is in 2 launch lists, expected 1" in refusal(program)
    program = compile_graph(graphs.handed_out(1, 1))
    find(program, "first").type = 999
    assert "task: first (rank 0, worker 0) is of unknown type 999" in refusal(program)


def test_gate_is_opened_by_the_scheduler_task() -> None:
    program = compile_graph(model_graph(2, 2))
    program.ranks[1].header.gate_event = NO_EVENT
    assert "gate: rank 1 has no gate" in refusal(program)
    program = compile_graph(model_graph(2, 2))
    prepare = next(i for i, t in enumerate(program.ranks[0].tasks) if t.launch == LaunchKind.SCHEDULER)
    task = program.ranks[0].tasks[prepare]
    for i in range(task.num_triggers):
        trigger: Trigger = program.ranks[0].triggers[task.trigger_begin + i]
        trigger.amount = 2
    assert "gate: event" in refusal(program)


def test_schedulers_run_nothing_but_prepare() -> None:
    program = compile_graph(graphs.handed_out(1, 1))
    find(program, "single").launch = LaunchKind.SCHEDULER
    assert "task: single (rank 0, handed out) is run by a scheduler: only one task of rank 0" in refusal(program)


def copies(program: Program, name: str, rank: int = 0) -> list[TaskDesc]:
    """The descriptors of a spread task, by worker."""
    part = program.ranks[rank]
    return [desc for desc, its_name in zip(part.tasks, part.task_names, strict=True) if its_name == name]


def test_every_worker_has_a_share() -> None:
    """A missing copy, one too many, and one that is not like the others."""
    seen = set()
    for _ in range(40):
        program = compile_graph(graphs.spread(2, 3))
        damage = SpreadMutator(program, random.Random())
        for kind, text in (
            (damage.drop_copy, "0 times, expected once"),
            (damage.double_copy, "2 times, expected once"),
        ):
            program = damage.program = compile_graph(graphs.spread(2, 3))
            assert kind() and text in refusal(program)
        program = damage.program = compile_graph(graphs.spread(2, 3))
        did = damage.change_copy()
        if did:
            assert "spread: " in refusal(program), did
            seen.add(did.split()[1])
    assert seen == set("01234")
    program = compile_graph(graphs.spread(1, 3))
    copies(program, "again")[1].wait_begin += 1  # as many waits, but others
    assert "spread: again (rank 0, every worker) is not the same for all workers" in refusal(program)
    program = compile_graph(graphs.spread(1, 3))
    for copy in copies(program, "again"):
        copy.first_worker = 3
    assert "again (rank 0, every worker) begins at worker 3 of 3" in refusal(program)
    for copy in copies(program, "again"):
        copy.max_instances = 4
    assert "again (rank 0, every worker) has 4 instances for 3 workers, and its body runs one" in refusal(program)


def test_every_share_counts() -> None:
    """What waits for a spread task waits for all workers."""
    program = compile_graph(graphs.spread(1, 3))
    part = program.ranks[0]
    desc = find(program, "between")
    wait = next(w for w in part.waits[desc.wait_begin : desc.wait_begin + desc.num_waits] if not w.lag)
    assert wait.count == 3
    wait.count = 1
    assert "between (rank 0, worker 1) waits for 1 of event" in refusal(program)
    assert "which is triggered 3 times an iteration" in refusal(program)


def test_a_share_in_front_of_what_it_waits_for() -> None:
    """Worker 1 would wait for a task that it comes to only later."""
    program = compile_graph(graphs.spread(1, 2))
    part = program.ranks[0]
    lists = queue_lists(part)
    names = [[part.task_names[index] for index in queue] for queue in lists]
    assert names == [["first", "spread", "again", "away"], ["spread", "between", "again"]]
    lists[1][1], lists[1][2] = lists[1][2], lists[1][1]
    rebuild(part, lists)
    text = refusal(program)
    assert "cycle: " in text and "again (rank 0, worker 1) -> between (rank 0, worker 1)" in text
    assert Oracle(program).faults == {"deadlock"}


def test_spread_tasks_stay_on_their_rank() -> None:
    """No push may fire a trigger for a whole share, and no weights be streamed for it."""
    graph = graphs.ring(2, 2)
    x, y = graph.buffers
    with pytest.raises(UsageError, match="a spread task writes its own rank only"):
        graph.add(Put(0, "far", launch=LaunchKind.SPREAD, src=x.at(0), dst=x.at(1)))
    with pytest.raises(UsageError, match="is spread over all workers; give it no worker"):
        graph.add(Affine(0, "pinned", 1, LaunchKind.SPREAD, src=x.at(0), dst=x.at(0)))
    graphs.push_linear(graph, 0, x.at(0), y.at(0), "linear")
    with pytest.raises(UsageError, match="task linear streams weights, so it cannot be spread"):
        graph.add(dataclasses.replace(graph.tasks[-1], launch=LaunchKind.SPREAD, worker=None))
    for task in (graph.tasks[2], graph.tasks[-1]):
        object.__setattr__(task, "launch", LaunchKind.SPREAD)
    program = compile_graph(graph)
    assert "spread: linear (rank 0, every worker) streams weights" in refusal(program)
    for desc in copies(program, "linear"):
        desc.type = Affine.type_id
    assert "spread: send (rank 0, every worker) writes to other ranks" in refusal(program)


def test_absurd_values_cost_nothing() -> None:
    program = compile_graph(graphs.all_reduce(2, 1))
    decode_args(find(program, "sum0")).num_blocks = 2**32 - 1
    assert "arguments cannot be read (num_blocks is 4294967295)" in refusal(program)
    program = compile_graph(graphs.handed_out(1, 1))
    find(program, "massive").max_instances = 2**32 - 1
    assert "has 4294967295 instances" in refusal(program)


def relay(through: str) -> Graph:
    """Rank 0 pushes to everybody; rank 1 passes on what it got to rank 2, which adds up both."""
    graph = Graph(3, 1)
    x, y, z = graph.buffer("x", 4), graph.buffer("y", 4), graph.buffer("z", 8)
    if through == "push":
        graphs.push_linear(graph, 0, x.at(0), z.at(0, 0, 4), "spread")
    else:
        graph.add(Put(0, "spread", src=x.at(0), dst=z.at(1, 0, 4)))
    graph.add(Put(1, "relay", src=z.at(1, 0, 4), dst=z.at(2, 4, 8)))
    graph.add(Sum(2, "both", blocks=(z.at(2, 0, 4), z.at(2, 4, 8)), dst=y.at(2)))
    for rank in range(2):
        graph.add(Affine(rank, "use", src=z.at(rank, 0, 4), dst=y.at(rank)))
    return graph


def test_a_push_says_nothing_of_other_ranks() -> None:
    """A task that heard of a push on one rank cannot vouch for its arrival on another."""
    graph = relay("push")
    wiring = derive(graph)
    both = next(i for i, task in enumerate(graph.tasks) if task.op == "both")
    assert sorted(p for event, _ in wiring.waits[both] for p in event.producers) == [0, 1]
    program = compile_graph(graph)
    check(program)
    task = find(program, "both", 2)
    part = program.ranks[2]
    direct = [i for i in range(2) if "spread" in part.event_names[part.waits[task.wait_begin + i].event]]
    if direct == [0]:
        part.waits[task.wait_begin] = Wait.from_buffer_copy(part.waits[task.wait_begin + 1])
    task.num_waits = 1
    assert "race: both (rank 2, worker 0)" in refusal(program)
    assert "spread (rank 0, worker 0)" in refusal(program)
    assert Oracle(program).faults == {"race"}


def test_a_chain_on_one_worker_needs_no_waits() -> None:
    graph = Graph(1, 1)
    buffers = [graph.buffer(f"b{i}", 4) for i in range(5)]
    for i in range(4):
        graph.add(Affine(0, f"t{i}", src=buffers[i].at(0), dst=buffers[i + 1].at(0)))
    wiring = derive(graph)
    assert not any(wiring.waits) and not any(wiring.triggers) and not wiring.events[0]


def test_transitive_waits_are_pruned() -> None:
    """c needs a and b, but b already comes after a."""
    graph = Graph(1, 3)
    a, b, c, x = (graph.buffer(name, 8) for name in "abcx")
    graph.add(Affine(0, "a", 0, src=x.at(0), dst=a.at(0)))
    graph.add(Affine(0, "b", 1, src=a.at(0), dst=b.at(0)))
    graph.add(Affine(0, "c", 2, src=b.at(0), dst=c.at(0)))
    graph.add(Affine(0, "d", 2, src=a.at(0), dst=c.at(0)))
    wiring = derive(graph)
    assert [[(event.producers, lag) for event, lag in waits] for waits in wiring.waits] == [
        [((1, 3), 1)],  # all who read what it writes
        [((0,), 0)],  # not for c, which read b: a comes after d, and d after c
        [((1,), 0)],
        [],
    ]


def test_every_wait_is_needed() -> None:
    """Without any one of its waits a pipeline or a ring is refused."""
    for graph in (graphs.pipeline(3, 1), graphs.ring(3, 1)):
        total = len([wait for waits in derive(graph).waits for wait in waits])
        for nth in range(total):
            program = compile_graph(graph)
            tasks = [(part, task) for part in program.ranks for task in part.tasks for _ in range(task.num_waits)]
            part, task = tasks[nth]
            offset = nth - tasks.index((part, task))
            part.waits[task.wait_begin + offset] = Wait.from_buffer_copy(
                part.waits[task.wait_begin + task.num_waits - 1]
            )
            task.num_waits -= 1
            assert "race: " in refusal(program)
