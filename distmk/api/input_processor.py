"""Prompts checked and turned into requests, for which a model's config and tokenizer suffice: its weights stay unread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distmk.api.prompts import read_params, read_prompt, read_prompts
from distmk.api.request_seeds import RequestSeeds
from distmk.backends.defaults import choose_model_len
from distmk.engine.engine import EngineArgs
from distmk.engine.generation_config import sampling_defaults
from distmk.engine.request import Request, make_requests
from distmk.engine.sampling_params import SamplingParams
from distmk.engine.sampling_slot import biases_of
from distmk.errors import ModelError, UsageError
from distmk.text.chat.messages import ChatPrompt
from distmk.text.chat.render import ChatRenderer
from distmk.text.tokenizer import Tokenizer, load_tokenizer
from distmk.text.tokenizer_files import end_tokens, find_tokenizer
from distmk.weights import Checkpoint, open_checkpoint
from distmk.weights.checkpoint import ModelFiles


@dataclass(frozen=True)
class InputProcessor:
    """Makes requests for one model. `no_tokenizer`: what to say of a prompt of text if there is no tokenizer. `eos_ids`: the
    model's end tokens. `sampling_defaults`: see `generation_config`. `seeds`: for requests without a seed of their own.
    """

    vocab_size: int
    max_model_len: int
    tokenizer: Tokenizer | None = None
    no_tokenizer: str = "this model has no tokenizer; give token ids"
    chat: ChatRenderer | None = None  # where there is a tokenizer
    eos_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    seeds: RequestSeeds = field(default_factory=lambda: RequestSeeds(None))

    def default_params(self) -> SamplingParams:
        """The parameters of a prompt that comes without any."""
        return SamplingParams(**self.sampling_defaults)

    def make_requests(self, given: object, params: object, only_one: bool = False) -> list[Request]:
        """A request for each completion of each prompt (see `LLM.generate`). UsageError: one of them cannot be served."""
        prompts = [read_prompt(given)] if only_one else read_prompts(given)
        given_params = self.default_params() if params is None else params
        # A request keeps a copy of its own. UsageError: a value that was changed is wrong.
        each = [one.checked() for one in read_params(given_params, len(prompts))]
        if self.tokenizer is None and any(isinstance(p, str | ChatPrompt) for p in prompts):
            raise UsageError(self.no_tokenizer)
        rendered = [self.chat_renderer.render(p) if isinstance(p, ChatPrompt) else p for p in prompts]
        model = (self.tokenizer, self.vocab_size, self.max_model_len)
        requests: list[Request] = []
        for prompt, one in zip(rendered, each, strict=True):
            biases_of(one, self.eos_ids)  # refuses here what would not fit into a slot
            requests += make_requests(prompt, one, *model, len(requests))
        for request in requests:
            if request.params.seed is None:
                request.engine_seed = self.seeds.draw()
        return requests

    @property
    def chat_renderer(self) -> ChatRenderer:
        """What renders conversations for this model. UsageError: it has no tokenizer."""
        if self.chat is None:
            raise UsageError(self.no_tokenizer)
        return self.chat


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
    """The input processor of a model; one without a tokenizer serves token ids. `tokenizer_files`: None: those of the model.
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
