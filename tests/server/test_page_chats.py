"""Chats that the page keeps: found, renamed, deleted and exported; questions that are edited; chats that become too long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    texts,
    until_true,
)
from support.served import Served, served

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def quick() -> Iterator[Served]:
    with served(StrictEngine(max_model_len=256)) as running:
        running.engine.says = "fine"
        yield running
        running.settled()


def titles(page: Any) -> list[str]:
    return texts(page, "#chats .title")


def action(page: Any, name: str, title: str) -> Any:
    """A button for a chat of the list."""
    if not page.get_by_role("button", name=f"{name} {title}").is_visible():
        page.get_by_role("button", name=f"Actions for {title}").press("Enter")
    return page.get_by_role("button", name=f"{name} {title}")


def test_chats_are_kept(browser: Any, quick: Served) -> None:
    """Also over a reload, the newest first; each goes on where it was."""
    page, wrong = open_page(browser, quick)
    assert "kept in this browser" in page.locator("#no-chats").inner_text()
    answer_to(page, "about cats\nand more")
    page.locator("#new").click()
    answer_to(page, "about dogs")
    assert titles(page) == ["about dogs", "about cats"]
    page.reload()
    until_true(page, "Boolean(document.body.dataset.model)")
    assert page.locator(".turn").count() == 0 and titles(page) == ["about dogs", "about cats"]
    page.get_by_role("button", name="about cats", exact=True).click()
    assert texts(page) == ["about cats\nand more", "fine"]
    assert page.locator(".facts").inner_text().count("tokens") >= 1
    answer_to(page, "so?")
    assert quick.engine.asked() == "user: about cats\nand more\nassistant: fine\nuser: so?\nassistant:"
    assert titles(page) == ["about cats", "about dogs"]
    assert page.locator("#chats [aria-current]").inner_text() == "about cats"
    assert not wrong
    page.close()


def test_they_are_found_renamed_and_deleted_by_keyboard(browser: Any, quick: Served) -> None:
    page, wrong = open_page(browser, quick)
    for question in ("about cats", "about dogs", "about birds"):
        page.locator("#new").click()
        answer_to(page, question)
    page.keyboard.press("Control+k")
    page.keyboard.type("DOGS fine")
    assert titles(page) == ["about dogs"]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert texts(page) == ["about dogs", "fine"]
    assert page.locator("#chats [aria-current]").evaluate("each => each === document.activeElement")
    action(page, "Rename", "about dogs").press("Enter")
    page.keyboard.type("<b>Hounds</b>")
    page.keyboard.press("Enter")
    page.locator("#search").fill("hounds")
    assert titles(page) == ["<b>Hounds</b>"]
    page.locator("#search").fill("no such words")
    assert titles(page) == [] and "No chat" in page.locator("#no-chats").inner_text()
    page.locator("#search").fill("")
    answer_to(page, "more")
    assert titles(page)[0] == "<b>Hounds</b>", "a name that was given stays"
    action(page, "Delete", "about cats").press("Enter")
    page.get_by_role("button", name="Keep it").press("Enter")
    assert len(titles(page)) == 3
    for name in ("about cats", "<b>Hounds</b>"):
        action(page, "Delete", name).press("Enter")
        assert page.get_by_role("button", name="Delete it").evaluate("each => each === document.activeElement")
        page.keyboard.press("Enter")
    assert titles(page) == ["about birds"] and len(kept_chats(page)) == 1
    assert page.locator(".turn").count() == 0, "the chat on the screen was deleted"
    assert not wrong
    page.close()


def test_a_chat_that_is_deleted_while_it_answers_stays_deleted(browser: Any, slow: Served) -> None:
    page, wrong = open_page(browser, slow)
    slow.engine.says = "fine"
    answer_to(page, "first")
    slow.engine.says = "word " * 3000
    ask(page, "second")
    page.wait_for_selector(".text.streaming > *")
    action(page, "Delete", "first").click()
    page.get_by_role("button", name="Delete it").click()
    slow.settled()
    assert kept_chats(page) == [] and titles(page) == []
    # One that is left keeps what had come.
    ask(page, "third")
    page.wait_for_selector(".text.streaming > *")
    page.locator("#new").click()
    slow.settled()
    until_true(page, "document.querySelectorAll('#chats .title').length === 1")
    page.get_by_role("button", name="third", exact=True).click()
    assert texts(page)[0] == "third" and texts(page)[1].startswith("word")
    assert not wrong
    page.close()


def test_export(browser: Any, quick: Served, tmp_path: Path) -> None:
    """As messages of the API, which the server takes."""
    page, wrong = open_page(browser, quick)
    for question in ("a/b: c?", "second"):
        page.locator("#new").click()
        answer_to(page, question)
    with page.expect_download() as one:
        action(page, "Export", "a/b: c?").click()
    assert one.value.suggested_filename == "a-b-c.json"
    one.value.save_as(tmp_path / "one.json")
    chat = json.loads((tmp_path / "one.json").read_text())
    assert (chat["model"], chat["title"]) == ("fake", "a/b: c?")
    assert chat["messages"] == [{"role": "user", "content": "a/b: c?"}, {"role": "assistant", "content": "fine"}]
    body = {"model": "fake", "messages": [*chat["messages"], {"role": "user", "content": "more"}], "max_tokens": 2}
    assert quick.http.post("/v1/chat/completions", json=body).status_code == 200
    with page.expect_download() as every:
        page.get_by_role("button", name="Export all chats").click()
    every.value.save_as(tmp_path / "all.json")
    assert [each["title"] for each in json.loads((tmp_path / "all.json").read_text())["chats"]] == ["second", "a/b: c?"]
    assert not wrong
    page.close()


def test_a_question_is_edited(browser: Any, quick: Served) -> None:
    """What followed it goes, once there is an answer; an edit that fails leaves all as it was."""
    page, wrong = open_page(browser, quick)
    for question in ("one", "two", "three"):
        answer_to(page, question)
    edit = page.get_by_role("button", name="Edit this message")
    edit.nth(1).click()
    page.keyboard.press("Escape")
    assert texts(page) == ["one", "fine", "two", "fine", "three", "fine"]
    edit.nth(1).click()
    page.get_by_role("textbox", name="Message").first.fill("refuse me")
    page.keyboard.press("Enter")
    until_true(page, ENDED)
    assert "refuses the messages" in page.get_by_role("alert").inner_text()
    assert page.locator(".turn").count() == 6 and page.locator(".editor textarea").input_value() == "refuse me"
    page.locator(".editor textarea").fill("2")
    page.locator(".editor textarea").press("Enter")
    until_true(page, ENDED)
    assert quick.engine.asked() == "user: one\nassistant: fine\nuser: 2\nassistant:"
    assert texts(page) == ["one", "fine", "2", "fine"]
    assert [each["question"] for each in kept_chats(page)[0]["exchanges"]] == ["one", "2"]
    assert page.locator("button.again:visible").count() == 1 and not wrong
    page.close()


def test_a_chat_that_is_too_long_drops_the_oldest(browser: Any, quick: Served) -> None:
    """As few exchanges as make the question fit. They stay on the screen, and are not sent any more."""
    page, wrong = open_page(browser, quick)
    page.locator("#max_tokens").fill("20")
    long = " the cat sat on the mat" * 5
    questions = [f"{number}{long}" for number in range(4)] + [f"4{long}{long}"]
    for question in questions:
        answer_to(page, question)
    alert = page.get_by_role("alert")
    assert "begin a new chat, or:" in alert.inner_text() and page.locator("#prompt").input_value() == questions[-1]
    assert page.locator(".turn.assistant").count() == 4
    page.get_by_role("button", name="Leave out the oldest messages").click()
    until_true(page, "document.querySelectorAll('.turn.assistant').length === 5")
    until_true(page, ENDED)
    assert not alert.is_visible() and page.locator("#prompt").input_value() == ""
    num_left_out = page.locator(".left-out").count()
    assert 1 < num_left_out < 4

    def conversation(begin: int) -> str:
        return "\nassistant: fine\n".join(f"user: {each}" for each in questions[begin:]) + "\nassistant:"

    assert quick.engine.asked() == conversation(num_left_out)
    one_more = quick.engine.tokenizer.encode(conversation(num_left_out - 1))
    assert len(one_more) > 256 - 20, "fewer would have been enough"
    assert kept_chats(page)[0]["from"] == num_left_out
    # A message that fits with nothing before it either is told so.
    answer_to(page, " the cat" * 300)
    page.get_by_role("button", name="Leave out the oldest messages").click()
    until_true(page, "document.querySelector('#problem').textContent.includes('This message alone')")
    assert not wrong
    page.close()


def test_a_browser_without_room(browser: Any, quick: Served) -> None:
    page, wrong = open_page(browser, quick)
    page.evaluate("localStorage.setItem('other', 'x'.repeat(5 * 1024 * 1024 - 700))")
    answer_to(page, "hello" + " the" * 200)
    assert "no room" in page.get_by_role("alert").inner_text() and page.locator(".turn").count() == 2
    page.evaluate("localStorage.clear()")
    assert not wrong
    page.close()


@pytest.mark.parametrize("screen", SCREENS[:2], ids=lambda screen: str(screen["width"]))
def test_narrow_screens_have_drawers(browser: Any, quick: Served, screen: dict[str, int]) -> None:
    page, wrong = open_page(browser, quick, viewport=screen)
    for question in ("one", "two"):
        page.locator("#new").click()
        answer_to(page, question)
    assert not page.locator("#search").is_visible()
    page.locator("#chats-button").click()
    page.wait_for_selector("#search:visible")
    until_true(page, "document.querySelector('#chats').getBoundingClientRect().left === 0")
    page.get_by_role("button", name="Actions for two").click()
    assert_in_sight(page, "#search", "#export-all", "#chats li:first-child .actions")
    page.keyboard.press("Escape")
    page.wait_for_selector("#search", state="hidden")
    assert page.locator("#chats-button").evaluate("each => each === document.activeElement")
    page.keyboard.press("Control+k")
    page.wait_for_selector("#search:visible")
    page.get_by_role("button", name="one", exact=True).click()
    page.wait_for_selector("#search", state="hidden")
    assert texts(page) == ["one", "fine"]
    assert not wrong
    page.close()
