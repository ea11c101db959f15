"""The chat page in a browser without a display: a Chromium of the system (Debian's package `chromium`), or playwright's."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from support.fake_engine import FakeEngine, FakeSlot, until
from support.served import Served

from distmk.engine.token_output import TokenOutput
from distmk.errors import UsageError

SCREENS = [{"width": 320, "height": 568}, {"width": 768, "height": 1024}, {"width": 1280, "height": 720}]
ENDED = "document.body.dataset.state === 'idle'"


class StrictEngine(FakeEngine):
    """Its chat template refuses conversations that do not alternate, while `is_strict`. Tokens come only while `goes` is set."""

    def __init__(self, **options: Any) -> None:
        self.goes = threading.Event()
        self.goes.set()
        self.is_strict = True
        super().__init__(**options)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        for index, message in enumerate(messages if self.is_strict else ()):
            if message["role"] != ("user", "assistant")[index % 2]:
                raise UsageError("conversation roles must alternate user/assistant/user/assistant")
        return super().render_chat(messages, **options)

    def asked(self) -> str:
        """The last prompt."""
        return self.tokenizer.decode(self.prompts[-1])

    def _token(self, slot: FakeSlot) -> TokenOutput:
        self.goes.wait(10)
        return super()._token(slot)


def texts(node: Any, selector: str = ".turn .text") -> list[str]:
    """What the elements of a page, or of a part of it, show; by default what was said."""
    found: list[str] = node.locator(selector).all_inner_texts()
    return found


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; without one, the test is skipped."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no browser; install Debian's chromium: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


def until_true(page: Any, expression: str) -> None:
    """Wait until an expression is true in the page, whose policy forbids that the page itself evaluates text."""
    until(lambda: bool(page.evaluate(expression)), 10)


def open_page(browser: Any, server: Served, **options: Any) -> tuple[Any, list[str]]:
    """The page, and what went wrong on it so far: errors, violations of its policy, dialogs, requests to elsewhere."""
    page = browser.new_page(**options)
    page.set_default_timeout(10_000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.on("console", lambda message: "Policy" in message.text and wrong.append(message.text))
    page.on(
        "request", lambda request: request.url.startswith((server.url, "data:", "blob:")) or wrong.append(request.url)
    )
    page.goto(server.url)
    until_true(page, "Boolean(document.body.dataset.model)")
    return page, wrong


def ask(page: Any, text: str) -> None:
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")


def answer_to(page: Any, text: str) -> None:
    """Ask, and wait until the answer is whole, or failed."""
    ask(page, text)
    until_true(page, ENDED)


def stop_when_it_streams(page: Any) -> None:
    page.wait_for_selector(".assistant .text.streaming > *")
    page.locator("#send").click()
    until_true(page, ENDED)


def kept_chats(page: Any) -> list[dict[str, Any]]:
    """The chats that the browser keeps, the newest first."""
    names = "Object.keys(localStorage).filter(name => name.startsWith('distmk.chat.'))"
    chats = [json.loads(text) for text in page.evaluate(f"{names}.map(name => localStorage.getItem(name))")]
    return sorted(chats, key=lambda chat: -chat["updated"])


def assert_in_sight(page: Any, *selectors: str) -> None:
    """AssertionError: one of the elements is not, or not wholly, on the screen."""
    size = page.viewport_size
    for selector in selectors:
        box = page.locator(selector).bounding_box()
        assert box is not None and box["width"] > 0, f"{selector} is hidden"
        assert box["x"] >= 0 and box["x"] + box["width"] <= size["width"], f"{selector} leaves the screen: {box}"
        assert box["y"] >= 0 and box["y"] + box["height"] <= size["height"], f"{selector} leaves the screen: {box}"
