"""The page at /: a conversation, its failures and stops, settings, and every screen's size."""

from __future__ import annotations

import itertools
import re
from typing import Any

import httpx
import pytest
from support.browser import (
    ENDED,
    SCREENS,
    StrictEngine,
    answer_to,
    ask,
    assert_in_sight,
    kept_chats,
    open_page,
    stop_when_it_streams,
    texts,
    until_true,
)
from support.fake_engine import until
from support.served import Served, served

from distmk.errors import DistmkError

pytestmark = pytest.mark.whole

SAYS = (
    "Birds sing in the **forest**:\n```python\nprint('<b>tweet</b>')\n```\nThe `cat` <img src=x onerror=alert(1)> sat."
)
END_IN_SIGHT = "log.scrollHeight - log.scrollTop - log.clientHeight < 2"


def num_context_tokens(page: Any) -> int:
    """Tokens of this chat, as the panel shows them."""
    return int(page.locator("#context").inner_text().partition(" ")[0].replace(",", ""))


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
    until_true(page, ENDED)
    text = "user: Where do\nbirds sing?\nassistant: " + SAYS + "\nuser: And now?\nassistant:"
    assert slow.engine.asked() == text
    # The request of the second try does not hold the first answer.
    page.locator("button.again").last.click()
    until_true(page, ENDED)
    assert slow.engine.asked() == text
    assert page.locator(".turn").count() == 4
    page.locator("#new").click()
    assert page.locator(".turn").count() == 0 and page.locator("#empty").is_visible()
    assert not wrong
    page.close()


def test_new_chat_forgets_the_answer_that_streams(browser: Any, slow: Served) -> None:
    """Also one whose first token has not come."""
    page, wrong = open_page(browser, slow)
    slow.engine.says = "word " * 3000
    for begins in (True, False):
        if not begins:
            slow.engine.goes.clear()
        ask(page, "the old chat")
        page.wait_for_selector(f".assistant .text.{'streaming > *' if begins else 'waiting'}")
        page.locator("#new").click()
        slow.engine.says = "a new answer"
        ask(page, "the new chat")
        slow.engine.goes.set()
        until_true(page, ENDED)
        slow.settled()
        assert page.locator("#prompt").input_value() == "" and page.locator("button.again").count() == 1
        assert slow.engine.asked() == "user: the new chat\nassistant:"
        assert texts(page) == ["the new chat", "a new answer"]
        answer_to(page, "more")
        assert slow.engine.asked() == "user: the new chat\nassistant: a new answer\nuser: more\nassistant:"
        slow.engine.says = "word " * 3000
        page.locator("#new").click()
    assert not wrong
    page.close()


def test_a_failed_question_returns_to_the_box(browser: Any, slow: Served) -> None:
    """One that is refused, and one that is stopped before its answer begins, are not in the history of the next."""
    page, wrong = open_page(browser, slow)
    slow.engine.says = "fine"
    box = page.locator("#prompt")
    answer_to(page, "refuse me")
    assert box.input_value() == "refuse me" and page.locator(".turn").count() == 0
    assert "the chat template refuses the messages" in page.get_by_role("alert").inner_text()
    answer_to(page, "first")
    assert not page.get_by_role("alert").is_visible()
    slow.engine.goes.clear()
    ask(page, "stop me")
    page.wait_for_selector(".assistant .text.waiting")
    box.fill("a draft")
    page.keyboard.press("Escape")
    until_true(page, ENDED)
    slow.engine.goes.set()
    assert box.input_value() == "stop me\na draft"
    answer_to(page, "second")
    assert slow.engine.asked() == "user: first\nassistant: fine\nuser: second\nassistant:"
    # An answer stays when the attempt to replace it fails.
    slow.engine.goes.clear()
    page.locator("button.again").last.click()
    page.keyboard.press("Escape")
    until_true(page, ENDED)
    slow.engine.goes.set()
    assert texts(page) == ["first", "fine", "second", "fine"]
    assert box.input_value() == "" and page.locator("button.again").last.is_visible()
    assert not wrong
    page.close()


def test_a_stopped_answer_stays_in_the_history(browser: Any, slow: Served) -> None:
    """With the text that had come; so does an answer without text."""
    page, wrong = open_page(browser, slow)
    slow.engine.says = "word " * 3000
    ask(page, "go on")
    stop_when_it_streams(page)
    assert "stopped by you" in page.locator(".facts").inner_text()
    slow.engine.says = ""
    answer_to(page, "and")
    assert re.fullmatch(r"user: go on\nassistant: (?:word )+w?o?r?d?\nuser: and\nassistant:", slow.engine.asked())
    answer_to(page, "so")
    assert slow.engine.asked().endswith("user: and\nassistant: \nuser: so\nassistant:")
    assert not page.get_by_role("alert").is_visible() and not wrong
    page.close()


def test_an_answer_that_breaks_off_stays_in_the_history(browser: Any) -> None:
    with served(StrictEngine(tick_s=0.005)) as server:
        page, wrong = open_page(browser, server)
        server.engine.says = "word " * 3000
        ask(page, "hello")
        page.wait_for_selector(".assistant .text.streaming > *")
        server.engine.fail(DistmkError("rank 1 is lost"))
        until_true(page, ENDED)
        assert "rank 1 is lost" in page.get_by_role("alert").inner_text()
        assert page.locator(".turn").count() == 2 and page.locator("button.again").is_visible()
        assert page.locator("#prompt").input_value() == ""
        assert not wrong
        page.close()


@pytest.mark.parametrize("limit", ["context", "body"])
def test_a_paste_that_is_too_long_blocks_nothing(browser: Any, limit: str) -> None:
    """Too long for the context, or for a request."""
    with served(StrictEngine(max_model_len=512), max_body_bytes=4096 if limit == "body" else 1 << 20) as server:
        page, wrong = open_page(browser, server)
        server.engine.says = "fine"
        answer_to(page, "first")
        paste = "xyz " * (1 << (11 if limit == "body" else 9))
        answer_to(page, paste)
        assert "Shorten the message" in page.get_by_role("alert").inner_text()
        assert page.locator("#prompt").input_value() == paste.strip() and page.locator(".turn").count() == 2
        answer_to(page, "second")
        assert server.engine.asked() == "user: first\nassistant: fine\nuser: second\nassistant:"
        assert not page.get_by_role("alert").is_visible() and not wrong
        page.close()


def test_context_of_this_chat(browser: Any, slow: Served) -> None:
    """The number of tokens grows with the answer. A failed question leaves it as it was, and a new chat begins at 0."""
    page, wrong = open_page(browser, slow)
    encode = slow.engine.tokenizer.encode
    assert num_context_tokens(page) == 0
    slow.engine.says = "fine"
    answer_to(page, "first")
    first = len(encode("user: first\nassistant:")) + len(encode("fine")) + 1  # and the end token
    assert num_context_tokens(page) == first
    slow.engine.says = "word " * 3000
    ask(page, "second")
    until(lambda: num_context_tokens(page) > first + 100, 10)
    stop_when_it_streams(page)
    stopped = num_context_tokens(page)
    said = kept_chats(page)[0]["exchanges"][-1]["steps"][-1]["text"]
    assert stopped == len(slow.engine.prompts[-1]) + len(encode(said))
    answer_to(page, "refuse me")
    assert num_context_tokens(page) == stopped
    ask(page, "third")
    page.wait_for_selector(".assistant .text.streaming > *")
    page.locator("#new").click()
    slow.settled()
    assert num_context_tokens(page) == 0
    assert not wrong
    page.close()


def test_settings(browser: Any, slow: Served) -> None:
    """Changed settings reach the engine; the server's defaults stand for the others. The panel shows the kernel at work."""
    page, wrong = open_page(browser, slow)
    slow.engine.says = "word " * 3000
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
    ask(page, "Tell me more")
    stop_when_it_streams(page)
    assert set(bodies[-1]) == {"model", "messages", "stream", "stream_options"}
    page.locator("#temperature").fill("1.5")
    for name, value in {"top_k": "7", "seed": "5", "stop": "never", "system": "Be brief."}.items():
        page.locator(f"#{name}").fill(value)
    page.locator("#new").click()
    page.route("**/completions", lambda route: route.fulfill(status=400, body="{}"))  # what it sends is seen
    answer_to(page, "Tell me more")
    page.unroute("**/completions")
    assert bodies[-1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Tell me more"},
    ]
    page.locator("#system").fill("")
    page.locator("#prompt").press("Enter")
    until_true(page, "document.querySelector('#running').textContent.startsWith('1 ')")
    assert page.locator("#state").inner_text() == "generating"
    page.keyboard.press("Escape")
    until_true(page, ENDED)
    slow.settled()
    params = slow.engine.params[-1]
    assert (params.temperature, params.top_k, params.seed, list(params.stop)) == (1.5, 7, 5, ["never"])
    page.reload()
    assert page.locator("#temperature").input_value() == "1.5", "settings are kept"
    page.get_by_role("button", name="Reset").click()
    assert page.locator("#temperature-value").inner_text() == "model's default"
    assert page.locator("#seed").input_value() == ""
    assert not wrong
    page.close()


@pytest.mark.parametrize("screen", SCREENS, ids=lambda screen: str(screen["width"]))
def test_a_key_is_asked_for_in_sight(browser: Any, screen: dict[str, int]) -> None:
    """The question that needed it is then sent with it."""
    with served(StrictEngine(), api_keys=("secret",)) as server:
        server.engine.says = "fine"
        page, wrong = open_page(browser, server, viewport=screen)
        for key in (None, "wrong", "secret"):
            if key is None:
                ask(page, "hello")
            else:
                page.keyboard.insert_text(key)
                page.keyboard.press("Enter")
            until_true(page, ENDED)
            if key != "secret":
                assert page.locator("#prompt").input_value() == "hello"
                assert page.locator("#key").evaluate("box => box === document.activeElement")
                assert_in_sight(page, "#key", "#prompt", "#send")
        assert texts(page) == ["hello", "fine"]
        assert not page.locator("#key").is_visible()
        assert not wrong
        page.close()


def test_a_server_that_is_gone(browser: Any) -> None:
    with served(StrictEngine()) as server:
        page, wrong = open_page(browser, server)
    page.wait_for_selector("#gone:not([hidden])")
    answer_to(page, "hello")
    assert page.get_by_role("alert").inner_text().strip() == "The server does not answer."
    assert page.locator("#prompt").input_value() == "hello"
    assert not wrong
    page.close()


def assert_fits(page: Any) -> None:
    """AssertionError: something is wider than the screen, or the controls overlap or are cut."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
    assert_in_sight(page, "#new", "#theme", "#prompt", "#send", "#model")
    if page.viewport_size["width"] < 900:
        assert_in_sight(page, "#panel-button")
    boxes = page.locator("header > :visible:not(.grow)").evaluate_all(
        "all => all.map(each => each.getBoundingClientRect()).map(box => [box.left, box.right])"
    )
    assert all(right <= left for (_, right), (left, _) in itertools.pairwise(boxes)), boxes
    cut = "each => each.id !== 'model' && each.scrollWidth > each.clientWidth + 1"
    assert not page.locator("header > :visible, #send").evaluate_all(f"all => all.filter({cut}).map(each => each.id)")


@pytest.mark.parametrize("screen", SCREENS, ids=lambda screen: str(screen["width"]))
def test_every_state_fits_the_screen(browser: Any, screen: dict[str, int]) -> None:
    """Nothing is asked yet, an answer streams, a question failed, a long conversation, with a long name of the model."""
    with served(StrictEngine(tick_s=0.002), served_model_name="models/a-model-with-a-long-name-70B-Instruct") as server:
        page, wrong = open_page(browser, server, viewport=screen)
        assert_fits(page)
        server.engine.says = "words and\n```\n" + "x" * 150 + "\n```\n" + "y" * 150 + " words" * 40
        ask(page, "z" * 300 + " and\n" + "a long question\n" * 40)
        page.wait_for_selector(".assistant .text.streaming > *")
        assert_fits(page)
        until_true(page, ENDED)
        server.engine.says = "fine"
        for _ in range(3):
            answer_to(page, "more")
        assert_fits(page)
        until_true(page, END_IN_SIGHT)
        page.locator("#prompt").fill("a draft\n" * 60 + "refuse me")
        page.route("**/completions", lambda route: route.fulfill(status=400, json={"error": {"message": "no " * 400}}))
        page.locator("#prompt").press("Enter")
        until_true(page, ENDED)
        assert_in_sight(page, ".notices")
        until_true(page, END_IN_SIGHT)
        assert_fits(page)
        assert not wrong
        page.close()


def test_narrow_and_dark(browser: Any, slow: Served) -> None:
    """On a phone the panel is a drawer, and the theme is the system's until one is chosen."""
    page, wrong = open_page(browser, slow, viewport={"width": 360, "height": 640}, color_scheme="dark")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.get_by_role("button", name="Use the light theme").click()
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert not page.locator("#temperature").is_visible()
    page.get_by_role("button", name="Settings").click()
    page.wait_for_selector("#temperature:visible")
    page.keyboard.press("Escape")
    page.wait_for_selector("#temperature", state="hidden")
    assert not wrong
    page.close()


def test_another_server_on_the_same_port(browser: Any, slow: Served) -> None:
    """The page asks the model that is served now."""
    page, wrong = open_page(browser, slow)
    slow.engine.says = "fine"
    until_true(page, "document.body.dataset.model === 'fake'")
    slow.state.config, before = type(slow.state.config)(served_model_name="other"), slow.state.config
    until_true(page, "document.body.dataset.model === 'other'")
    assert page.locator("#model").inner_text() == "other" and page.title().startswith("other")
    answer_to(page, "hello")
    assert page.locator(".assistant .text").inner_text() == "fine"
    slow.state.config = before
    assert not wrong
    page.close()


def test_it_needs_nothing_from_elsewhere(slow: Served) -> None:
    answer = httpx.get(slow.url)
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.findall(r"(?:src|href)=[\"']?https?:", answer.text)
