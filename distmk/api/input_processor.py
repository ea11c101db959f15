"""Prompts checked and turned into requests, for which a model's config and tokenizer suffice: its weights stay unread."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from distmk.api.answer_constraints import AnswerConstraints, MakeReasoning, is_constrained
from distmk.api.prompts import read_params, read_prompt, read_prompts
from distmk.backends.defaults import choose_model_len
from distmk.engine.engine_args import EngineArgs
from distmk.engine.generation_config import sampling_defaults
from distmk.engine.request import Request
from distmk.engine.sampling_params import SamplingParams
from distmk.engine.sampling_slot import biases_of
from distmk.engine.token_constraint import TokenConstraint
from distmk.errors import ModelError, UsageError, shown
from distmk.text.chat.messages import ChatPrompt
from distmk.text.chat.render import ChatRenderer
from distmk.text.grammar.compiler import GrammarCompiler
from distmk.text.output.families import ReasoningParser
from distmk.text.output.output_parser import OutputParsers, choose_parsers
from distmk.text.tokenizer import EncodedPrompt, Tokenizer, load_tokenizer
from distmk.text.tokenizer_files import end_tokens, find_tokenizer
from distmk.weights import Checkpoint, open_checkpoint
from distmk.weights.checkpoint import ModelFiles


class RequestSeeds:
    """Draws a seed for each such request, in the order in which requests are made; threads may share it.

    `seed`: the engine's; the same one draws the same seeds, so a run that makes the same requests in the same order repeats
    itself. None: seeds differ from run to run.
    """

    def __init__(self, seed: int | None) -> None:
        self._key = os.urandom(8) if seed is None else str(seed).encode()
        self._numbers = itertools.count()

    def draw(self) -> int:
        """The next seed: a whole number of 64 bits with a sign."""
        digest = hashlib.blake2b(str(next(self._numbers)).encode(), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


@dataclass(frozen=True)
class InputProcessor:
    """Makes requests for one model: here prompts are encoded, and token ids checked against vocabulary and context. Threads may
    share it.

    `no_tokenizer`: what to say of a prompt of text if there is no tokenizer. `eos_ids`: the model's end tokens.
    `sampling_defaults`: see `generation_config`. `seeds`: for requests without a seed of their own. `ids`: numbers of prompts.
    """

    vocab_size: int
    max_model_len: int
    tokenizer: Tokenizer | None = None
    no_tokenizer: str = "this model has no tokenizer; give token ids"
    chat: ChatRenderer | None = None  # where there is a tokenizer
    eos_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    seeds: RequestSeeds = field(default_factory=lambda: RequestSeeds(None))
    ids: Iterator[int] = field(default_factory=itertools.count)

    def default_params(self) -> SamplingParams:
        """The parameters of a prompt that comes without any."""
        return SamplingParams(**self.sampling_defaults)

    def make_requests(
        self, given: object, params: object, only_one: bool = False, parsers: OutputParsers | None = None
    ) -> list[Request]:
        """A request for each completion of each prompt (see `LLM.generate`). UsageError: one of them cannot be served.

        parsers: those that take answers of conversations apart; None: those that fit the model's chat template.
        """
        prompts = [read_prompt(given)] if only_one else read_prompts(given)
        given_params = self.default_params() if params is None else params
        # A request keeps a copy of its own. UsageError: a value that was changed is wrong.
        each = [one.checked() for one in read_params(given_params, len(prompts))]
        requests: list[Request] = []
        for prompt, one in zip(prompts, each, strict=True):
            self._check_params(one)
            encoded = self.encode(prompt)
            self._check_ids(encoded.token_ids, is_text=isinstance(prompt, str))
            reasoning = self._reasoning(prompt, one, parsers)
            request_id = str(next(self.ids))
            for number, completion in enumerate(_each_completion(one)):
                requests.append(
                    Request(
                        prompt_ids=encoded.token_ids,
                        params=completion,
                        tokenizer=self.tokenizer,
                        prompt=encoded.text,
                        index=len(requests),
                        number=number,
                        constraint=self._constraint(completion, encoded.token_ids, reasoning),
                        request_id=request_id,
                    )
                )
        for request in requests:
            if request.params.seed is None:
                request.engine_seed = self.seeds.draw()
        return requests

    def encode(self, prompt: str | list[int] | ChatPrompt) -> EncodedPrompt:
        """The token ids of a prompt, unchecked. UsageError: text without a tokenizer, text that is far too long, or a
        conversation that the chat template refuses.
        """
        if isinstance(prompt, list):
            return EncodedPrompt(prompt)
        if isinstance(prompt, ChatPrompt):
            return self.chat_renderer.render(prompt)
        if self.tokenizer is None:
            raise UsageError(self.no_tokenizer)
        return EncodedPrompt(self.tokenizer.encode(prompt, max_tokens=self.max_model_len), prompt)

    @functools.cached_property
    def constraints(self) -> AnswerConstraints:
        """What holds answers to a form. UsageError: the model has no tokenizer."""
        if self.tokenizer is None:
            raise UsageError("structured_outputs needs text, and this model has no tokenizer; leave it out")
        grammars = GrammarCompiler(self.tokenizer, self.vocab_size, self.eos_ids)
        return AnswerConstraints(self.tokenizer, self.vocab_size, grammars)

    def _constraint(
        self, params: SamplingParams, ids: list[int], reasoning: MakeReasoning | None
    ) -> TokenConstraint | None:
        return self.constraints.make(params, ids, reasoning) if is_constrained(params) else None

    def _reasoning(
        self, prompt: object, params: SamplingParams, parsers: OutputParsers | None
    ) -> type[ReasoningParser] | None:
        """The parser of the reasoning that an answer may begin with, where it matters: of conversations with a form."""
        if not isinstance(prompt, ChatPrompt) or not is_constrained(params):
            return None
        return (parsers or choose_parsers(self.chat_renderer.template_text)).reasoning

    @property
    def chat_renderer(self) -> ChatRenderer:
        """What renders conversations for this model. UsageError: it has no tokenizer."""
        if self.chat is None:
            raise UsageError(self.no_tokenizer)
        return self.chat

    def _check_ids(self, ids: list[int], is_text: bool) -> None:
        """UsageError: a prompt is empty, too long, or has a token id out of range."""
        if not ids and is_text:
            raise UsageError("a prompt is empty; give it at least one character")
        if not ids:
            raise UsageError("a prompt has no tokens; give it at least one")
        check_fits(ids, self.max_model_len)
        self._check_range("", ids)

    def _check_params(self, params: SamplingParams) -> None:
        """UsageError: parameters that are about tokens or text do not go with this model."""
        biases_of(params, self.eos_ids)  # refuses here what would not fit into a slot
        self._check_range("logit_bias of ", params.logit_bias or ())
        self._check_range("stop_token_ids with ", params.stop_token_ids)
        if params.stop and self.tokenizer is None:
            raise UsageError("stop strings need text, and this model has no tokenizer; give stop_token_ids")

    def _check_range(self, what: str, token_ids: Collection[int]) -> None:
        for token in (min(token_ids), max(token_ids)) if token_ids else ():
            if not 0 <= token < self.vocab_size:
                vocabulary = f"the vocabulary has ids 0 to {self.vocab_size - 1}"
                raise UsageError(f"{what}token id {shown(token)} is out of range; {vocabulary}")


def check_fits(ids: list[int], max_model_len: int) -> None:
    """UsageError: a prompt leaves no room for a completion."""
    if len(ids) >= max_model_len:
        raise UsageError(
            f"a prompt of {len(ids)} tokens leaves no room in a context of {max_model_len}; "
            "shorten it or raise --max-model-len"
        )


def check_max_tokens(request: Request, max_model_len: int) -> None:
    """UsageError: the tokens asked for do not fit into the context behind the prompt."""
    asked, length = request.params.max_tokens, len(request.prompt_ids)
    if asked is not None and asked > max_model_len - length:
        raise UsageError(
            f"max_tokens is {asked}; a prompt of {length} tokens leaves room for 1 to {max_model_len - length} "
            f"in a context of {max_model_len}"
        )


def _each_completion(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of the `n` completions. With a seed, each has the seed plus its number, as in vLLM."""
    if params.n == 1:
        return [params]
    seeds = [None if params.seed is None else _wrapped(params.seed + number) for number in range(params.n)]
    return [replace(params, n=1, seed=seed) for seed in seeds]


def _wrapped(seed: int) -> int:
    """A seed of 64 bits with a sign: the number after the largest is the smallest."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def open_input_processor(args: EngineArgs) -> InputProcessor:
    """The input processor of a model whose weights are not read: its config and tokenizer suffice. The context is the longest
    that the engine may choose. UsageError, ModelError: the arguments cannot be served.
    """
    checkpoint = open_checkpoint(args.model, "dummy", revision=args.revision)
    longest = choose_model_len(args.max_model_len, checkpoint.config)
    return load_input_processor(checkpoint, longest, args, find_tokenizer(args, checkpoint))


def load_input_processor(
    checkpoint: Checkpoint,
    max_model_len: int,
    args: EngineArgs,
    tokenizer_files: ModelFiles | None = None,
    *,
    skip_tokenizer: bool = False,
) -> InputProcessor:
    """The input processor of a model; one without a tokenizer serves token ids. `tokenizer_files`: None: the model's own.
    ModelError: its files are damaged. UsageError: the files named instead have no tokenizer.
    """
    files = tokenizer_files or checkpoint
    model: dict[str, Any] = {
        "vocab_size": checkpoint.config.vocab_size,
        "max_model_len": max_model_len,
        "eos_ids": end_tokens(checkpoint, files),
        "sampling_defaults": sampling_defaults(checkpoint, args.generation_config),
        "seeds": RequestSeeds(args.seed),
    }
    if skip_tokenizer:
        return InputProcessor(**model)
    try:
        tokenizer = load_tokenizer(files)
        chat = ChatRenderer(files, tokenizer, max_model_len)
        return InputProcessor(**model, tokenizer=tokenizer, chat=chat)
    except ModelError:
        raise
    except UsageError as error:  # there is none
        if files is not checkpoint:
            raise
        return InputProcessor(**model, no_tokenizer=str(error))
