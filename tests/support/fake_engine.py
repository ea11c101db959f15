"""An engine without a model, for tests of what stands in front of one: tokens from a seeded generator, in a thread."""

from __future__ import annotations

import functools
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.random_answers import RandomWriter, Writer, allowed_tokens
from support.word_tokenizer import EOS, WORDS, word_tokenizer

from distmk.api.input_processor import InputProcessor
from distmk.engine.logprobs import make_logprob
from distmk.engine.request import Deliver, Request
from distmk.engine.sampling_params import SamplingParams
from distmk.engine.stats import EngineStats
from distmk.engine.token_output import Logprob, TokenOutput
from distmk.errors import DistmkError, UsageError
from distmk.text.chat.messages import ChatOptions, ChatPrompt
from distmk.text.chat.tools import read_tools
from distmk.text.token_speller import TokenSpeller
from distmk.text.tokenizer import EncodedPrompt

PAGE_TOKENS = 16
END_CHANCE = 0.02


@dataclass(eq=False)
class FakeSlot:
    """A request, and what the engine needs to make up its tokens."""

    request: Request
    deliver: Deliver
    rng: random.Random
    speller: TokenSpeller
    writer: Writer  # of answers that have a form
    num_tokens: int = 0
    since_s: float = field(default_factory=time.monotonic)  # when it was submitted
    character: list[int] = field(default_factory=list)  # the rest of one that was begun

    @property
    def num_pages(self) -> int:
        return -(-(len(self.request.prompt_ids) + self.num_tokens) // PAGE_TOKENS)


@dataclass
class FakeChat:
    """What stands in for a `ChatRenderer`."""

    engine: FakeEngine

    @property
    def template_text(self) -> str:
        return self.engine.template

    def render(self, prompt: ChatPrompt) -> EncodedPrompt:
        options = {name: getattr(prompt, name) for name in ChatOptions.__annotations__}
        return EncodedPrompt(self.engine.render_chat(prompt.messages, **options))


class FakeEngine:
    """An `EngineClient`. `tick_s`: the time of an iteration; 0: as fast as it goes."""

    def __init__(self, tick_s: float = 0.0, max_num_seqs: int = 16, max_model_len: int = 4096) -> None:
        self.tokenizer = word_tokenizer()
        self.max_model_len = max_model_len
        self.model = "models/fake"
        self.max_num_seqs = max_num_seqs
        self.sampling_defaults: dict[str, Any] = {"temperature": 1.0}
        self.tick_s = tick_s
        self.template = ""  # what parsers are chosen by
        self.prompt_end = ""  # behind "assistant:"
        self.says: str | None = None  # what every answer is, instead of random words
        self.writer: Writer | None = None  # of answers that have a form; None: a random one
        self.num_cached_tokens = 0  # of every prompt that has so many
        self.num_submitted = 0
        self.num_cancelled = 0
        self.fails_behind: int | None = None  # tokens of every request, which then fails alone
        self.params: list[SamplingParams] = []  # of all requests so far
        self.prompts: list[list[int]] = []
        self._eos = self.tokenizer.encode(EOS)[0]
        self._words = [self.tokenizer.encode(f" {word}")[0] for word in WORDS]
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._waiting: list[FakeSlot] = []
        self._running: list[FakeSlot] = []
        self._error: DistmkError | None = None
        self._closed = False
        self._totals = {"num_iterations": 0, "num_prompt_tokens": 0, "num_generated_tokens": 0}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def num_left(self) -> int:
        """Requests that have a slot or wait for one."""
        with self._lock:
            return len(self._waiting) + len(self._running)

    @functools.cached_property
    def inputs(self) -> InputProcessor:
        chat: Any = FakeChat(self)
        return InputProcessor(
            self._eos + 1,
            self.max_model_len,
            tokenizer=self.tokenizer,
            chat=chat,
            eos_ids=(self._eos,),
            sampling_defaults=self.sampling_defaults,
        )

    def add_request(self, request: Request, deliver: Deliver) -> None:
        prompt, params = request.prompt_ids, request.params
        number = next(self._numbers) if params.temperature else str(prompt)
        rng = random.Random(number if params.seed is None else params.seed)
        writer = self.writer or RandomWriter(self.tokenizer, self._eos + 1, {self._eos}, rng)
        slot = FakeSlot(request, deliver, rng, TokenSpeller(self.tokenizer, context=prompt), writer)
        if params.prompt_logprobs is not None:
            speller = TokenSpeller(self.tokenizer, context=prompt[:1])
            later = [self._logprobs(speller, token, params.prompt_logprobs) for token in prompt[1:]]
            request.prompt_logprobs = [None, *later]
        with self._lock:
            if self._error is not None:
                raise self._error
            request.num_cached_tokens = min(self.num_cached_tokens, len(prompt))
            self._waiting.append(slot)
            self.params.append(params)
            self.prompts.append(prompt)
            self.num_submitted += 1
            self._totals["num_prompt_tokens"] += len(prompt)
        self._work.set()

    def cancel(self, *requests: Request) -> None:
        with self._lock:
            cancelled = [slot for slot in (*self._waiting, *self._running) if slot.request in requests]
            for slot in cancelled:
                (self._waiting if slot in self._waiting else self._running).remove(slot)
            self.num_cancelled += len(cancelled)
        for slot in cancelled:
            slot.deliver(TokenOutput(slot.request.index, -1, "", "abort"))

    def stats(self) -> EngineStats:
        with self._lock:
            if self._error is not None:
                raise self._error
            used = sum(slot.num_pages for slot in self._running)
            num_pages = self.max_num_seqs * self.max_model_len // PAGE_TOKENS
            counts = (len(self._running), len(self._waiting), num_pages, num_pages - used)
            now_s = time.monotonic()
            return EngineStats(
                *counts,
                iteration_ms=1e3 * self.tick_s,
                num_preemptions=0,
                num_prefix_hits=0,
                oldest_waiting_s=max((now_s - slot.since_s for slot in self._waiting), default=0.0),
                **self._totals,
            )

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        if unknown := set(options.get("chat_template_kwargs") or {}) - {"enable_thinking"}:
            raise UsageError(f"chat_template_kwargs has {sorted(unknown)[0]!r}, which the template does not know")
        said = [
            "" if message.get("tool_calls") and not message.get("content") else _content(message, f"message {index}")
            for index, message in enumerate(messages)
        ]
        if not said:
            raise UsageError("the conversation has no messages; give at least one")
        if said[-1] == "refuse me":
            raise UsageError("the chat template refuses the messages")
        text = "".join(f"{message['role']}: {content}\n" for message, content in zip(messages, said, strict=True))
        if options.get("continue_final_message"):
            text = text.removesuffix("\n")
        generates = options.get("add_generation_prompt", True)
        text = (options.get("chat_template") or "") + text + (f"assistant:{self.prompt_end}" if generates else "")
        text = "".join(f"tool: {tool['function']['name']}\n" for tool in read_tools(options.get("tools") or [])) + text
        return self.tokenizer.encode(text, max_tokens=self.max_model_len)

    def fail(self, error: DistmkError) -> None:
        """End the engine, as when a rank is lost."""
        with self._lock:
            self._error = error
            left, self._waiting, self._running = [*self._waiting, *self._running], [], []
        for slot in left:
            slot.deliver(error)

    def close(self) -> None:
        self._closed = True
        self._work.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            if not self._step():
                self._work.wait(0.05)
                self._work.clear()
            elif self.tick_s:
                time.sleep(self.tick_s)

    def _step(self) -> bool:
        """One iteration: a token for every running request."""
        with self._lock:
            while self._waiting and len(self._running) < self.max_num_seqs:
                self._running.append(self._waiting.pop(0))
            batch = list(self._running)
            self._totals["num_iterations"] += bool(batch)
        for slot in batch:
            output = self._token(slot) if slot.num_tokens != self.fails_behind else _failure(slot)
            with self._lock:
                if slot not in self._running:
                    continue  # cancelled meanwhile
                self._totals["num_generated_tokens"] += 1
                if output.finish_reason:
                    self._running.remove(slot)
            slot.deliver(output)
        return bool(batch)

    def _token(self, slot: FakeSlot) -> TokenOutput:
        request, params, rng = slot.request, slot.request.params, slot.rng
        slot.num_tokens += 1
        ends = not params.ignore_eos and slot.num_tokens > max(1, params.min_tokens) and rng.random() < END_CHANCE
        if request.constraint is not None:
            token_id = slot.writer.choose(allowed_tokens(request.constraint, self._eos + 1))
            request.constraint.accept(token_id)
            return self._output(slot, token_id)
        if self.says is not None and slot.num_tokens == 1:
            slot.character = [*self.tokenizer.encode(self.says), self._eos]
        if slot.character:
            token_id = slot.character.pop(0)
        elif ends:
            token_id = self._eos
        elif rng.random() < 0.1:
            token_id, *slot.character = self.tokenizer.encode(rng.choice("é漢🙂"))
        else:
            token_id = rng.choice(self._words)
        return self._output(slot, token_id)

    def _output(self, slot: FakeSlot, token_id: int) -> TokenOutput:
        request, params = slot.request, slot.request.params
        full = slot.num_tokens >= min(request.max_tokens, self.max_model_len - len(request.prompt_ids))
        finish = "stop" if token_id == self._eos else "length" if full else None
        assert request.decoder is not None
        text, reason = request.decoder.push(token_id, finish)
        logprobs = None if params.logprobs is None else self._logprobs(slot.speller, token_id, params.logprobs)
        return TokenOutput(request.index, token_id, text, reason, logprobs, request.decoder.stop_string)

    def _logprobs(self, speller: TokenSpeller, token_id: int, num_top: int) -> dict[int, Logprob]:
        """Of the next token, which `speller` has behind it then."""
        others = [word for word in self._words if word != token_id][:num_top]
        ranked = [token_id, *others][: max(1, num_top)]
        made = {each: make_logprob(each, -0.5 - rank, rank + 1, speller) for rank, each in enumerate(ranked)}
        if num_top and token_id % 3 == 0:  # not among the best
            made = {token_id: make_logprob(token_id, -5.0, num_top + 5, speller)}
            made |= {each: make_logprob(each, -0.5 - rank, rank + 1, speller) for rank, each in enumerate(others)}
            ranked = others
        if num_top > 1:
            made[ranked[-1]] = make_logprob(ranked[-1], -math.inf, len(ranked), speller)
        speller.push(token_id)
        return made


def _failure(slot: FakeSlot) -> TokenOutput:
    """The end of a request that fails alone."""
    return TokenOutput(slot.request.index, -1, "", "error", error="the constraint failed: ValueError: no such way")


def _content(message: Mapping[str, Any], what: str) -> str:
    """The text of a message. UsageError: it is none, as an `LLM` says."""
    content = message.get("content")
    if message.get("role") not in ("system", "developer", "user", "assistant", "tool"):
        raise UsageError(f"{what} has the role {message.get('role')!r}")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UsageError(f"{what} has no content")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UsageError(f"the content of {what} is not text")
    return "\n".join(part["text"] for part in content)


def until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    """Wait for a condition. AssertionError: it does not come."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come"
        time.sleep(0.01)
