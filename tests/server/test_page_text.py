"""What a model writes, on the page: Markdown, code, formulas, reasoning and tool calls; none of it becomes markup that runs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.browser import ENDED, StrictEngine, answer_to, ask, open_page, texts, until_true
from support.served import Served, served

pytestmark = pytest.mark.whole

RICH = """## Title
Some **bold** text that costs $5 to $10, and $x^2$ or \\(y\\).
```python
def f(items):  # a comment
    return "<b>x</b>"
```
| left | right |
| :-- | --: |
| `a` | 1 |

$$
- \\frac{1}{2}
$$
1. one
   - inner
2. two

> quoted [link](https://example.com/a?b=1)
"""

# Texts by which a page was, or might have been, made to run something, to load something, or to send something away.
HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)><style>*{display:none}</style>",
    "<iframe srcdoc='<script>parent.alert(1)</script>'></iframe>",
    "<a href='javascript:alert(1)'>x</a> <form action=//example.com><button>x</button></form>",
    "[x](javascript:alert(1)) [x](JaVaScRiPt&colon;alert(1)) [x](data:text/html;base64,PHNjcmlwdD4=) [x](vbscript:a)",
    "[x](/v1/models) [x](//example.com/a) <javascript:alert(1)> [x](file:///etc/passwd)",
    "![x](https://example.com/leak.png) ![x](data:image/svg+xml,<svg/onload=alert(1)>)",
    '[x](https://example.com "\\" onmouseover=alert(1) x=\\"")',
    '```"><img src=x onerror=alert(1)>\ncode\n```',
    "```html\n<script>alert(1)</script><img src=x onerror=alert(1)>\n```",
    "```js\n`${alert(1)}` </code></pre><script>alert(1)</script>\n```",
    "$\\href{javascript:alert(1)}{x}$ $\\url{javascript:alert(1)}$ $\\includegraphics{https://example.com/a.png}$",
    "$\\htmlClass{hidden}{x}$ $\\htmlStyle{position:fixed}{x}$ $\\htmlData{a=b}{x}$ $\\htmlId{prompt}{x}$",
    "$$\\rule{100000em}{100000em}$$ $\\kern-9999em\\text{<img src=x onerror=alert(1)>}$",
    "$\\def\\a{\\a\\a}\\a$ $\\gdef\\x#1{\\x{#1#1}}\\x{1}$",
    "| <img src=x onerror=alert(1)> | b |\n| :-: | --: |\n| <script>alert(1)</script> | `</td><script>alert(1)</script>` |",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=alert(1)&gt;'>",
    "&lt;script&gt;alert(1)&lt;/script&gt; &#x3C;img src=x onerror=alert(1)&#x3E;",
    '{"a": "<img src=x onerror=alert(1)>", "__proto__": {"x": 1}}',
    "<think><img src=x onerror=alert(1)></think><script>alert(1)</script>",
    '<tool_call>\n{"name": "<img src=x onerror=alert(1)>", "arguments": {"a": "</code><script>alert(1)</script>"}}\n</tool_call>',
    "[a]: javascript:alert(1)\n\n[a] [b][a]\n\n# <svg onload=alert(1)>\n\n- [ ] <input autofocus onfocus=alert(1)>",
]
TOOLS = [{"type": "function", "function": {"name": "get_weather"}}, {"type": "function", "function": {"name": "noop"}}]


@pytest.fixture(scope="module")
def fast() -> Iterator[Served]:
    """A server whose model thinks and calls tools."""
    with served(StrictEngine(tick_s=0.0005)) as running:
        running.engine.template = "<tool_call> <think> </think>"
        yield running
        running.settled()


def test_markdown(browser: Any, fast: Served) -> None:
    page, wrong = open_page(browser, fast)
    fast.engine.says = RICH
    answer_to(page, "hello")
    answer = page.locator(".assistant .text")
    assert texts(answer, "h2") == ["Title"] and texts(answer, "strong") == ["bold"]
    assert "$5 to $10" in texts(answer, "p")[0]
    assert texts(answer, ".code-head span") == ["python"]
    assert texts(answer, "pre") == ['def f(items):  # a comment\n    return "<b>x</b>"']
    assert texts(answer, ".hljs-keyword") == ["def", "return"] and texts(answer, ".hljs-comment") == ["# a comment"]
    cells = answer.locator("th, td")
    assert cells.all_inner_texts() == ["left", "right", "a", "1"]
    aligned = [cell.evaluate("cell => getComputedStyle(cell).textAlign") for cell in cells.all()]
    assert aligned == ["left", "right", "left", "right"]
    assert answer.locator(".katex").count() == 3 and answer.locator(".katex-display .mfrac").count() == 1
    assert answer.locator(".katex-error").count() == 0
    assert texts(answer, "ol > li > ul > li") == ["inner"] and answer.locator("ol > li").count() == 2
    link = answer.locator("blockquote a")
    assert link.get_attribute("href") == "https://example.com/a?b=1" and "noopener" in link.get_attribute("rel")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer.get_by_role("button", name="Copy").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == 'def f(items):  # a comment\n    return "<b>x</b>"'
    assert not wrong
    page.close()


def test_text_that_comes_in_pieces_ends_as_the_whole(browser: Any, fast: Served) -> None:
    """Shown piece by piece, cut anywhere, blocks end as they would at once; those that are whole stay as they are."""
    page, wrong = open_page(browser, fast)
    rng = random.Random()
    parts = RICH.split("\n")
    script = """async texts => {
        const {Markdown} = await import("./page/markdown.js");
        const grown = document.createElement("div"), markdown = new Markdown(grown);
        let first = null;
        for (const text of texts) { markdown.show(text); first ??= text.includes("costs") ? grown.firstChild : null; }
        const whole = document.createElement("div");
        new Markdown(whole).show(texts.at(-1));
        return [grown.innerHTML, whole.innerHTML, first !== null && first === grown.firstChild];
    }"""
    for _ in range(6):
        text = "## Title\n" + "\n".join(rng.choice(parts) for _ in range(20)) + "\ncosts"
        cuts = sorted(rng.randrange(len(text)) for _ in range(30))
        grown, whole, stays = page.evaluate(
            script, [*(text[:cut] for cut in cuts), text + "\n\nend", text + "\n\nend."]
        )
        assert grown == whole, text
        assert stays, text
    assert not wrong
    page.close()


def test_hostile_text_runs_nothing(browser: Any, fast: Served) -> None:
    """No element but those of Markdown, no attribute that runs or loads anything, and no link but to the web."""
    page, wrong = open_page(browser, fast)
    page.locator("#tools").fill(json.dumps(TOOLS))
    texts = [*random.sample(HOSTILE, 6), "\n\n".join(random.sample(HOSTILE, len(HOSTILE)))]
    for text in texts:
        page.locator("#new").click()
        fast.engine.says = text
        answer_to(page, text)
        assert page.locator(".turn").count() == 2, text
        tags = page.locator("#log").evaluate(
            "log => [...new Set([...log.querySelectorAll('.exchange *')].map(each => each.localName))]"
        )
        assert not {"script", "img", "iframe", "style", "object", "embed", "base", "input", "form", "link"} & set(
            tags
        ) - {
            "form"  # results of tools are sent by one
        }, (text, tags)
        attributes = page.locator("#log").evaluate(
            "log => [...log.querySelectorAll('.exchange *')].flatMap(each => [...each.attributes].map(one => "
            "[one.name, one.value]))"
        )
        assert not [name for name, _ in attributes if name.startswith("on") or name in ("src", "srcdoc", "action")], (
            text
        )
        links = [value for name, value in attributes if name in ("href", "xlink:href")]
        assert all(link.startswith(("https://", "http://", "mailto:")) for link in links), (text, links)
        assert page.locator("#prompt").count() == 1
        box = page.locator("#composer").bounding_box()
        over = "([x, y]) => document.elementFromPoint(x, y).closest('#composer') !== null"
        assert page.evaluate(over, [box["x"] + box["width"] / 3, box["y"] + box["height"] / 2]), f"covered by {text}"
    page.reload()
    until_true(page, "Boolean(document.body.dataset.model)")
    for entry in page.locator("#chats .title").all():
        entry.click()
    assert not wrong
    page.close()


def test_the_policy_stops_what_comes_past_the_sanitizer(browser: Any, fast: Served) -> None:
    page, _ = open_page(browser, fast)
    tried = page.evaluate("""() => {
        const outcomes = [];
        const attempt = action => { try { action(); outcomes.push("done"); } catch { outcomes.push("refused"); } };
        attempt(() => { document.body.innerHTML += "<img src=x onerror='window.ran = 1'>"; });
        attempt(() => document.write("<script>window.ran = 1</script>"));
        const script = document.createElement("script");
        attempt(() => { script.text = "window.ran = 1"; document.body.append(script); });
        const button = document.createElement("button");
        attempt(() => { button.setAttribute("onclick", "window.ran = 1"); document.body.append(button); button.click(); });
        return [outcomes.slice(0, 3), window.ran ?? null];
    }""")
    assert tried == [["refused"] * 3, None]
    policy = httpx.get(fast.url).headers["content-security-policy"]
    assert "unsafe" not in policy and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    page.close()


def test_reasoning_is_folded(browser: Any, fast: Served) -> None:
    """It is not sent again, and copied with nothing."""
    page, wrong = open_page(browser, fast)
    fast.engine.says = "<think>\nLet **me** think.\n</think>\n\nHello."
    answer_to(page, "hi")
    thinking = page.locator("details.thinking")
    assert thinking.locator("summary").inner_text().startswith("Thought for")
    assert not page.locator(".thought").is_visible()
    thinking.locator("summary").press("Enter")
    assert page.locator(".thought").inner_text() == "Let **me** think."
    assert page.locator(".assistant .text").inner_text() == "Hello."
    answer_to(page, "more")
    assert fast.engine.asked() == "user: hi\nassistant: Hello.\nuser: more\nassistant:"
    fast.engine.says = "Plain."
    answer_to(page, "again")
    assert page.locator("details.thinking:visible").count() == 2
    assert not wrong
    page.close()


def test_tool_calls_and_their_results(browser: Any, fast: Served) -> None:
    """Calls are shown with their arguments as JSON; results are written on the page, and the model goes on."""
    page, wrong = open_page(browser, fast)
    fast.engine.is_strict = False  # messages of tools do not alternate
    page.locator("#tools").fill("[{")
    assert "not JSON" in page.locator("#tools-problem").inner_text()
    answer_to(page, "hi")
    assert "not JSON" in page.get_by_role("alert").inner_text() and page.locator("#prompt").input_value() == "hi"
    page.locator("#tools").fill(json.dumps(TOOLS))
    calls = [("get_weather", {"city": "Paris", "days": 3}), ("noop", {})]
    fast.engine.says = "Let me see." + "".join(
        f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )
    answer_to(page, "weather?")
    assert page.locator(".assistant .text").inner_text() == "Let me see."
    assert texts(page, ".call .code-head b") == ["get_weather", "noop"]
    assert texts(page, ".call pre") == [json.dumps(calls[0][1], indent=2), "{}"]
    seen: list[Any] = []
    page.on("request", lambda request: request.method == "POST" and seen.append(request.post_data_json["messages"]))
    fast.engine.says = '{"sunny": true}'
    page.get_by_label("Result of get_weather").fill('{"sky": "blue"}')
    page.get_by_role("button", name="Send results").click()
    until_true(page, ENDED)
    _, called, *results = seen[-1]
    assert [call["function"]["name"] for call in called["tool_calls"]] == ["get_weather", "noop"]
    assert [(each["role"], each["content"]) for each in results] == [("tool", '{"sky": "blue"}'), ("tool", "")]
    assert [each["tool_call_id"] for each in results] == [call["id"] for call in called["tool_calls"]]
    assert texts(page, ".assistant .text pre") == ['{\n  "sunny": true\n}'], "an answer of JSON is a block of code"
    assert texts(page, ".call pre")[1] == '{\n  "sky": "blue"\n}'
    assert page.locator(".results").count() == 0
    ask(page, "thanks")
    until_true(page, ENDED)
    assert [each["role"] for each in seen[-1]] == ["user", "assistant", "tool", "tool", "assistant", "user"]
    fast.engine.is_strict = True
    assert not wrong
    page.close()


def test_a_long_answer_is_shown_in_time(browser: Any, fast: Served) -> None:
    """Text that grows costs what its last block costs: 500 pieces, drawn 50 times, take seconds, also of hostile text."""
    page, wrong = open_page(browser, fast)
    script = """async ([block, count]) => {
        const {Markdown} = await import("./page/markdown.js");
        const node = document.createElement("div"), markdown = new Markdown(node), began = performance.now();
        let text = "";
        for (let index = 0; index < count; index += 1) { text += block; if (index % 10 === 0) markdown.show(text); }
        return performance.now() - began;
    }"""
    for block in ("some *words* and `code` with $x^2$\n\n", "$\\(\\[", "**_`[", "> - "):
        elapsed_ms = page.evaluate(script, [block, 500])
        assert elapsed_ms < 10_000, (block, elapsed_ms)
    assert not wrong
    page.close()
