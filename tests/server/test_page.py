"""The page at /, in a real browser without a display."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.fake_engine import FakeEngine, until
from support.served import Served, served

sync_api = pytest.importorskip("playwright.sync_api")

SAYS = (
    "Birds sing in the **forest**:\n```python\nprint('<b>tweet</b>')\n```\nThe `cat` <img src=x onerror=alert(1)> sat."
)


@pytest.fixture(scope="module")
def slow() -> Iterator[Served]:
    with served(FakeEngine(tick_s=0.005)) as running:
        yield running
        running.settled()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium: of the system, or of playwright."""
    with sync_api.sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


def until_true(page: Any, expression: str) -> None:
    """Wait until an expression is true in the page, whose policy forbids that the page itself evaluates text."""
    until(lambda: bool(page.evaluate(expression)), 10)


def open_page(browser: Any, server: Served, **options: Any) -> tuple[Any, list[str]]:
    """The page, and what went wrong on it so far: errors, dialogs, and requests that leave the server."""
    page = browser.new_page(**options)
    page.set_default_timeout(10_000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.on("request", lambda request: request.url.startswith((server.url, "data:")) or wrong.append(request.url))
    page.goto(server.url)
    until_true(page, "model !== null")
    return page, wrong


def test_a_conversation_by_keyboard(browser: Any, slow: Served) -> None:
    """A question, its answer as it comes, its numbers; text of the model is no markup; a second question has the first's."""
    page, wrong = open_page(browser, slow)
    slow.engine.says = SAYS
    assert page.locator("#prompt").evaluate("box => box === document.activeElement")
    page.keyboard.type("Where do")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("birds sing?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".assistant .text.streaming")
    assert page.locator("#send").inner_text() == "Stop"
    page.wait_for_selector("button.again")
    assert page.locator(".user .text").inner_text() == "Where do\nbirds sing?"
    answer = page.locator(".assistant .text")
    assert answer.locator("strong").inner_text() == "forest"
    assert answer.locator("pre").inner_text() == "print('<b>tweet</b>')"
    assert answer.locator("img, b").count() == 0 and "<img src=x onerror=alert(1)>" in answer.inner_text()
    assert re.search(r"\d+ ms to first token\s+[\d.]+ tokens/s\s+\d+ tokens", page.locator(".facts").inner_text())
    page.keyboard.type("And now?")
    page.keyboard.press("Enter")
    until_true(page, "messages.length === 4")
    text = "user: Where do\nbirds sing?\nassistant: " + SAYS + "\nuser: And now?\nassistant:"
    assert slow.engine.prompts[-1] == slow.engine.tokenizer.encode(text)
    # What the model is asked again has no longer the answer.
    page.locator("button.again").last.click()
    until_true(page, "messages.length === 4 && answering === null")
    assert slow.engine.prompts[-1] == slow.engine.tokenizer.encode(text)
    assert page.locator(".turn").count() == 4
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0 and page.locator("#empty").is_visible()
    assert not wrong
    page.close()


def test_stop_and_settings(browser: Any, slow: Served) -> None:
    """Settings reach the engine; Escape and the button stop an answer, which stays; the panel shows the kernel at work."""
    page, wrong = open_page(browser, slow)
    slow.engine.says = None
    page.locator("#temperature").fill("1.5")
    for name, value in {"top_k": "7", "seed": "5", "stop": "never", "system": "Be brief."}.items():
        page.locator(f"#{name}").fill(value)
    slow.engine.says = "word " * 3000
    for stop in (lambda: page.keyboard.press("Escape"), lambda: page.locator("#send").click()):
        page.locator("#prompt").fill("Tell me more")
        page.keyboard.press("Enter")
        until_true(page, "document.querySelector('#running').textContent.startsWith('1 ')")
        assert page.locator("#state").inner_text() == "generating"
        stop()
        until_true(page, "answering === null")
        slow.settled()
        assert "stopped by you" in page.locator(".facts").last.inner_text()
    params = slow.engine.params[-1]
    assert (params.temperature, params.top_k, params.seed, list(params.stop)) == (1.5, 7, 5, ["never"])
    assert slow.engine.tokenizer.decode(slow.engine.prompts[-1]).startswith("system: Be brief.\nuser: Tell")
    page.reload()
    assert page.locator("#temperature").input_value() == "1.5", "settings are kept"
    page.get_by_role("button", name="Reset").click()
    assert page.locator("#temperature").input_value() == "0.7" and page.locator("#system").input_value() == ""
    assert not wrong
    page.close()


def test_what_goes_wrong_is_said(browser: Any) -> None:
    """A wrong key, a request that is refused, a server that is gone."""
    with served(FakeEngine(), api_keys=("secret",)) as server:
        page, wrong = open_page(browser, server)
        page.locator("#prompt").fill("hello")
        page.keyboard.press("Enter")
        assert "wrong or missing API key" in page.locator(".problem").inner_text()
        page.locator("#key").fill("secret")
        page.locator("#prompt").fill("refuse me")
        page.keyboard.press("Enter")
        until_true(page, "document.querySelectorAll('.problem').length === 2")
        assert "the chat template refuses the messages" in page.locator(".problem").last.inner_text()
    page.wait_for_selector("#gone:not([hidden])")
    page.locator("#prompt").fill("hello")
    page.keyboard.press("Enter")
    until_true(page, "document.querySelectorAll('.problem').length === 3")
    assert page.locator(".problem").last.inner_text() == "The server does not answer."
    assert not wrong
    page.close()


def test_narrow_and_dark(browser: Any, slow: Served) -> None:
    """On a phone the panel is a drawer, nothing is wider than the screen, and the theme is the system's until one is chosen."""
    page, wrong = open_page(browser, slow, viewport={"width": 360, "height": 640}, color_scheme="dark")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.locator("#theme").click()
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert not page.locator("#temperature").is_visible()
    page.get_by_role("button", name="Settings").click()
    page.wait_for_selector("#temperature:visible")
    page.keyboard.press("Escape")
    page.wait_for_selector("#temperature", state="hidden")
    assert not wrong
    page.close()


def test_it_needs_nothing_from_elsewhere(slow: Served) -> None:
    answer = httpx.get(slow.url)
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.findall(r"(?:src|href)=[\"']?https?:", answer.text)
