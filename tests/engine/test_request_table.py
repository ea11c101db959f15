"""What the host does with what a launch publishes, without a launch."""

from __future__ import annotations

import time

import numpy as np
import pytest
from support.fed_table import Fed

from distmk import SamplingParams
from distmk.abi import CommandKind, FinishReason, RowSample
from distmk.backends.launch_block import LOGPROBS, Token
from distmk.engine.counters import Counters, Pace
from distmk.engine.prefix_cache import PrefixCache
from distmk.engine.request import Request
from distmk.engine.request_queue import SubmittedBatch
from distmk.engine.token_output import TokenOutput
from distmk.errors import RankLostError, UsageError

NONE, LENGTH, PREEMPTED = FinishReason.NONE, FinishReason.LENGTH, FinishReason.PREEMPTED


def test_a_request_that_is_put_back_goes_on() -> None:
    """Before those that wait, with its tokens at the end of the prompt, and for the tokens that are left."""
    fed = Fed()
    first, second = fed.add([1, 2, 3], 5), fed.add([9], 1, index=1)
    fed.take(0, 11)
    fed.take(0, 12)
    fed.take(0, -1, PREEMPTED)
    assert fed.sent() == [(CommandKind.ADD, 0), (CommandKind.ADD, 1)] and fed.table.num_waiting == 1
    entry = fed.block.requests[0]
    assert (entry.prompt_len, entry.max_new, entry.num_output) == (5, 3, 2)
    assert fed.block.prompts[0, :5].tolist() == [1, 2, 3, 11, 12]
    fed.take(1, -1, PREEMPTED)  # at once again
    fed.take(2, 13)
    fed.take(2, 14)
    fed.take(2, 15, LENGTH)
    fed.take(3, 16, LENGTH)
    assert first.token_ids == [11, 12, 13, 14, 15] and first.finish_reason == "length" and second.token_ids == [16]
    assert [(got.index, got.token_id) for got in fed.got if isinstance(got, TokenOutput)] == [
        *((0, token) for token in (11, 12, 13, 14, 15)),
        (1, 16),
    ]
    assert fed.counters == Counters(0, 4, 6, 2, 0) and fed.table.is_empty


def test_a_request_is_served_by_one_call_at_a_time() -> None:
    """It may be submitted again once its launch has failed, and then goes on."""
    fed = Fed()
    request = fed.add([1, 2, 3], 5)
    fed.take(0, 11)
    with pytest.raises(UsageError, match="a request is being served already"):
        SubmittedBatch([request], fed.got.append)
    fed.table.fail(error := RankLostError("rank 1 was lost"))
    assert fed.got[1:] == [error] and request.token_ids == [11]
    again = Fed()
    again.table.add(SubmittedBatch([request], again.got.append))
    for token in (12, 13, 14):
        again.take(0, token)
    again.take(0, 15, LENGTH)
    assert request.token_ids == [11, 12, 13, 14, 15] and request.finish_reason == "length" and len(fed.got) == 2


def test_who_waits_and_since_when() -> None:
    """Requests behind those in the batch, in the launch's table and before it; one that is put back waits anew."""
    fed = Fed(4)
    for since_s in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        request = Request([9], params)
        batch = SubmittedBatch([request], fed.got.append)
        request.waiting_since_s = since_s
        fed.table.add(batch)
    assert fed.table.num_waiting == 2 and fed.table.waiting_since_s() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    fed.block.counts.num_running = 2
    assert fed.table.waiting_since_s() == [3.0, 4.0, 5.0, 6.0]
    fed.take(0, 11)
    assert fed.table.waiting_since_s() == [3.0, 4.0, 5.0, 6.0]
    fed.block.counts.num_running = 1
    before_s = time.monotonic()
    fed.take(1, -1, PREEMPTED)
    first, second, put_back, *others = fed.table.waiting_since_s()
    assert (first, second, others) == (3.0, 4.0, [5.0, 6.0]) and before_s <= put_back <= time.monotonic()


def test_a_cancelled_request_that_is_put_back_is_over() -> None:
    """The command to cancel it finds nothing."""
    fed = Fed()
    request = fed.add([1, 2, 3], 5)
    fed.take(0, 11)
    fed.table.cancel(request)
    fed.table.cancel(request)
    fed.take(0, -1, PREEMPTED)
    assert request.finish_reason == "abort" and fed.table.is_empty and len(fed.got) == 2
    assert fed.sent() == [(CommandKind.ADD, 0), (CommandKind.CANCEL, 0)]


def test_what_was_computed_is_cached() -> None:
    """The prompt with the first token, the rest at the end; nothing of a prompt that was not read to its end."""
    cache = PrefixCache(4)
    fed = Fed(cache=cache)
    fed.add(list(range(9)), 9)
    fed.block.pages[0, 1:5] = [(page, 1) for page in (7, 6, 5, 4)]
    fed.take(0, -1, PREEMPTED)
    assert len(cache) == 0
    fed.take(1, 9)
    assert len(cache) == 2
    for token in (10, 11):
        fed.take(1, token)
    fed.take(1, 12, PREEMPTED)  # its keys and values are not there
    assert len(cache) == 3 and fed.block.requests[0].num_prefix_pages == 3
    assert fed.block.prefixes[0, :3].tolist() == [(7, 1), (6, 1), (5, 1)]


def test_each_token_of_a_prompt_is_scored_once() -> None:
    """A request that is put back asks for the rest, computed anew from the start; once it has all, it takes what is cached."""
    fed, prompt = Fed(cache=PrefixCache(4)), list(range(9))
    fed.add(prompt, 1)
    fed.block.pages[0, 1:3] = [(7, 1), (6, 1)]
    fed.take(0, 9, LENGTH)
    request = fed.add(prompt, 2, prompt_logprobs=0)
    entry = fed.block.requests[0]
    assert (entry.num_scores, entry.num_prefix_pages, entry.sample) == (8, 0, RowSample.GREEDY)

    def score(number: int, tokens: list[int]) -> None:
        for token in tokens:
            record = np.zeros((), LOGPROBS)
            record["token"], record["rank"] = token, 1
            fed.table.take([Token(number, -1, NONE, 0, record)])

    score(1, prompt[1:4])
    fed.take(1, -1, PREEMPTED)
    assert (entry.num_scores, entry.num_prefix_pages) == (5, 0)
    score(2, prompt[4:])
    fed.take(2, 9)
    fed.take(2, -1, PREEMPTED)
    assert (entry.num_scores, entry.num_prefix_pages, entry.num_output) == (0, 2, 1)
    fed.take(3, 10, LENGTH)
    found = request.prompt_logprobs
    assert found is not None and [list(one or {}) for one in found] == [[], *([token] for token in prompt[1:])]


@pytest.mark.parametrize("end", ["token", "cancel", "put back"])
def test_requests_wait_for_the_prompt_that_they_share(end: str) -> None:
    """Until it was read or will not be. Others pass them by, also those that score the prompt, or whose prompt fills no page."""
    fed, prompt = Fed(8, PrefixCache(4)), list(range(9))
    first = fed.add(prompt, 2)
    fed.add(prompt, 2)
    fed.add([*prompt, 70, 71], 2)
    fed.add(prompt, 2, prompt_logprobs=0)
    for _ in range(2):
        fed.add([1, 2], 2)
    assert len(fed.sent()) == 4 and fed.table.num_waiting == 2
    fed.block.pages[:, 1:3] = [(7, 1), (6, 1)]
    if end == "token":
        fed.take(0, 9)
        assert fed.table.num_waiting == 0
        assert [fed.block.requests[entry].num_prefix_pages for entry in range(8)].count(2) == 2
        return
    if end == "cancel":
        fed.table.cancel(first)
        fed.take(0, -1, FinishReason.ABORT)
    else:  # it is sent again, as the first to read the prompt
        fed.take(0, -1, PREEMPTED)
    assert fed.table.num_waiting == (1 if end == "cancel" else 2)
    fed.take(4, 9)
    assert fed.table.num_waiting == 0


@pytest.mark.parametrize(
    ("reading", "prompt", "waits"),
    [
        ([*range(8), 90, 91], [*range(8), 80], True),
        (list(range(8)), list(range(16)), True),  # half of the prompt
        (list(range(8)), list(range(17)), False),
        (list(range(16)), [*range(8), 80], True),  # half of what the other reads
        (list(range(17)), [*range(8), 80], False),
        (list(range(8)), [0, *range(8)], False),
        (list(range(8)), [*range(4), 80], True),
        (list(range(8)), list(range(4)), False),  # its last token must be computed
    ],
)
def test_what_is_worth_waiting_for(reading: list[int], prompt: list[int], waits: bool) -> None:
    fed = Fed(2, PrefixCache(4))
    fed.add(reading, 2)
    fed.add(prompt, 2)
    assert fed.table.num_waiting == waits


def test_a_prompt_that_is_scored_is_not_waited_for() -> None:
    """An iteration samples, and scores, few tokens."""
    fed = Fed(2, PrefixCache(4))
    fed.add(list(range(9)), 2, prompt_logprobs=0)
    fed.add(list(range(9)), 2)
    assert fed.table.num_waiting == 0


def test_what_is_cached_is_not_waited_for() -> None:
    """Of prompts that share a cached page only what is left to read counts."""
    fed, shared = Fed(8, PrefixCache(4)), list(range(8))
    fed.add(shared, 2)
    fed.block.pages[:, 1:3] = [(7, 1), (6, 1)]
    fed.take(0, 9)
    for prompt in ([*shared, 50, 51], [*shared, 60, 61], [*shared, 60, 61]):  # less than a page of their own
        fed.add(prompt, 2)
    assert fed.table.num_waiting == 0
    fed.add([*shared, *range(50, 59)], 2)
    fed.add([*shared, *range(50, 58), 90], 2)
    fed.add([*shared, *range(50, 54), *range(90, 95)], 2)  # shares 4 of the 9 that either reads
    assert fed.table.num_waiting == 1


def test_pace() -> None:
    """The mean over about a second; a rest does not count."""
    pace = Pace()
    for second, iterations in ((0.0, 0), (0.5, 50), (1.0, 100), (1.5, 300), (2.0, 500)):
        pace.note(second, iterations)
    assert pace.iteration_ms == pytest.approx(2.5)
    pace.rest()
    pace.note(100.0, 501)
    assert pace.iteration_ms == pytest.approx(2.5)
    pace.note(100.1, 601)
    assert pace.iteration_ms == pytest.approx(1.0)
