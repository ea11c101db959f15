"""A request table without a launch: a test plays the launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from distmk import SamplingParams
from distmk.abi import Command, CommandKind, FinishReason
from distmk.backends.launch_block import LaunchBlock, Token
from distmk.backends.launch_spec import LaunchSpec
from distmk.engine.counters import Counters
from distmk.engine.prefix_cache import PrefixCache
from distmk.engine.request import Request
from distmk.engine.request_queue import SubmittedBatch
from distmk.engine.request_table import RequestTable
from distmk.engine.token_output import TokenOutput


class Fed:
    """A request table, the block that it writes to, and what it delivers."""

    def __init__(self, num_requests: int = 1, cache: PrefixCache | None = None) -> None:
        header: Any = SimpleNamespace(header=SimpleNamespace(num_workers=1, num_schedulers=1), tasks=[])
        self.block = LaunchBlock.of(LaunchSpec(num_requests=num_requests, max_prompt_len=64, max_pages=16), header)
        launch: Any = SimpleNamespace(block=self.block, upload_request=lambda entry: None)
        self.counters, self.got = Counters(), list[TokenOutput | BaseException]()
        self.table = RequestTable(launch, 64, self.counters, cache)

    def add(self, prompt: list[int], max_tokens: int, index: int = 0, **params: Any) -> Request:
        request = Request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params), index=index)
        self.table.add(SubmittedBatch([request], self.got.append))
        return request

    def take(self, number: int, token: int, finish: FinishReason = FinishReason.NONE) -> None:
        self.block.counts.commands_done = self.block.counts.commands
        self.table.take([Token(number, token, finish, 0)])

    def sent(self) -> list[tuple[CommandKind, int]]:
        """Kind and number of all commands so far."""
        commands: list[Command] = list(self.block.commands[: self.block.counts.commands])
        return [(CommandKind(command.kind), command.id) for command in commands]
