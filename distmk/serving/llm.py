"""The Python API of a tensor-parallel model."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from distmk.bootstrap import Bootstrap, agree, connect
from distmk.errors import DistmkError, Interrupted, UsageError
from distmk.serving.engine import Engine, EngineArgs
from distmk.serving.requests import Prompt, Request, make_request
from distmk.serving.sampling import RequestOutput, SamplingParams, TokenOutput
from distmk.serving.session import Session
from distmk.serving.tokenizer import Tokenizer, load_tokenizer
from distmk.trace import Trace

T = TypeVar("T")


class LLM:
    """A model served with tensor parallelism.

    `model`: a Hugging Face folder, a GGUF file, or with load_format="dummy" a config or preset. Without a launcher,
    `tensor_parallel_size` ranks are started as processes of this machine. Under mpirun, torchrun or Slurm every rank makes
    the same LLM and the same calls; outputs appear on rank 0. Close it, or use it in a `with` block.

    `trace_iterations`: keep a record of every task of the last iterations of a call; `trace` then holds it (rank 0).
    `num_schedulers`: of a rank, at most one a worker, in threads of their own, on a GPU up to 12 on an SM of their own;
    None: one rides in the idle time of each worker.

    Raises UsageError (ModelError, BuildError) for what cannot be served, RankLostError if a rank dies.
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
        self.trace: Trace | None = None  # of the last call that was seen to its end
        self._bootstrap = connect(tensor_parallel_size)
        self._serving = self._bootstrap.kind == "local"
        self._closed = False

        def choose() -> EngineArgs:
            return EngineArgs(
                str(model),
                load_format,
                seed,
                num_workers,
                backend,
                max_model_len,
                max_num_seqs,
                deadline_s,
                keep_logits,
                trace_iterations,
                num_schedulers,
            )

        try:
            args = self._agree_if_called(choose)
            if self._serving:
                self._bootstrap.send_command(pickle.dumps(("load", asdict(args))))
            self._engine = Engine(args, self._bootstrap)
            self._tokenizer = agree(self._bootstrap, self._load_tokenizer)
        except BaseException:
            self._bootstrap.close()
            raise

    def _load_tokenizer(self) -> Tokenizer | None:
        """Rank 0's alone; a model without one serves token ids."""
        if self._bootstrap.rank:
            return None
        try:
            return load_tokenizer(self._engine.checkpoint)
        except UsageError as error:
            self.tokenizer_error = str(error)
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
        """The model's graph on this rank, for tools that look into it."""
        return self._engine.session

    @property
    def load_s(self) -> dict[str, float]:
        """Seconds that this rank took to load the program, the runtime (its memory included) and the weights."""
        return self._engine.load_s

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[TokenOutput]:
        """Tokens as they are generated, of all prompts interleaved (rank 0; other ranks get none)."""
        yield from self.run(self.make_requests(prompts, params))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs in the order of the prompts (rank 0; other ranks get an empty list).

        A prompt is text or a list of token ids; up to `max_num_seqs` run at once, the rest wait their turn.
        """
        requests = self.make_requests(prompts, params)
        for _ in self.run(requests):
            pass
        return [request.output() for request in requests]

    def compute_logits(self, prompt: Prompt) -> npt.NDArray[np.float32]:
        """float32 [vocab_size]: logits after the last token of `prompt`. Needs keep_logits=True; collective."""
        if not self._engine.args.keep_logits:
            raise UsageError("compute_logits needs LLM(..., keep_logits=True)")
        requests = self.make_requests([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
        for _ in self.run(requests, gather_logits=True):
            pass
        return self._logits

    def peak_memory_bytes(self) -> list[int]:
        """Peak resident memory of every rank's process so far; collective."""
        self._engine.session.stop()
        if self._serving:
            self._bootstrap.send_command(pickle.dumps(("peak_memory", {})))
        return self._engine.peak_memory_bytes()

    def make_requests(self, prompts: Any, params: Any) -> list[Request]:
        """Rank 0 checks what it was given (other ranks get none); if it cannot be served, every rank raises UsageError."""
        self._engine.session.stop()  # a stream that nobody finished
        return self._agree_if_called(lambda: self._make_requests(prompts, params))

    def _agree_if_called(self, fn: Callable[[], T]) -> T:
        """`agree`, where the other ranks make this call as well; those of this process' own wait to be told of it."""
        return fn() if self._serving else agree(self._bootstrap, fn)

    def _make_requests(self, prompts: Any, params: Any) -> list[Request]:
        if self._bootstrap.rank:
            return []
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
            prompts = [prompts]
        if not len(prompts):
            raise UsageError("there is no prompt; give at least one")
        params = params or SamplingParams()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise UsageError(
                f"{len(prompts)} prompts were given {len(each)} sampling params; give one, or one a prompt"
            )
        if len({p.ignore_eos for p in each}) > 1:
            raise UsageError("ignore_eos must be the same for all prompts of a call")
        vocab, limit = self._engine.config.vocab_size, self._engine.max_model_len
        if self._tokenizer is None and any(isinstance(p, str) for p in prompts):
            raise UsageError(getattr(self, "tokenizer_error", "this model has no tokenizer; give token ids"))
        return [make_request(p, s, self._tokenizer, vocab, limit) for p, s in zip(prompts, each, strict=True)]

    def run(self, requests: list[Request], *, gather_logits: bool = False) -> Iterator[TokenOutput]:
        """Serve requests in one launch, yielding tokens as they come; requests fill up with what they generate."""
        self._engine.session.stop()
        if self._serving:
            self._bootstrap.send_command(pickle.dumps(("generate", {"gather_logits": gather_logits})))
        ignore_eos = bool(requests and requests[0].params.ignore_eos)
        limit = self._engine.max_model_len  # of prompt and completion together
        max_new = [min(r.params.max_tokens, limit - len(r.prompt_ids)) for r in requests]
        launch = self._engine.launch([r.prompt_ids for r in requests], max_new, ignore_eos)
        for events in launch:
            for event in events:
                yield requests[event.request].take(event.request, event)
        self.trace = self._engine.gather_trace(launch)
        if gather_logits:
            self._logits = self._engine.gather_logits()

    def close(self) -> None:
        """Stop the other ranks (those this process started) and free memory."""
        if self._closed:
            return
        self._closed = True
        self._engine.session.stop()
        if self._serving:
            # All ranks close their engines at the same time; one that is lost already cannot be told.
            with contextlib.suppress(DistmkError):
                self._bootstrap.send_command(pickle.dumps(("close", {})))
        self._engine.close()
        self._bootstrap.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        own_error = isinstance(error, Exception) and not isinstance(error, DistmkError)
        if own_error and self._bootstrap.kind not in ("single", "local"):
            # A bug in the caller's code here only: the other ranks would wait for this one until their time is up.
            # Where this process leads them, closing is enough.
            traceback.print_exception(error)
            self._bootstrap.abort(1)
        self.close()


def serve(bootstrap: Bootstrap) -> None:
    """The life of a rank that another process started: do what rank 0 says until it closes."""
    engine: Engine | None = None
    try:
        while (payload := bootstrap.next_command()) is not None:
            command, arguments = pickle.loads(payload)
            if command == "close":
                break
            if command == "load":
                engine = Engine(EngineArgs(**arguments), bootstrap)
                agree(bootstrap, lambda: None)  # the tokenizer is rank 0's
            elif engine is not None and command == "peak_memory":
                engine.peak_memory_bytes()
            elif engine is not None:
                _follow(engine, arguments["gather_logits"])
    finally:
        if engine is not None:
            engine.close()


def _follow(engine: Engine, gather_logits: bool) -> None:
    """Take part in a launch of rank 0."""
    with contextlib.suppress(Interrupted):  # rank 0 decides what comes next
        launch = engine.launch([], [], False)
        for _ in launch:
            pass
        engine.gather_trace(launch)
        if gather_logits:
            engine.gather_logits()
