"""A model for asyncio: any number of tasks generate at once. The HTTP server stands on this."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from distmk.absent_parameters import check_absent
from distmk.api.absent_arguments import GENERATE
from distmk.api.answer_constraints import with_response_format
from distmk.api.async_outputs import CompletionSoFar, output_so_far
from distmk.api.llm import LLM, split_chat_options
from distmk.api.outputs import RequestOutput
from distmk.api.prompts import ChatOptions, Prompt, Prompts, read_prompt
from distmk.api.token_stream import EngineClient, Mailbox, TokenStream, in_thread_if_long, text_size
from distmk.engine.engine_args import EngineArgs
from distmk.engine.sampling_params import RequestOutputKind, SamplingParams
from distmk.engine.stats import EngineStats
from distmk.engine.token_output import TokenOutput
from distmk.errors import UsageError, shown
from distmk.model.causal_lm import CausalLM
from distmk.text.chat.messages import ChatPrompt, Conversation, chat_prompt
from distmk.text.output.output_parser import OutputParsers
from distmk.text.token_speller import token_strings
from distmk.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncLLM:
    """A model that tasks of an event loop share. Long prompts are encoded in a thread.

    `model`: what `LLM` takes, with the same `options`; its launch stays between requests unless `idle_exit_s` says otherwise.
    Loading it blocks. Or an engine that is there, such as an `LLM`, which then stays open. `chat_template`: of conversations
    that bring none; None: the model's. Close it, or use it in a `with` or `async with` block.

    UsageError: as of `LLM`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | CausalLM | EngineClient,
        *,
        chat_template: str | None = None,
        **options: Any,
    ) -> None:
        self._owned: LLM | None = None
        if isinstance(model, str | os.PathLike | CausalLM):
            named = model if isinstance(model, CausalLM) else os.fspath(model)
            self._owned = LLM(named, **{"idle_exit_s": None, **options})
        elif options:
            raise UsageError(f"{next(iter(options))} is an option of a model that is to be loaded; this one is there")
        self._llm: EngineClient = self._owned or model  # type: ignore[assignment]
        self._chat_template = chat_template
        self._mailbox: Mailbox | None = None
        self._named: dict[str, TokenStream] = {}  # running requests of `generate`

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **options: Any) -> AsyncLLM:
        """As in vLLM; `options`: those of `LLM` that are no arguments of an engine, such as tensor_parallel_size."""
        return cls(**asdict(engine_args), **options)

    @property
    def model(self) -> str:
        """The path or name that the model was loaded from."""
        return self._llm.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None: the model has none, and takes token ids only."""
        return self._llm.inputs.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence, prompt and completion together."""
        return self._llm.inputs.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once."""
        return self._llm.max_num_seqs

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Fields of `SamplingParams` that a request without them has, by name."""
        return self._llm.inputs.sampling_defaults

    @property
    def chat_template(self) -> str:
        """The text of the templates of conversations; "" if there is none. ModelError: the model's files are damaged."""
        chat = self._llm.inputs.chat
        return self._chat_template or ("" if chat is None else chat.template_text)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **other: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The output of a prompt as it grows, as in vLLM: `sampling_params.output_kind` says what each output holds.

        sampling_params: None: the model's, as of `LLM.generate`. request_id: by which `abort` knows the request; None: a new
        one. `other`: as of `LLM.generate`. Closing the generator, or cancelling its task, cancels the request. UsageError: it
        cannot be served, or its id is in use. DistmkError: the engine has ended.
        """
        check_absent(other, GENERATE, AsyncLLM.generate)
        params = self._llm.inputs.default_params() if sampling_params is None else sampling_params
        name = request_id if request_id is not None else uuid.uuid4().hex
        async with self._named_stream(name, prompt, params) as stream:
            completions = [CompletionSoFar(request) for request in stream.requests]
            async for outputs in stream:
                for output in outputs:
                    completions[output.index].add(output)
                if params.output_kind is not RequestOutputKind.FINAL_ONLY or all(each.is_over for each in completions):
                    yield output_so_far(completions, params.output_kind)

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        response_format: Mapping[str, Any] | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, of a conversation through the chat template. `response_format`, `options`: as of `LLM.chat`."""
        own, other = split_chat_options(options)
        params = with_response_format(sampling_params, response_format, self._llm.inputs.default_params())
        return self.generate(chat_prompt(messages, own), params, request_id, **other)

    async def stream(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[TokenOutput, None]:
        """The tokens of a prompt as they come; `index` tells the completions of `params.n` apart. Errors: as of `generate`."""
        async with self.submit([prompt], params) as stream:
            async for outputs in stream:
                for output in outputs:
                    yield output

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests of `generate`: the last output of each has the finish reason abort. Ids that are not running are left."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            if name in self._named:
                self._named[name].abort()

    def submit(
        self, prompts: Prompts, params: SamplingParams, *, must_fit: bool = False, parsers: OutputParsers | None = None
    ) -> TokenStream:
        """The completions of several prompts in one stream: `index` is the prompt's number * n + the completion's number.

        A seeded completion has the seed plus its number within the prompt, as in vLLM. `must_fit`: `max_tokens` for which the
        context has no room are a UsageError; else a completion ends where the context does. `parsers`: as of
        `InputProcessor.make_requests`. Errors come when the stream is entered.
        """
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop)
        return TokenStream(self._llm, self._mailbox, self._with_template(prompts), params, must_fit, parsers)

    async def tokenize(self, prompt: str | ChatPrompt) -> list[int]:
        """Token ids of text or a conversation, of any number. UsageError: see `InputProcessor.encode`."""
        given = self._with_template(prompt)
        encoded = await in_thread_if_long(lambda: self._llm.inputs.encode(given), text_size(prompt))
        return encoded.token_ids

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, with special tokens. UsageError: one is not a token of this model."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise UsageError("this model has no tokenizer")

        def decode() -> str:
            for token_id in ids:
                if not tokenizer.has_token(token_id):
                    raise UsageError(f"token id {shown(token_id)} is not a token of this model")
            return tokenizer.decode(ids, skip_special=False)

        return await in_thread_if_long(decode, 4 * len(ids))

    async def token_strings(self, ids: Sequence[int]) -> list[str] | None:
        """The tokens of a text for users to read; None: the model has no tokenizer."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return None
        return await in_thread_if_long(lambda: token_strings(tokenizer, ids), 4 * len(ids))

    def stats(self) -> EngineStats:
        """DistmkError: the engine has ended."""
        return self._llm.stats()

    def close(self) -> None:
        """Free the model, if it was loaded here. Requests that run end with Interrupted."""
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.asynccontextmanager
    async def _named_stream(self, name: str, prompt: Prompt, params: SamplingParams) -> AsyncIterator[TokenStream]:
        """The stream of one prompt, which `abort` finds by its name while the block lasts."""
        if name in self._named:
            raise UsageError(f"request_id {shown(name)} is running already; give each request another one")
        stream = self._named[name] = self.submit([read_prompt(prompt)], params)
        try:
            async with stream:
                for request in stream.requests:
                    request.request_id = name
                yield stream
        finally:
            del self._named[name]

    def _with_template(self, prompts: Any) -> Any:
        """`prompts`, of which conversations without a template of their own have that of this model."""
        if self._chat_template is None:
            return prompts
        if isinstance(prompts, list):
            return [self._with_template(each) for each in prompts] if _has_chat(prompts) else prompts
        if isinstance(prompts, ChatPrompt) and prompts.chat_template is None:
            return replace(prompts, chat_template=self._chat_template)
        return prompts


def _has_chat(prompts: list[Any]) -> bool:
    return any(isinstance(each, ChatPrompt) for each in prompts)
