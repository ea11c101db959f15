"""An engine and its callers: prompts become requests, and requests are served in step with the other ranks."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator
from dataclasses import asdict
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

from distmk.api.input_processor import InputProcessor, load_input_processor
from distmk.api.prompts import Prompt, either_params
from distmk.bootstrap import agree, connect
from distmk.engine.commands import command, follow
from distmk.engine.engine import Engine
from distmk.engine.engine_args import EngineArgs
from distmk.engine.engine_thread import EngineThread
from distmk.engine.lifecycle import Lifecycle
from distmk.engine.own_model import OwnModel, in_files
from distmk.engine.request import Deliver, Request
from distmk.engine.request_queue import SubmittedBatch
from distmk.engine.sampling_params import SamplingParams
from distmk.engine.stats import EngineStats
from distmk.engine.token_output import TokenOutput
from distmk.errors import DistmkError, UsageError
from distmk.interrupts import deferred

T = TypeVar("T")


class LLMEngine:
    """This rank's engine and, on rank 0, the thread that runs its launches. `LLM` adds the calls that users know from vLLM.

    `make_args`: the engine's arguments; its UsageError is raised on every rank. `followed`: under a launcher, the other ranks
    call `follow`, instead of making the same calls.
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
        self._leads = self.bootstrap.kind in ("single", "local") or followed
        self.lifecycle = Lifecycle(self, self.bootstrap, self._leads)
        try:
            args = self._agree_if_called(make_args)
            self.lifecycle.engine = self.engine = self._load(args, own)
            self.inputs = agree(self.bootstrap, lambda: self._load_inputs(skip_tokenizer_init))
            if self.bootstrap.rank == 0:
                self.lifecycle.engine_thread = EngineThread(self.engine, self._leads, args.idle_exit_s)
        except BaseException:
            self.lifecycle.close(in_step=False)
            raise

    def _load(self, args: EngineArgs, own: OwnModel | None) -> Engine:
        """The engine. A command makes worker processes load the same."""
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

    @property
    def rank(self) -> int:
        return self.bootstrap.rank

    @property
    def model(self) -> str:
        """The path or name that the model was loaded from."""
        return self.engine.args.model

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once."""
        return self.engine.max_num_seqs

    def make_requests(
        self, prompts: Any, params: Any, sampling_params: Any = None, *, only_one: bool = False
    ) -> list[Request]:
        """Requests for `run`, on rank 0 ([] elsewhere). UsageError on every rank: rank 0's cannot be served."""
        self.lifecycle.check_usable()

        def make() -> list[Request]:
            given = either_params(params, sampling_params)
            return [] if self.rank else self.inputs.make_requests(prompts, given, only_one)

        return make() if self._leads else self.between_launches(lambda: agree(self.bootstrap, make))

    def run(self, requests: list[Request], *, gather_logits: bool = False) -> Generator[TokenOutput, None, None]:
        """Serve requests, yielding tokens as they come; each is also added to its request. Collective, unless others `follow`.

        A generator that is closed early cancels them. Interrupted: `close` was called meanwhile. RankLostError, HangError: the
        launch failed. UsageError: another call is serving one of the requests.
        """
        self.lifecycle.check_usable()
        engine_thread = self.lifecycle.engine_thread
        if engine_thread is None:
            try:
                self.engine.take_part(gather_logits)
            finally:
                self.engine.session.stop()
            return
        outputs: SimpleQueue[TokenOutput | BaseException] = SimpleQueue()
        alone = gather_logits or self.engine.args.trace_iterations > 0 or not self._leads
        batch = SubmittedBatch(list(requests), outputs.put, gather_logits, alone)
        num_left = len(requests)
        try:
            engine_thread.add(batch)
            while num_left:
                self.lifecycle.check_owner()
                output = outputs.get()
                if isinstance(output, BaseException):
                    raise output
                num_left -= output.finish_reason is not None
                if not num_left and alone:
                    batch.ended.wait()  # so that all is gathered, and ranks are in step
                yield output
        finally:
            if self.lifecycle.is_owner:
                engine_thread.cancel(*requests)

    def submit(self, prompt: Prompt, params: SamplingParams, deliver: Deliver) -> Request:
        """Serve one prompt without waiting: `deliver` is called on another thread with each token, or with an error.

        On rank 0, where the other ranks follow. The last token has a finish reason; an error ends the request, as the launch
        has failed. UsageError: it cannot be served.
        """
        self._leading_thread()
        if params.n > 1:
            raise UsageError(f"n is {params.n}; one completion is submitted at a time")
        request = self.inputs.make_requests(prompt, params, only_one=True)[0]
        self.add_request(request, deliver)
        return request

    def add_request(self, request: Request, deliver: Deliver) -> None:
        """As `submit`, for a request that was made before (`inputs.make_requests`)."""
        self._leading_thread().add(SubmittedBatch([request], deliver))

    def _leading_thread(self) -> EngineThread:
        """The engine's thread. UsageError: the other ranks do not follow it."""
        self.lifecycle.check_usable()
        if not self._leads or self.lifecycle.engine_thread is None:
            raise UsageError("requests are submitted on rank 0, with followed=True, while the other ranks follow()")
        return self.lifecycle.engine_thread

    def cancel(self, *requests: Request) -> None:
        """End submitted requests early, from any thread; the last token of each then has the finish reason abort."""
        self.lifecycle.check_usable()
        if self.lifecycle.engine_thread is not None:
            self.lifecycle.engine_thread.cancel(*requests)

    def stats(self) -> EngineStats:
        """The engine's state and its counts of work so far. On rank 0, from any thread. UsageError: on another rank."""
        self.lifecycle.check_usable()
        if self.lifecycle.engine_thread is None:
            raise UsageError("rank 0 has the statistics; ask there")
        return self.lifecycle.engine_thread.stats()

    def peak_memory_bytes(self) -> list[int]:
        """Peak resident memory of every rank's process so far, by rank; collective."""

        def ask() -> list[int]:
            if self._leads and self.bootstrap.world_size > 1:
                self.bootstrap.send_command(command("peak_memory"))
            return self.engine.peak_memory_bytes()

        return self.between_launches(ask)

    def follow(self) -> None:
        """On the other ranks, with followed=True: take part in what rank 0 does, until it closes."""
        if self.rank and self._leads:
            follow(self.bootstrap, self.engine)

    def between_launches(self, fn: Callable[[], T]) -> T:
        """Call what talks to other ranks: on the engine's thread, where there is one."""
        self.lifecycle.check_usable()
        if self.lifecycle.engine_thread is not None:
            return self.lifecycle.engine_thread.call(fn).result()
        with deferred():
            return fn()

    def _agree_if_called(self, fn: Callable[[], T]) -> T:
        """`agree`, if the other ranks make this call as well; worker processes only wait for a command."""
        return fn() if self.bootstrap.kind == "local" else agree(self.bootstrap, fn)

    def close(self) -> None:
        """Stop the worker processes and free memory; in a forked child, nothing of its parent's.

        A call that is under way on another thread ends with Interrupted.
        """
        self.lifecycle.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        own_error = isinstance(error, Exception) and not isinstance(error, DistmkError)
        if own_error and self.lifecycle.is_owner and self.bootstrap.kind not in ("single", "local"):
            # A bug in the caller's code, perhaps on this rank only: the others would wait for this one until their deadline.
            # For worker processes, closing is enough.
            traceback.print_exception(error)
            self.bootstrap.abort(1)
        self.close()
