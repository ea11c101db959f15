"""A launch that stays: it is idle without a hang or a busy core, notices a lost rank, and holds while nobody reads tokens."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from distmk import LLM, SamplingParams
from distmk.abi import CommandKind
from distmk.backends import launch_block
from distmk.errors import RankLostError

pytestmark = pytest.mark.timeout(120)
FEW = SamplingParams(max_tokens=8, ignore_eos=True)


def resident(model: Path, num_ranks: int, **options: float) -> LLM:
    return LLM(
        str(model),
        tensor_parallel_size=num_ranks,
        num_workers=1,
        max_model_len=64,
        idle_exit_s=None,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_idle_is_no_hang(num_ranks: int, tiny_model: Path) -> None:
    """It answers behind several deadlines without a request, and no rank takes 2 % of a core meanwhile."""
    with resident(tiny_model, num_ranks, deadline_s=1.0) as llm:
        expected = llm.generate([[1, 2, 3]], FEW)[0].outputs[0].token_ids
        launch = llm.session._running
        time.sleep(2.5)
        ranks = ["self", *children()]
        before = [cpu_s(rank) for rank in ranks]
        time.sleep(1.5)
        used = max(cpu_s(rank) - earlier for rank, earlier in zip(ranks, before, strict=True))
        assert llm.generate([[1, 2, 3]], FEW)[0].outputs[0].token_ids == expected
        assert llm.session._running is launch and len(expected) == 8 and len(ranks) >= num_ranks
        assert used < 0.02 * 1.5 * (2 if os.environ.get("PYTEST_XDIST_WORKER") else 1), used


def test_idle_with_ranks_of_other_hosts(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 tells them over the network, too, that it waits for the host."""
    monkeypatch.setenv("DISTMK_VIRTUAL_NODE_SIZE", "1")
    with resident(tiny_model, 2, deadline_s=0.5) as llm:
        expected = llm.generate([[1, 2, 3]], FEW)[0].outputs[0].token_ids
        launch = llm.session._running
        time.sleep(1.2)
        assert llm.generate([[1, 2, 3]], FEW)[0].outputs[0].token_ids == expected
        assert llm.session._running is launch


def children() -> list[str]:
    """The processes that this one has started."""
    return [child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()]


def cpu_s(process: str) -> float:
    """Time of a processor that the threads of a process have used."""
    times = (task / "schedstat" for task in Path(f"/proc/{process}/task").iterdir())
    return sum(int(path.read_text().split()[0]) for path in times) / 1e9


def test_rank_killed_while_idle(tiny_model: Path) -> None:
    """It is named soon, before anything is asked, and to who asks then."""
    with resident(tiny_model, 2) as llm:
        llm.generate([[1, 2, 3]], FEW)
        for child in children():
            os.kill(int(child), signal.SIGKILL)
        until = time.monotonic() + 10
        with pytest.raises(RankLostError, match="rank 1"):
            while time.monotonic() < until:
                llm.stats()
                time.sleep(0.05)
        with pytest.raises(RankLostError, match="rank 1"):
            llm.generate([[1, 2, 3]], FEW)


def test_a_full_token_ring_holds_the_launch(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than the deadline; once the host reads, all tokens come, in order."""
    monkeypatch.setattr(launch_block, "MAX_KEPT_TOKENS", 3)
    with LLM(str(tiny_model), num_workers=1, max_model_len=64, deadline_s=0.5) as llm:
        expected = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=60, ignore_eos=True))[0].outputs[0].token_ids
        llm.peak_memory_bytes()  # a call between launches: the last one has ended
        launch = llm.engine.launch()
        block = launch.launch.block
        block.write_request(0, 7, [1, 2, 3], 60, True)
        block.send(CommandKind.ADD, 0, 7)
        time.sleep(1.0)
        assert not launch.launch.wait(0.0) and 0 < block.counts.tokens <= len(block.tokens) < 60
        assert block.counts.commands_done == 1  # also while nothing can be published
        block.send(CommandKind.FINISH)
        found = [token for tokens in launch for token in tokens]
        assert [token.token for token in found] == expected
        assert {token.request for token in found} == {7}


def test_cancelled_requests_free_their_slots(endless: Path) -> None:
    """One that runs, and one that waits for its slot: both end within an iteration of the command."""
    with LLM(str(endless), load_format="dummy", num_workers=1, max_model_len=2000, max_num_seqs=1) as llm:
        llm.peak_memory_bytes()  # a call between launches: the last one has ended
        launch = llm.engine.launch()
        block = launch.launch.block
        for number in (5, 6):
            block.write_request(number - 5, number, [1, 2, 3], 1500, True)
            block.send(CommandKind.ADD, number - 5, number)
        tokens = launch.poll(10.0)
        for number in (6, 5, 99):
            block.send(CommandKind.CANCEL, number=number)
        block.send(CommandKind.FINISH)
        assert tokens and not launch.is_over
        tokens += [token for batch in launch for token in batch]
        ends = [(token.request, token.token) for token in tokens if token.finish]
        assert ends == [(6, -1), (5, -1)] and len(tokens) < 1500
        assert len(llm.generate([[1, 2, 3]], FEW)[0].outputs[0].token_ids) == 8
