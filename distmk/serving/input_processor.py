"""Prompts checked and turned into requests, for which a model's config and tokenizer suffice: its weights stay unread."""

from __future__ import annotations

from dataclasses import dataclass

from distmk.errors import ModelError, UsageError
from distmk.serving.chat.messages import ChatPrompt
from distmk.serving.chat.render import ChatRenderer
from distmk.serving.prompts import read_params, read_prompt, read_prompts
from distmk.serving.requests import Request, make_request
from distmk.serving.sampling import SamplingParams, shown
from distmk.serving.tokenizer import Tokenizer, load_tokenizer
from distmk.weights import Checkpoint

_PLAIN = SamplingParams()
_NOT_SERVED = ("n", "logprobs", "prompt_logprobs")


@dataclass(frozen=True)
class InputProcessor:
    """Makes requests for one model. `no_tokenizer`: what to say of a prompt of text if there is no tokenizer."""

    vocab_size: int
    max_model_len: int
    tokenizer: Tokenizer | None = None
    no_tokenizer: str = "this model has no tokenizer; give token ids"
    chat: ChatRenderer | None = None  # where there is a tokenizer

    def make_requests(self, given: object, params: object, only_one: bool = False) -> list[Request]:
        """A request for each prompt (see `LLM.generate`). UsageError: one of them cannot be served."""
        prompts = [read_prompt(given)] if only_one else read_prompts(given)
        each = read_params(params, len(prompts))
        for one in each:
            _refuse_unserved(one)
        if self.tokenizer is None and any(isinstance(p, str | ChatPrompt) for p in prompts):
            raise UsageError(self.no_tokenizer)
        rendered = [self.chat_renderer.render(p) if isinstance(p, ChatPrompt) else p for p in prompts]
        model = (self.tokenizer, self.vocab_size, self.max_model_len)
        pairs = zip(rendered, each, strict=True)
        return [make_request(prompt, params, *model, index) for index, (prompt, params) in enumerate(pairs)]

    @property
    def chat_renderer(self) -> ChatRenderer:
        """What renders conversations for this model. UsageError: it has no tokenizer."""
        if self.chat is None:
            raise UsageError(self.no_tokenizer)
        return self.chat


def _refuse_unserved(params: SamplingParams) -> None:
    """UsageError: something is asked for that nothing here gives."""
    for name in _NOT_SERVED:
        if (value := getattr(params, name)) != getattr(_PLAIN, name):
            raise UsageError(f"{name} is {shown(value)}, which is not supported yet; leave it out")


def load_input_processor(checkpoint: Checkpoint, max_model_len: int) -> InputProcessor:
    """The input processor of a model; one without a tokenizer serves token ids. ModelError: its tokenizer is damaged."""
    vocab_size = checkpoint.config.vocab_size
    try:
        tokenizer = load_tokenizer(checkpoint)
        return InputProcessor(vocab_size, max_model_len, tokenizer, chat=ChatRenderer(checkpoint, tokenizer))
    except ModelError:
        raise
    except UsageError as error:  # there is none
        return InputProcessor(vocab_size, max_model_len, no_tokenizer=str(error))
