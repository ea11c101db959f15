"""The Python API of a tensor-parallel model."""

from __future__ import annotations

import contextlib
import functools
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from distmk.bootstrap import agree, connect
from distmk.errors import DistmkError, Interrupted, ModelError, UsageError
from distmk.interrupts import deferred
from distmk.serving.chat.messages import ChatOptions, ChatPrompt, Conversation, chat_prompt
from distmk.serving.chat.render import ChatRenderer
from distmk.serving.closing import Closing
from distmk.serving.commands import command
from distmk.serving.engine import Engine, EngineArgs
from distmk.serving.prompts import Prompt, Prompts, either_params, read_params, read_prompt, read_prompts
from distmk.serving.requests import Request, make_request
from distmk.serving.sampling import RequestOutput, SamplingParams, TokenOutput
from distmk.serving.session import RunningLaunch, Session
from distmk.serving.tokenizer import Tokenizer, load_tokenizer
from distmk.serving.turn import Holder, Turn
from distmk.trace import Trace

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model served with tensor parallelism.

    `model`: a Hugging Face folder, a GGUF file, or with load_format="dummy" a config or preset. Without a launcher,
    `tensor_parallel_size` ranks are started as processes on this machine. Under mpirun, torchrun or Slurm, every rank makes
    the same LLM and the same calls; outputs appear on rank 0.

    Close it, or use it in a `with` block; without a launcher, one that is dropped closes itself. Calls after that, or in a
    forked child, raise UsageError.

    `trace_iterations`: trace the last iterations of each call; `trace` then holds the trace (on rank 0).
    `num_schedulers`: schedulers of a rank, at most one a worker, in threads of their own; on a GPU up to 12, on an SM of
    their own. None: every worker runs one in its idle time.

    UsageError (ModelError, BuildError): the model or the arguments cannot be served. RankLostError: a rank died.
    """

    def __init__(
        self,
        model: str,
        *,
        tensor_parallel_size: int | None = None,
        num_workers: int | None = None,
        backend: str = "auto",
        load_format: str = "auto",
        seed: int = 0,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        deadline_s: float | None = None,
        keep_logits: bool = False,
        trace_iterations: int = 0,
        num_schedulers: int | None = None,
    ) -> None:
        self.trace: Trace | None = None  # of the last call whose tokens were all taken
        self._bootstrap = connect(tensor_parallel_size)
        self._commands_workers = self._bootstrap.kind == "local"  # the other ranks are worker processes of this one
        self._closing = Closing(self, self._bootstrap)
        self._turn = Turn()
        self._tokenizer_error = "this model has no tokenizer; give token ids"

        def engine_args() -> EngineArgs:
            return EngineArgs(
                model=str(model),
                load_format=load_format,
                seed=seed,
                num_workers=num_workers,
                backend=backend,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                deadline_s=deadline_s,
                keep_logits=keep_logits,
                trace_iterations=trace_iterations,
                num_schedulers=num_schedulers,
            )

        try:
            args = self._agree_if_called(engine_args)
            self._command("load", **asdict(args))
            self._closing.engine = self._engine = Engine(args, self._bootstrap)
            self._tokenizer = agree(self._bootstrap, self._load_tokenizer)
        except BaseException:
            self._closing.close(in_step=False)
            raise

    def _command(self, name: str, **arguments: Any) -> None:
        """Send the worker processes a command, if the other ranks are such (`serve`)."""
        if self._commands_workers:
            self._bootstrap.send_command(command(name, **arguments))

    def _load_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, on rank 0; a model without one serves token ids."""
        if self._bootstrap.rank:
            return None
        try:
            return load_tokenizer(self._engine.checkpoint)
        except ModelError:
            raise  # there is one, and it is damaged
        except UsageError as error:
            self._tokenizer_error = str(error)
            return None

    @property
    def rank(self) -> int:
        return self._bootstrap.rank

    @property
    def tensor_parallel_size(self) -> int:
        return self._bootstrap.world_size

    @property
    def backend(self) -> str:
        return self._engine.backend_name

    @property
    def num_workers(self) -> int:
        return self._engine.num_workers

    @property
    def session(self) -> Session:
        """The session of this rank, for tools that inspect buffers."""
        return self._engine.session

    @property
    def load_s(self) -> dict[str, float]:
        """Seconds that this rank took to load: program, runtime (with its memory), weights."""
        return self._engine.load_s

    def stream(
        self, prompts: Prompts, params: Params = None, *, sampling_params: Params = None
    ) -> Iterator[TokenOutput]:
        """Tokens as they are generated, those of all prompts interleaved (on rank 0; none on other ranks)."""
        yield from self.run(self.make_requests(prompts, params, sampling_params))

    def generate(
        self, prompts: Prompts, params: Params = None, *, sampling_params: Params = None
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs in the order of the prompts (on rank 0; [] on other ranks).

        A prompt is text, token ids (a list or an array of one dimension), {"prompt": text} or {"prompt_token_ids": ids};
        several are a list of those, or an array of two dimensions. Parameters, of vLLM's name `sampling_params` too, are for
        all prompts, or a list of one a prompt. Up to `max_num_seqs` prompts run at once; the others wait.
        """
        requests = self.make_requests(prompts, params, sampling_params)
        self._run_to_end(requests)
        return [request.output() for request in requests]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template; outputs as of `generate`.

        A message is {"role": "user", "content": text} as in OpenAI's API. To stream: `stream(ChatPrompt(messages))`.
        """
        return self.generate(chat_prompt(messages, options), sampling_params)

    def render_chat(self, messages: Conversation, **options: Unpack[ChatOptions]) -> list[int]:
        """The token ids that `chat` gives the model for one conversation (on rank 0; [] on other ranks). UsageError: as there."""
        self._closing.check_usable()
        return [] if self.rank else self.chat_renderer.render(chat_prompt(messages, options)).token_ids

    @functools.cached_property
    def chat_renderer(self) -> ChatRenderer:
        """What renders conversations, on rank 0. UsageError: there is no tokenizer."""
        if self._tokenizer is None:
            raise UsageError(self._tokenizer_error)
        return ChatRenderer(self._engine.checkpoint, self._tokenizer)

    def _run_to_end(self, requests: list[Request], gather_logits: bool = False) -> None:
        """Serve requests without a stream that an exception could leave behind unfinished."""
        with contextlib.closing(self.run(requests, gather_logits=gather_logits)) as tokens:
            for _ in tokens:
                pass

    def compute_logits(self, prompt: Prompt) -> npt.NDArray[np.float32]:
        """Logits after the last token of `prompt`: float32 [vocab_size]. Collective. UsageError: without keep_logits=True."""
        self._closing.check_usable()
        if not self._engine.args.keep_logits:
            raise UsageError("compute_logits needs LLM(..., keep_logits=True)")
        requests = self.make_requests(prompt, SamplingParams(max_tokens=1, ignore_eos=True), only_one=True)
        self._run_to_end(requests, gather_logits=True)
        return self._logits

    def peak_memory_bytes(self) -> list[int]:
        """Peak resident memory of every rank's process so far, by rank; collective."""
        self._closing.check_usable()
        holder = Holder()
        try:
            self._turn.take(holder)
            with deferred():
                self._command("peak_memory")
                return self._engine.peak_memory_bytes()
        finally:
            holder.over = True

    def make_requests(
        self, prompts: Any, params: Any, sampling_params: Any = None, *, only_one: bool = False
    ) -> list[Request]:
        """Requests for `run`, on rank 0 ([] elsewhere). UsageError on every rank: rank 0's cannot be served."""
        self._closing.check_usable()
        holder = Holder()
        try:
            self._turn.take(holder)
            with deferred():
                return self._agree_if_called(
                    lambda: self._make_requests(prompts, either_params(params, sampling_params), only_one)
                )
        finally:
            holder.over = True

    def _agree_if_called(self, fn: Callable[[], T]) -> T:
        """`agree`, if the other ranks make this call as well; worker processes only wait for a command."""
        return fn() if self._commands_workers else agree(self._bootstrap, fn)

    def _make_requests(self, given: Any, params: Any, only_one: bool) -> list[Request]:
        if self._bootstrap.rank:
            return []
        prompts = [read_prompt(given)] if only_one else read_prompts(given)
        each = read_params(params, len(prompts))
        if len({p.ignore_eos for p in each}) > 1:
            raise UsageError("ignore_eos must be the same for all prompts of a call")
        vocab, limit = self._engine.config.vocab_size, self._engine.max_model_len
        if self._tokenizer is None and any(isinstance(p, str | ChatPrompt) for p in prompts):
            raise UsageError(self._tokenizer_error)
        rendered = [self.chat_renderer.render(p) if isinstance(p, ChatPrompt) else p for p in prompts]
        return [make_request(p, s, self._tokenizer, vocab, limit) for p, s in zip(rendered, each, strict=True)]

    def run(self, requests: list[Request], *, gather_logits: bool = False) -> Generator[TokenOutput, None, None]:
        """Serve requests in one launch, yielding tokens as they come; each is also added to its request.

        A caller on another thread waits until this generator has ended. Interrupted: `close` was called meanwhile.
        """
        ignore_eos = bool(requests and requests[0].params.ignore_eos)
        limit = self._engine.max_model_len  # of prompt and completion together
        max_new = [min(r.params.max_tokens, limit - len(r.prompt_ids)) for r in requests]
        holder = Holder()
        try:
            try:
                self._turn.take(holder)
                with deferred():
                    self._closing.check_usable()
                    self._command("generate", gather_logits=gather_logits)
                    launch = self._engine.launch([r.prompt_ids for r in requests], max_new, ignore_eos)
                with contextlib.closing(launch.tokens(lambda: self._gather(launch, gather_logits))) as batches:
                    for events in batches:
                        for event in events:
                            output = requests[event.request].append(event.request, event)
                            holder.suspended = True
                            try:
                                yield output
                            finally:
                                holder.suspended = False
                            holder.thread = threading.current_thread()  # a generator may move to another
                            self._closing.check_not_closed_midway()
            except Interrupted:
                self._closing.check_not_closed_midway()
                raise
            finally:
                if self._turn.is_held_by(holder):
                    self._engine.session.stop()
        finally:
            holder.over = True

    def _gather(self, launch: RunningLaunch, gather_logits: bool) -> None:
        """What a call collects from all ranks once its launch has ended in order."""
        self.trace = self._engine.gather_trace(launch)
        if gather_logits and not launch.left:
            self._logits = self._engine.gather_logits()

    def close(self) -> None:
        """Stop the worker processes and free memory; in a forked child, nothing of its parent's.

        A call that is under way on another thread ends with Interrupted.
        """
        if self._closing.is_closed:
            return
        self._closing.refuse_calls()
        holder = Holder()
        try:
            if self._closing.is_owner:
                self._turn.take_over(holder, self._engine.session.abort)
            self._closing.close()
        finally:
            holder.over = True

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        own_error = isinstance(error, Exception) and not isinstance(error, DistmkError)
        if own_error and self._closing.is_owner and self._bootstrap.kind not in ("single", "local"):
            # A bug in the caller's code, perhaps on this rank only: the others would wait for this one until their deadline.
            # For worker processes, closing is enough.
            traceback.print_exception(error)
            self._bootstrap.abort(1)
        self.close()
