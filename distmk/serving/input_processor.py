"""Prompts checked and turned into requests, for which a model's config and tokenizer suffice: its weights stay unread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distmk.errors import ModelError, UsageError
from distmk.serving.chat.messages import ChatPrompt
from distmk.serving.chat.render import ChatRenderer
from distmk.serving.generation_config import sampling_defaults
from distmk.serving.prompts import read_params, read_prompt, read_prompts
from distmk.serving.requests import Request, make_requests
from distmk.serving.sampling import SamplingParams
from distmk.serving.sampling_slot import biases_of
from distmk.serving.tokenizer import Tokenizer, load_tokenizer
from distmk.weights import Checkpoint


@dataclass(frozen=True)
class InputProcessor:
    """Makes requests for one model. `no_tokenizer`: what to say of a prompt of text if there is no tokenizer. `eos_ids`: the
    model's end tokens. `sampling_defaults`: see `generation_config`.
    """

    vocab_size: int
    max_model_len: int
    tokenizer: Tokenizer | None = None
    no_tokenizer: str = "this model has no tokenizer; give token ids"
    chat: ChatRenderer | None = None  # where there is a tokenizer
    eos_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)

    def default_params(self) -> SamplingParams:
        """The parameters of a prompt that comes without any."""
        return SamplingParams(**self.sampling_defaults)

    def make_requests(self, given: object, params: object, only_one: bool = False) -> list[Request]:
        """A request for each completion of each prompt (see `LLM.generate`). UsageError: one of them cannot be served."""
        prompts = [read_prompt(given)] if only_one else read_prompts(given)
        each = read_params(self.default_params() if params is None else params, len(prompts))
        if self.tokenizer is None and any(isinstance(p, str | ChatPrompt) for p in prompts):
            raise UsageError(self.no_tokenizer)
        rendered = [self.chat_renderer.render(p) if isinstance(p, ChatPrompt) else p for p in prompts]
        model = (self.tokenizer, self.vocab_size, self.max_model_len)
        requests: list[Request] = []
        for prompt, one in zip(rendered, each, strict=True):
            biases_of(one, self.eos_ids)  # refuses here what would not fit into a slot
            requests += make_requests(prompt, one, *model, len(requests))
        return requests

    @property
    def chat_renderer(self) -> ChatRenderer:
        """What renders conversations for this model. UsageError: it has no tokenizer."""
        if self.chat is None:
            raise UsageError(self.no_tokenizer)
        return self.chat


def load_input_processor(
    checkpoint: Checkpoint, max_model_len: int, generation_config: str = "auto", skip_tokenizer: bool = False
) -> InputProcessor:
    """The input processor of a model; one without a tokenizer serves token ids. ModelError: its files are damaged."""
    config = checkpoint.config
    model: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "max_model_len": max_model_len,
        "eos_ids": config.eos_token_ids,
        "sampling_defaults": sampling_defaults(checkpoint, generation_config),
    }
    if skip_tokenizer:
        return InputProcessor(**model)
    try:
        tokenizer = load_tokenizer(checkpoint)
        chat = ChatRenderer(checkpoint, tokenizer, max_model_len)
        return InputProcessor(**model, tokenizer=tokenizer, chat=chat)
    except ModelError:
        raise
    except UsageError as error:  # there is none
        return InputProcessor(**model, no_tokenizer=str(error))
