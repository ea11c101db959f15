"""When masks are written for the launch, and what becomes of their errors, without a launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from support.fed_table import Fed

from distmk import SamplingParams
from distmk.abi import FinishReason, RowSample
from distmk.backends.token_masks import TokenMasks
from distmk.engine.request import Request
from distmk.engine.request_queue import SubmittedBatch
from distmk.engine.request_table import NO_TOKEN_LINE, RequestTable
from distmk.engine.token_output import TokenOutput
from distmk.errors import RankLostError

LENGTH, PREEMPTED = FinishReason.LENGTH, FinishReason.PREEMPTED


class Scripted:
    """A TokenConstraint that allows one token after another, and notes what it is asked."""

    def __init__(self, tokens: list[int], log: list[str]) -> None:
        self.tokens, self.log = tokens, log

    def fill_mask(self, words: np.ndarray) -> None:
        self.log.append(f"mask of {self.tokens[0]}")
        words[:] = 0
        words[self.tokens[0] // 32] = 1 << self.tokens[0] % 32

    def accept(self, token: int) -> None:
        assert token == self.tokens.pop(0)

    def copy(self) -> Scripted:
        return Scripted(list(self.tokens), self.log)


class Constrained(Fed):
    """A request table with masks, and the order in which constraints are asked and tokens delivered."""

    def __init__(self, num_requests: int = 1, vocab_size: int = 70) -> None:
        super().__init__(num_requests)
        self.block.masks = TokenMasks(num_requests, vocab_size)
        self.block.masks.address = 1 << 20
        launch: Any = SimpleNamespace(block=self.block, upload_request=self._sent)
        self.table = RequestTable(launch, 64, self.counters)
        self.log = list[str]()
        self.at_command = list[int]()  # stamps when requests are sent

    def _sent(self, entry: int) -> None:
        self.at_command.append(self.mask(entry)[0])

    def mask(self, entry: int = 0) -> tuple[int, list[int]]:
        """Position and allowed tokens, as the kernel reads them."""
        row = self.block.masks.memory[entry]
        bits = np.unpackbits(row[4:].view(np.uint8), bitorder="little")
        return int(row[:2].view(np.uint64)[0]), np.flatnonzero(bits).tolist()

    def constrained(self, prompt: list[int], tokens: list[int], **params: Any) -> Request:
        request = Request(prompt, SamplingParams(max_tokens=9, **params), constraint=Scripted(tokens, self.log))
        deliver = self.got.append

        def log(output: TokenOutput | BaseException) -> None:
            self.log.append(f"got {output.token_id}" if isinstance(output, TokenOutput) else "failed")
            deliver(output)

        self.table.add(SubmittedBatch([request], log))
        return request


def test_masks_are_one_token_ahead() -> None:
    """Written before anything is delivered, for the position of the next token, and not behind a token that ends a request."""
    fed = Constrained()
    fed.constrained([1, 2, 3], [69, 5, 6, 7], stop_token_ids=[6])
    entry = fed.block.requests[0]
    assert entry.sampling.mask == 1 << 20 and entry.sample == RowSample.DRAW and fed.at_command == [0]
    assert fed.mask() == (3, [69])
    fed.take(0, 69)
    assert fed.mask() == (4, [5])
    fed.take(0, -1, PREEMPTED)  # it is sent again with its token, and asked again
    assert fed.at_command == [0, 0] and fed.mask() == (4, [5])
    fed.take(1, 5)
    assert fed.mask() == (5, [6])
    fed.take(1, 6)
    assert fed.log == ["mask of 69", "mask of 5", "got 69", "mask of 5", "mask of 6", "got 5", "got 6"]
    fed.take(1, -1, FinishReason.ABORT)
    assert fed.table.is_empty


def test_a_mask_of_an_earlier_request_is_gone() -> None:
    """When the launch learns of the next request in its entry, the mask has no position. Without a constraint it is not read."""
    fed = Constrained()
    fed.constrained([1, 2, 3], [4, 5])
    fed.take(0, 4)
    fed.take(0, 5, LENGTH)
    fed.constrained([1, 2, 3, 4], [6])
    assert fed.at_command == [0, 0] and fed.mask() == (4, [6])
    fed.take(1, 6, LENGTH)
    fed.add([1, 2], 3, temperature=0.5)
    assert fed.block.requests[0].sampling.mask == 0 and fed.block.requests[0].sample == RowSample.DRAW


def test_one_without_an_allowed_token() -> None:
    """Ends with an error, which is no error of the engine."""
    fed = Constrained(2)
    request, other = fed.constrained([1, 2, 3], [4, 5]), fed.constrained([7, 8], [9, 9])
    fed.take(0, -3, FinishReason.ERROR)
    fed.take(1, 9)
    assert request.finish_reason == "error" and request.error == NO_TOKEN_LINE and other.finish_reason is None
    assert [(got.token_id, got.finish_reason, got.error) for got in fed.got if isinstance(got, TokenOutput)] == [
        (-1, "error", NO_TOKEN_LINE),
        (9, None, None),
    ]


def test_one_whose_launch_failed_goes_on() -> None:
    """In another launch, where its mask is that of the next token."""
    fed, again = Constrained(), Constrained()
    request = fed.constrained([1, 2, 3], [4, 5])
    fed.take(0, 4)
    fed.table.fail(RankLostError("rank 1 was lost"))
    again.table.add(SubmittedBatch([request], again.got.append))
    assert again.mask() == (4, [5])
    again.take(0, 5, LENGTH)
    assert request.token_ids == [4, 5] and request.finish_reason == "length"
