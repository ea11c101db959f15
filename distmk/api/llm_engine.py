"""An engine and its callers: prompts become requests, and requests are served in step with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any, TypeVar

from distmk.api.input_processor import InputProcessor, load_input_processor
from distmk.api.prompts import Prompt, either_params
from distmk.bootstrap import agree, connect
from distmk.engine.commands import command, follow
from distmk.engine.engine import Engine, EngineArgs
from distmk.engine.engine_client import Deliver
from distmk.engine.engine_thread import EngineThread, IdlePolicy
from distmk.engine.lifecycle import Lifecycle
from distmk.engine.own_model import OwnModel, in_files
from distmk.engine.request import Request
from distmk.engine.request_queue import SubmittedBatch
from distmk.engine.sampling_params import SamplingParams, TokenOutput
from distmk.engine.stats import EngineStats
from distmk.errors import UsageError
from distmk.interrupts import deferred

T = TypeVar("T")


class LLMEngine:
    """This rank's engine and, on rank 0, the driver that runs its launches; see `LLM`, which users call.

    `make_args`: the engine's arguments; its UsageError is raised on every rank.
    """

    def __init__(
        self,
        make_args: Callable[[], EngineArgs],
        tensor_parallel_size: int | None,
        *,
        skip_tokenizer_init: bool,
        followed: bool,
        own: OwnModel | None = None,
    ) -> None:
        self.bootstrap = connect(tensor_parallel_size)
        # The other ranks wait for commands; worker processes of this one always do.
        self.leads = self.bootstrap.kind in ("single", "local") or followed
        self.closing = Lifecycle(self, self.bootstrap, self.leads)
        try:
            args = self._agree_if_called(make_args)
            self.closing.engine = self.engine = self._load(args, own)
            self.inputs = agree(self.bootstrap, lambda: self._load_inputs(skip_tokenizer_init))
            if self.bootstrap.rank == 0:
                self.closing.driver = EngineThread(self.engine, self.leads, IdlePolicy(args.idle_exit_s))
        except BaseException:
            self.closing.close(in_step=False)
            raise

    def _load(self, args: EngineArgs, own: OwnModel | None) -> Engine:
        """The engine. Worker processes are told to load the same."""
        if self.bootstrap.kind != "local":
            return Engine(args, self.bootstrap, own)
        with in_files(own) as stored:
            sent = stored.sent() if stored else None
            self.bootstrap.send_command(command("load", own_model=sent, **asdict(args)))
            agree(self.bootstrap, lambda: None)  # worker processes have the class
            return Engine(args, self.bootstrap, stored)

    def _load_inputs(self, skip_tokenizer: bool) -> InputProcessor:
        """What makes requests, with the tokenizer on rank 0."""
        engine, skip = self.engine, skip_tokenizer or self.bootstrap.rank > 0
        return load_input_processor(
            engine.checkpoint, engine.max_model_len, engine.args, engine.tokenizer_files, skip_tokenizer=skip
        )

    def make_requests(
        self, prompts: Any, params: Any, sampling_params: Any = None, *, only_one: bool = False
    ) -> list[Request]:
        """See `LLM.make_requests`."""
        self.closing.check_usable()

        def make() -> list[Request]:
            return self._make_requests(prompts, either_params(params, sampling_params), only_one)

        return make() if self.leads else self.between_launches(lambda: agree(self.bootstrap, make))

    def run(self, requests: list[Request], *, gather_logits: bool = False) -> Generator[TokenOutput, None, None]:
        """See `LLM.run`."""
        self.closing.check_usable()
        driver = self.closing.driver
        if driver is None:
            try:
                self.engine.take_part(gather_logits)
            finally:
                self.engine.session.stop()
            return
        outputs: SimpleQueue[TokenOutput | BaseException] = SimpleQueue()
        alone = gather_logits or self.engine.args.trace_iterations > 0 or not self.leads
        call = SubmittedBatch(list(requests), outputs.put, gather_logits, alone)
        num_left = len(requests)
        try:
            driver.submit(call)
            while num_left:
                self.closing.check_owner()
                output = outputs.get()
                if isinstance(output, BaseException):
                    raise output
                num_left -= output.finish_reason is not None
                if not num_left and alone:
                    call.ended.wait()  # so that all is gathered, and ranks are in step
                yield output
        finally:
            if self.closing.is_owner:
                driver.cancel(call)

    def submit(self, prompt: Prompt, params: SamplingParams, deliver: Deliver) -> Request:
        """See `LLM.submit`."""
        self.closing.check_usable()
        if not self.leads or self.closing.driver is None:
            raise UsageError("requests are submitted on rank 0, with followed=True, while the other ranks follow()")
        if params.n > 1:
            raise UsageError(f"n is {params.n}; one completion is submitted at a time")
        request = self._make_requests(prompt, params, only_one=True)[0]
        self.closing.driver.submit(SubmittedBatch([request], deliver))
        return request

    def cancel(self, request: Request) -> None:
        """End a submitted request early, from any thread; its last token then has the finish reason abort."""
        self.closing.check_usable()
        if self.closing.driver is not None:
            self.closing.driver.cancel_request(request)

    def stats(self) -> EngineStats:
        """What the engine does now, and has done so far. On rank 0, from any thread. UsageError: on another rank."""
        self.closing.check_usable()
        if self.closing.driver is None:
            raise UsageError("rank 0 has the statistics; ask there")
        return self.closing.driver.stats()

    def peak_memory_bytes(self) -> list[int]:
        """Peak resident memory of every rank's process so far, by rank; collective."""

        def ask() -> list[int]:
            if self.leads and self.bootstrap.world_size > 1:
                self.bootstrap.send_command(command("peak_memory"))
            return self.engine.peak_memory_bytes()

        return self.between_launches(ask)

    def follow(self) -> None:
        """On the other ranks, with followed=True: take part in what rank 0 does, until it closes."""
        if self.bootstrap.rank and self.leads:
            follow(self.bootstrap, self.engine)

    def between_launches(self, fn: Callable[[], T]) -> T:
        """SubmittedBatch what talks to other ranks: on the driver's thread, where there is one."""
        self.closing.check_usable()
        if self.closing.driver is not None:
            return self.closing.driver.perform(fn)
        with deferred():
            return fn()

    def _agree_if_called(self, fn: Callable[[], T]) -> T:
        """`agree`, if the other ranks make this call as well; worker processes only wait for a command."""
        return fn() if self.bootstrap.kind == "local" else agree(self.bootstrap, fn)

    def _make_requests(self, given: Any, params: Any, only_one: bool) -> list[Request]:
        return [] if self.bootstrap.rank else self.inputs.make_requests(given, params, only_one)
