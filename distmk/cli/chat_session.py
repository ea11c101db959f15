"""A conversation in a terminal: its messages so far, the commands, and the answers."""

from __future__ import annotations

import contextlib
from typing import Any

from distmk.api.llm import LLM
from distmk.console import show, tell, write_generated
from distmk.engine.sampling_params import SamplingParams
from distmk.errors import UsageError, shown

COMMANDS = {
    "/reset": "begin a new conversation, with the same system message",
    "/system TEXT": "begin a new one with TEXT as the system message; without TEXT, with none",
    "/help": "list the commands",
    "/exit": "leave, as Ctrl-D does",
    "//TEXT": "say /TEXT",
}


class ChatSession:
    """One conversation with a model; `take` gets the user's lines. `stops_answers`: Ctrl-C ends only the answer."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, *, stops_answers: bool) -> None:
        self._llm = llm
        self._params = params
        self._stops_answers = stops_answers
        self._begin(system)

    def _begin(self, system: str | None) -> None:
        self._system = system
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []

    def take(self, line: str) -> bool:
        """Do what a line says. Returns False to leave. UsageError: it cannot be done; the conversation is unchanged."""
        if not line.strip():
            return True
        if not line.startswith("/") or line.startswith("//"):
            self._ask(line[1:] if line.startswith("//") else line)
            return True
        name, _, text = line.strip().partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/reset":
            self._begin(self._system)
            tell("a new conversation")
        elif name == "/system":
            self._begin(text.strip() or None)
            tell(f"a new conversation, {'with this' if self._system else 'without a'} system message")
        elif name == "/help":
            show("\n".join(f"{command:<14} {what}" for command, what in COMMANDS.items()))
        else:
            raise UsageError(f"{shown(name)} is no command; /help lists them, and //TEXT says /TEXT")
        return True

    def _ask(self, text: str) -> None:
        """Write the model's answer, and keep question and answer. If it is stopped, the part so far is kept."""
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            self._write_answer(self._prompt_ids(), pieces)
        except KeyboardInterrupt:
            if not self._stops_answers:
                raise
            show("\n[stopped]")
        except BaseException:
            self.messages = before
            raise
        if answer := "".join(pieces):
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.messages = before

    def _prompt_ids(self) -> list[int]:
        ids = self._llm.render_chat(self.messages)
        if len(ids) >= self._llm.max_model_len:
            raise UsageError(
                f"the conversation has {len(ids)} tokens, and the context {self._llm.max_model_len}: /reset begins a new one, "
                "and --max-model-len N makes room"
            )
        return ids

    def _write_answer(self, ids: list[int], pieces: list[str]) -> None:
        """Stream the answer to stdout and into `pieces`."""
        num_tokens, finish_reason = 0, None
        with contextlib.closing(self._llm.run(self._llm.make_requests([ids], self._params))) as tokens:
            for token in tokens:
                num_tokens, finish_reason = num_tokens + 1, token.finish_reason
                pieces.append(token.text)
                write_generated(token.text)
        show("")
        if finish_reason == "length":
            full = self._params.max_tokens is None or num_tokens < self._params.max_tokens
            advice = (
                "the context is full, and /reset begins a new conversation" if full else "--max-tokens N allows more"
            )
            tell(f"the answer was cut off after {num_tokens} tokens: {advice}")
