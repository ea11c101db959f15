"""The Python API of a tensor-parallel model."""

from __future__ import annotations

import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from distmk.api.llm_engine import LLMEngine
from distmk.api.prompts import Prompt, Prompts
from distmk.api.prompts_bar import UseTqdm, prompts_bar
from distmk.engine.absent_parameters import ENGINE, GENERATE, METHODS, UnsupportedError, check_absent
from distmk.engine.engine import EngineArgs
from distmk.engine.engine_client import Deliver
from distmk.engine.own_model import own_model
from distmk.engine.request import Request, outputs_of
from distmk.engine.sampling_params import RequestOutput, SamplingParams, TokenOutput
from distmk.engine.session import Session
from distmk.engine.stats import EngineStats
from distmk.errors import DistmkError, UsageError
from distmk.model.causal_lm import CausalLM
from distmk.text.chat.messages import ChatOptions, Conversation, chat_prompt
from distmk.text.chat.render import ChatRenderer
from distmk.text.tokenizer import Tokenizer
from distmk.trace import Trace

if TYPE_CHECKING:
    from typing_extensions import Unpack

Params = SamplingParams | Sequence[SamplingParams] | None


_CHAT = ChatOptions.__annotations__.keys()


class LLM:
    """A model served with tensor parallelism.

    `model`: a Hugging Face folder or name, a GGUF file, or with load_format="dummy" a config or preset; or a `CausalLM` of one's
    own, with `weights`: tensors by name, or a folder or file of safetensors. Without a launcher,
    `tensor_parallel_size` ranks are started as processes on this machine. Under mpirun, torchrun or Slurm, every rank makes
    the same LLM and the same calls; outputs appear on rank 0.

    Any number of threads may call it at once, and streams may be read in turns: each call gets its own tokens. Where the
    ranks are this LLM's own, and where the others `follow`, calls share a launch; else each call is a launch.

    Close it, or use it in a `with` block; without a launcher, one that is dropped closes itself. Calls after that, or in a
    forked child, raise UsageError.

    `idle_exit_s`: seconds that the launch stays for further calls once all are served; None: until `close`. A GPU runs nothing
    else meanwhile, so ranks that share one without MPS are refused None. `followed`: under a launcher, the other ranks call
    `follow`, instead of making the same calls.
    `max_num_batched_tokens`: tokens of an iteration, 16 to 512: the longest that a token of one sequence waits for the prompt of
    another is one such iteration. None: 512, or 16 with a trace or schedulers of their own, across hosts, and on GPUs before
    Hopper.
    `max_num_seqs`: sequences that run at once, 1 to 128, and no more than an iteration carries tokens. None: 128 on GPUs, 16
    without; there more are slower.
    `deterministic`: a request's logits and tokens are the same bits alone and in any company, with or without cached prefixes,
    and after it was put back. Every iteration then carries at most 16 tokens, and attention is cut at fixed positions: at
    most 16 sequences run at once, prompts are read eleven times as slowly, and a token takes 7 % longer with one sequence and
    57 % with eight (Qwen3-8B, one H200). Bits still depend on the number of ranks and workers, and on the hardware.
    `trace_iterations`: trace the last iterations of each call; `trace` then holds the trace (on rank 0).
    `num_schedulers`: schedulers of a rank, at most one a worker, in threads of their own; on a GPU up to 12, on an SM of
    their own. None: every worker runs one in its idle time. `gpu_memory_utilization`: share of each GPU's memory (of the
    host's, without GPUs) that weights and KV cache take; as the cache is for what is being generated, `max_num_seqs` sequences
    of `max_model_len` tokens are its most. `num_gpu_blocks_override`: its pages of 16 tokens, instead. When all are in use,
    the youngest request is put back, and goes on later. `enable_prefix_caching`: a prompt that begins as an earlier one did
    reuses that one's keys and values, and waits for them if the other one is about to compute most of what both need.
    `skip_tokenizer_init` (of vLLM): prompts are token ids, and outputs have no text. `tokenizer`: folder, GGUF file or Hub name
    of another tokenizer than the model's. `revision`, `tokenizer_revision`: branch, tag or commit of models on the Hub.
    `generation_config` (of vLLM): where sampling defaults come from: auto (the model's files), vllm (nothing of the model), or a
    folder with a generation_config.json.
    `max_model_len`: tokens of the longest sequence. None: the model's own context, or as much of it as one sequence has memory
    for; models with LongRoPE or dynamic NTK take the length of pretraining. `seed` (of vLLM): requests without a seed of their
    own are drawn from it, so a run that makes the same requests in the same order repeats itself; None: every run differs.
    Dummy weights use it as well.
    `other`: further arguments of vLLM's LLM. Values that ask for nothing, or that only tune vLLM, have no effect
    (`enforce_eager=True`, `dtype="bfloat16"`, `enable_lora=False`).

    UsageError (ModelError, BuildError): the model or the arguments cannot be served, or an argument is unknown.
    RankLostError: a rank died.
    """

    def __init__(
        self,
        model: str | CausalLM,
        *,
        weights: Mapping[str, Any] | str | None = None,
        tokenizer: str | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        tensor_parallel_size: int | None = None,
        num_workers: int | None = None,
        backend: str = "auto",
        load_format: str = "auto",
        seed: int | None = 0,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        deadline_s: float | None = None,
        deterministic: bool = False,
        keep_logits: bool = False,
        trace_iterations: int = 0,
        num_schedulers: int | None = None,
        gpu_memory_utilization: float = 0.9,
        num_gpu_blocks_override: int | None = None,
        enable_prefix_caching: bool = True,
        skip_tokenizer_init: bool = False,
        idle_exit_s: float | None = 0.0,
        followed: bool = False,
        generation_config: str = "auto",
        **other: Any,
    ) -> None:
        check_absent(other, ENGINE, LLM)
        own = own_model(model, weights)

        def engine_args() -> EngineArgs:
            return EngineArgs(
                model=own.name if own else str(model),
                tokenizer=tokenizer,
                revision=revision,
                tokenizer_revision=tokenizer_revision,
                load_format=load_format,
                seed=seed,
                num_workers=num_workers,
                backend=backend,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                deadline_s=deadline_s,
                deterministic=deterministic,
                keep_logits=keep_logits,
                trace_iterations=trace_iterations,
                num_schedulers=num_schedulers,
                gpu_memory_utilization=gpu_memory_utilization,
                num_gpu_blocks_override=num_gpu_blocks_override,
                enable_prefix_caching=enable_prefix_caching,
                idle_exit_s=idle_exit_s,
                generation_config=generation_config,
            )

        self.llm_engine = LLMEngine(
            engine_args,
            tensor_parallel_size,
            skip_tokenizer_init=skip_tokenizer_init,
            followed=followed,
            own=own,
        )

    @property
    def rank(self) -> int:
        return self.llm_engine.bootstrap.rank

    @property
    def tensor_parallel_size(self) -> int:
        return self.llm_engine.bootstrap.world_size

    @property
    def backend(self) -> str:
        return self.llm_engine.engine.backend_name

    @property
    def num_workers(self) -> int:
        return self.llm_engine.engine.num_workers

    @property
    def tokenizer(self) -> Tokenizer | None:
        """On rank 0; None: the model has none."""
        return self.llm_engine.inputs.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence, prompt and completion together."""
        return self.llm_engine.engine.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once."""
        return self.llm_engine.engine.max_num_seqs

    @property
    def model(self) -> str:
        """The path or name that the model was loaded from."""
        return self.llm_engine.engine.args.model

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Fields of `SamplingParams` that a request without them has, by name: what the model's authors set, and temperature."""
        return self.llm_engine.inputs.sampling_defaults

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a call without any, as in vLLM: what the model's generation_config.json says, else temperature 1."""
        return self.llm_engine.inputs.default_params()

    @property
    def trace(self) -> Trace | None:
        """The trace of the last launch that ended in order (on rank 0)."""
        return self.llm_engine.engine.trace

    @property
    def session(self) -> Session:
        """The session of this rank, for tools that inspect buffers."""
        return self.llm_engine.engine.session

    @property
    def load_s(self) -> dict[str, float]:
        """Seconds that this rank took to load: program, runtime (with its memory), weights."""
        return self.llm_engine.engine.load_s

    def stream(
        self, prompts: Prompts, params: Params = None, *, sampling_params: Params = None
    ) -> Iterator[TokenOutput]:
        """Tokens as they are generated, those of all prompts interleaved (on rank 0; none on other ranks).

        `index` of a token: among the completions of all prompts, of each prompt `n` in a row.
        """
        yield from self.run(self.make_requests(prompts, params, sampling_params))

    def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        **other: Any,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs in the order of the prompts (on rank 0; [] on other ranks), with `n` completions each.

        A prompt is text, token ids (a list or an array of one dimension), {"prompt": text} or {"prompt_token_ids": ids};
        several are a list of those, or an array of two dimensions. Without parameters, those of
        `get_default_sampling_params` are taken. Parameters, of vLLM's name `sampling_params` too, are for
        all prompts, or a list of one a prompt. Up to `max_num_seqs` prompts run at once; the others wait. `use_tqdm` (of
        vLLM): a bar over the prompts on stderr, True only on a terminal, or what makes it, such as tqdm.tqdm. `other`: further
        arguments of vLLM's, with values that ask for nothing (`lora_request=None`). UsageError: a prompt or an argument cannot
        be served.
        """
        check_absent(other, GENERATE, LLM.generate)
        requests = self.make_requests(prompts, params, sampling_params)
        self._run_to_end(requests, use_tqdm)
        return outputs_of(requests)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template; outputs as of `generate`.

        A message is {"role": "user", "content": text} as in OpenAI's API. To stream: `stream(ChatPrompt(messages))`.
        """
        own = {name: value for name, value in options.items() if name in _CHAT or name not in GENERATE}
        other: dict[str, Any] = {name: value for name, value in options.items() if name not in own}
        return self.generate(chat_prompt(messages, own), sampling_params, use_tqdm=use_tqdm, **other)

    def render_chat(self, messages: Conversation, **options: Any) -> list[int]:
        """The token ids that `chat` gives the model for one conversation (on rank 0; [] on other ranks). UsageError: as there."""
        self.llm_engine.closing.check_usable()
        return [] if self.rank else self.chat_renderer.render(chat_prompt(messages, options)).token_ids

    @property
    def chat_renderer(self) -> ChatRenderer:
        """What renders conversations for this model. UsageError: it has no tokenizer."""
        return self.llm_engine.inputs.chat_renderer

    def _run_to_end(self, requests: list[Request], use_tqdm: UseTqdm = False, gather_logits: bool = False) -> None:
        """Serve requests without a stream that an exception could leave behind unfinished."""
        with prompts_bar(use_tqdm, requests, self.run(requests, gather_logits=gather_logits)) as tokens:
            for _ in tokens:
                pass

    def compute_logits(self, prompt: Prompt) -> npt.NDArray[np.float32]:
        """Logits after the last token of `prompt`: float32 [vocab_size]. Collective. UsageError: without keep_logits=True."""
        self.llm_engine.closing.check_usable()
        if not self.llm_engine.engine.args.keep_logits:
            raise UsageError("compute_logits needs LLM(..., keep_logits=True)")
        requests = self.make_requests(prompt, SamplingParams(max_tokens=1, ignore_eos=True), only_one=True)
        self._run_to_end(requests, gather_logits=True)
        return self.llm_engine.engine.logits

    def make_requests(
        self, prompts: Any, params: Any, sampling_params: Any = None, *, only_one: bool = False
    ) -> list[Request]:
        """Requests for `run`, on rank 0 ([] elsewhere). UsageError on every rank: rank 0's cannot be served."""
        return self.llm_engine.make_requests(prompts, params, sampling_params, only_one=only_one)

    def run(self, requests: list[Request], *, gather_logits: bool = False) -> Generator[TokenOutput, None, None]:
        """Serve requests, yielding tokens as they come; each is also added to its request. Collective, unless others `follow`.

        A generator that is closed early cancels them. Interrupted: `close` was called meanwhile. RankLostError, HangError: the
        launch failed.
        """
        return self.llm_engine.run(requests, gather_logits=gather_logits)

    def submit(self, prompt: Prompt, params: SamplingParams, deliver: Deliver) -> Request:
        """Serve one prompt without waiting: `deliver` is called on another thread with each token, or with an error.

        On rank 0, where the other ranks follow. The last token has a finish reason; an error ends the request, as the launch
        has failed. UsageError: it cannot be served.
        """
        return self.llm_engine.submit(prompt, params, deliver)

    def cancel(self, request: Request) -> None:
        """End a submitted request early, from any thread; its last token then has the finish reason abort."""
        self.llm_engine.cancel(request)

    def follow(self) -> None:
        """On the other ranks, with followed=True: take part in what rank 0 does, until it closes."""
        self.llm_engine.follow()

    def stats(self) -> EngineStats:
        """What the engine does now, and has done so far. On rank 0, from any thread. UsageError: on another rank."""
        return self.llm_engine.stats()

    def peak_memory_bytes(self) -> list[int]:
        """Peak resident memory of every rank's process so far, by rank; collective."""
        return self.llm_engine.peak_memory_bytes()

    def close(self) -> None:
        """Stop the worker processes and free memory; in a forked child, nothing of its parent's.

        A call that is under way on another thread ends with Interrupted.
        """
        self.llm_engine.closing.close()

    if not TYPE_CHECKING:  # to a type checker every name would exist

        def __getattr__(self, name: str) -> NoReturn:
            """UnsupportedError: vLLM's LLM has a method of this name. AttributeError: no LLM has one."""
            if name in METHODS:
                raise UnsupportedError(f"LLM.{name} of vLLM does not exist here; {METHODS[name]}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        own_error = isinstance(error, Exception) and not isinstance(error, DistmkError)
        if own_error and self.llm_engine.closing.is_owner and self.llm_engine.bootstrap.kind not in ("single", "local"):
            # A bug in the caller's code, perhaps on this rank only: the others would wait for this one until their deadline.
            # For worker processes, closing is enough.
            traceback.print_exception(error)
            self.llm_engine.bootstrap.abort(1)
        self.close()
