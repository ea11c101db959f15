"""The state that the endpoints of one server share."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator

from distmk.api.async_llm import AsyncLLM
from distmk.api.output_parsers import OutputParsers, choose_parsers
from distmk.errors import DistmkError
from distmk.server.config import ServerConfig
from distmk.server.errors import ApiError
from distmk.server.metrics import Metrics


class ServerState:
    """The engine, the number of sequences that it was given, and whether the server still takes requests."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        self.llm = llm
        self.config = config
        self.metrics = Metrics(config.served_model_name, llm.stats)
        self.created_s = int(time.time())
        self.draining = False
        self.engine_error: DistmkError | None = None
        self.num_sequences = 0

    @functools.cached_property
    def parsers(self) -> OutputParsers:
        """What takes answers of chats apart. Reads the model's chat template at its first use."""
        return choose_parsers(self.llm.chat_template, self.config.reasoning_parser, self.config.tool_call_parser)

    def engine_failed(self, error: DistmkError) -> None:
        """Note the error that ended the engine."""
        self.engine_error = self.engine_error or error

    def check_model(self, name: str | None) -> None:
        """ApiError: a request names another model."""
        served = self.config.model_names
        if name is not None and name not in served:
            names = " and ".join(map(repr, served))
            raise ApiError(
                404, f"the model {name[:200]!r} is not served here, only {names}", "model", "model_not_found"
            )

    def check_serving(self) -> None:
        """ApiError: the server takes no more requests."""
        if self.engine_error is not None:
            raise ApiError(503, f"the engine has ended: {self.engine_error}", code="engine_ended")
        if self.draining:
            raise ApiError(503, "the server is ending; it takes no more requests", headers={"connection": "close"})

    @property
    def max_sequences(self) -> int:
        """Sequences that may run and wait."""
        return self.llm.max_num_seqs + self.config.max_queue

    @contextlib.contextmanager
    def admit(self, model: str, count: int) -> Iterator[None]:
        """Room for `count` sequences of `model` for the length of the block.

        ApiError: the server does not have the model, or takes no more requests, or these are more than may ever run, or than may
        wait now.
        """
        self.check_serving()
        self.check_model(model)
        limit = self.max_sequences
        if count > limit:
            raise ApiError(400, f"prompts times n are {count} sequences; one request may have {limit}", "n")
        if self.num_sequences + count > limit:
            self.metrics.refused()
            message = f"{self.num_sequences} sequences run and wait, of {limit} at most; ask again later"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
        self.num_sequences += count
        try:
            yield
        finally:
            self.num_sequences -= count
