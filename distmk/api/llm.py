"""The Python API of a tensor-parallel model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from distmk.absent_parameters import UnsupportedError, check_absent
from distmk.api.absent_arguments import ENGINE, GENERATE, METHODS
from distmk.api.answer_constraints import with_response_format
from distmk.api.llm_engine import LLMEngine
from distmk.api.outputs import RequestOutput, outputs_of
from distmk.api.prompts import Prompt, Prompts
from distmk.api.prompts_bar import UseTqdm, prompts_bar
from distmk.engine.engine_args import EngineArgs
from distmk.engine.own_model import own_model
from distmk.engine.request import Request
from distmk.engine.sampling_params import SamplingParams
from distmk.engine.session import Session
from distmk.engine.token_output import TokenOutput
from distmk.errors import UsageError
from distmk.model.causal_lm import CausalLM
from distmk.text.chat.messages import ChatOptions, Conversation, chat_prompt
from distmk.text.chat.render import ChatRenderer
from distmk.text.tokenizer import Tokenizer
from distmk.trace import Trace

if TYPE_CHECKING:
    from typing_extensions import Unpack

Params = SamplingParams | Sequence[SamplingParams] | None


_CHAT = ChatOptions.__annotations__.keys()


class LLM(LLMEngine):
    """A model served with tensor parallelism.

    Without a launcher, `tensor_parallel_size` ranks are started as processes on this machine. Under mpirun, torchrun or Slurm,
    every rank makes the same LLM and the same calls; outputs appear on rank 0. `followed`: there the other ranks call `follow`
    instead.

    `model`: see `EngineArgs`, which describes all further arguments, or a `CausalLM` of one's own. Such a model has `weights`:
    tensors by name, or a folder or file of safetensors; None: random ones. `skip_tokenizer_init` (of vLLM): prompts are token
    ids, and outputs have no text. `other`: further arguments of vLLM's LLM. Values that ask for nothing, or that only tune vLLM,
    have no effect (`enforce_eager=True`, `dtype="bfloat16"`, `enable_lora=False`).

    Any number of threads may call it at once, and streams may be read in turns: each call gets its own tokens. Where the
    ranks are this LLM's own, and where the others `follow`, calls share a launch; else each call is a launch.

    Close it, or use it in a `with` block; without a launcher, one that is dropped closes itself. Calls after that, or in a
    forked child, raise UsageError.

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
        quantization: str | None = None,
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
        speculative_config: Mapping[str, Any] | None = None,
        **other: Any,
    ) -> None:
        check_absent(other, ENGINE, LLM)
        own = own_model(model, weights)
        super().__init__(
            lambda: EngineArgs(
                model=own.name if own else str(model),
                tokenizer=tokenizer,
                revision=revision,
                tokenizer_revision=tokenizer_revision,
                load_format=load_format,
                quantization=quantization,
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
                speculative_config=speculative_config,
            ),
            tensor_parallel_size,
            skip_tokenizer_init=skip_tokenizer_init,
            followed=followed,
            own=own,
        )

    @property
    def tensor_parallel_size(self) -> int:
        return self.bootstrap.world_size

    @property
    def backend(self) -> str:
        return self.engine.backend_name

    @property
    def num_workers(self) -> int:
        return self.engine.num_workers

    @property
    def tokenizer(self) -> Tokenizer | None:
        """On rank 0; None: the model has none."""
        return self.inputs.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence, prompt and completion together."""
        return self.engine.max_model_len

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Fields of `SamplingParams` by name, for requests without them: values of the model's authors, and temperature."""
        return self.inputs.sampling_defaults

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a call without any, as in vLLM: the model's generation_config.json, else temperature 1."""
        return self.inputs.default_params()

    @property
    def trace(self) -> Trace | None:
        """The trace of the last launch that ended in order (on rank 0)."""
        return self.engine.trace

    @property
    def session(self) -> Session:
        """The session of this rank, for tools that inspect buffers."""
        return self.engine.session

    @property
    def load_s(self) -> dict[str, float]:
        """Seconds that this rank took to load: program, runtime (with its memory), weights."""
        return self.engine.load_s

    def stream(
        self, prompts: Prompts, params: Params = None, *, sampling_params: Params = None
    ) -> Iterator[TokenOutput]:
        """Tokens when they are generated, of all prompts interleaved (on rank 0; none on other ranks).

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

        A prompt is text, token ids (a list or an array of one dimension), {"prompt": text} or {"prompt_token_ids": ids}.
        Several prompts are a list of such prompts, or an array of two dimensions. `params`, which vLLM calls
        `sampling_params`, are for all prompts, or a list with one for each prompt; None: see `get_default_sampling_params`.
        Up to `max_num_seqs` prompts run at once; the others wait. `use_tqdm` (of vLLM): a bar over the prompts on stderr,
        True only on a terminal, or what makes it, such as tqdm.tqdm. `other`: further arguments of vLLM's, with values that
        ask for nothing (`lora_request=None`). UsageError: a prompt or an argument cannot be served.
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
        response_format: Mapping[str, Any] | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template; outputs as of `generate`.

        A message is {"role": "user", "content": text} as in OpenAI's API, and so is `response_format`, which stands for
        `SamplingParams.structured_outputs`. To stream: `stream(ChatPrompt(messages))`.
        """
        own, other = split_chat_options(options)
        params = with_response_format(sampling_params, response_format, self.inputs.default_params())
        return self.generate(chat_prompt(messages, own), params, use_tqdm=use_tqdm, **other)

    def render_chat(self, messages: Conversation, **options: Any) -> list[int]:
        """The token ids that `chat` gives the model for one conversation (on rank 0; [] on other ranks). UsageError: as there."""
        self.lifecycle.check_usable()
        return [] if self.rank else self.chat_renderer.render(chat_prompt(messages, options)).token_ids

    @property
    def chat_renderer(self) -> ChatRenderer:
        """What renders conversations for this model. UsageError: it has no tokenizer."""
        return self.inputs.chat_renderer

    def _run_to_end(self, requests: list[Request], use_tqdm: UseTqdm = False, gather_logits: bool = False) -> None:
        """Serve requests without a stream that an exception could leave behind unfinished."""
        with prompts_bar(use_tqdm, requests, self.run(requests, gather_logits=gather_logits)) as tokens:
            for _ in tokens:
                pass

    def compute_logits(self, prompt: Prompt) -> npt.NDArray[np.float32]:
        """Logits after the last token of `prompt`: float32 [vocab_size]. Collective. UsageError: without keep_logits=True."""
        self.lifecycle.check_usable()
        if not self.engine.args.keep_logits:
            raise UsageError("compute_logits needs LLM(..., keep_logits=True)")
        requests = self.make_requests(prompt, SamplingParams(max_tokens=1, ignore_eos=True), only_one=True)
        self._run_to_end(requests, gather_logits=True)
        return self.engine.logits

    if not TYPE_CHECKING:  # to a type checker every name would exist

        def __getattr__(self, name: str) -> NoReturn:
            """UnsupportedError: vLLM's LLM has a method of this name. AttributeError: no LLM has one."""
            if name in METHODS:
                raise UnsupportedError(f"LLM.{name} of vLLM does not exist here; {METHODS[name]}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __enter__(self) -> LLM:
        return self


def split_chat_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of a conversation, and arguments of vLLM's generate that distmk does not have."""
    other = {name: value for name, value in options.items() if name in GENERATE and name not in _CHAT}
    return {name: value for name, value in options.items() if name not in other}, other
