"""The page at /, in Debian's Chromium."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

import slm_core as slm
from browser import CHROMIUM, answered, press, say
from http_server import serving
from server.conftest import Client
from slm_core.protocols import Context
from slm_core.server import ApiKey, EngineSettings, ServedModel, ServerOptions, create_app
from slm_core.server import page as page_module
from slm_core.types import ContextOptions

needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="the page is not tested: no Chromium (apt install chromium)"
)
PAGE = Path(page_module.__file__).with_name("page.html")
WAIT_MS = 30_000
HOSTILE = """<script>document.title = "run"</script> <img src=x onerror="document.title = 'run'">
# <svg onload="document.title = 'run'">
[a](javascript:document.title='run') [b](data:text/html,<script>parent.document.title='run'</script>)
![c](https://example.com/c.png) <https://example.com/d>
<iframe srcdoc="<script>top.document.title='run'</script>"></iframe>
| <b onmouseover="document.title='run'">x</b> | [e](vbscript:x) |
| --- | --- |
| `<style>*{display:none}</style>` | <form action=https://example.com><input onfocus="document.title='run'" autofocus> |

```
</code></pre><script>document.title = "run"</script>
```
"""
MARKDOWN = """# Title
A **bold** and *italic* `co*de*` word,
and [a link](https://example.com/).

- one
- two
  1. inner

3. three

> quoted

```python
x = '<b>'

# no heading
```

| a | b |
|---|---|
| 1 | `2` |

---
2 * 3 * 4 and a_b_c"""
ENDLESS_MARKS = ("`" * 20_000, "> " * 5_000 + "x", "- " * 5_000 + "x", "*a " * 9_000, "|" * 9_000, "[" * 9_000)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a server with the demo model on two engines."""
    settings = EngineSettings(n_ctx=2048, reuse="cut")
    models = [
        ServedModel(name, lambda backend=name: slm.load(slm.demo_model_path(), backend=backend), settings=settings)  # type: ignore[misc]
        for name in ("native", "llamacpp")
    ]
    with serving(create_app(models, log=None)) as url:
        yield url


@pytest.fixture(scope="module")
def unhurried() -> Iterator[str]:
    """The address of a server that takes half a minute for an endless answer, so that it is stopped before."""
    settings = EngineSettings(n_ctx=4096)
    with serving(create_app([ServedModel("demo", load_unhurried, settings=settings)], log=None)) as url:
        yield url


def load_unhurried() -> slm.Model:
    model = slm.load(slm.demo_model_path(), backend="native")
    new_context = model.model.new_context

    def new_unhurried_context(options: ContextOptions) -> Context:
        context = new_context(options)
        for name in ("decode", "decode_top"):
            setattr(context, name, functools.partial(after_a_while, getattr(context, name)))
        return context

    model.model.new_context = new_unhurried_context  # type: ignore[method-assign]
    return model


def after_a_while(call: Callable[..., Any], *arguments: Any) -> Any:
    time.sleep(0.03)
    return call(*arguments)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Page]]:
    """A function that opens a page, whose errors and requests to other origins fail the test."""
    contexts: list[BrowserContext] = []
    problems: list[str] = []

    def open_page(url: str, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        origin = url.partition("/#")[0]
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: message.type == "error" and problems.append(message.text))
        page.on(
            "request",
            lambda request: request.url.startswith((origin, "blob:", "data:")) or problems.append(request.url),
        )
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [each for each in problems if "Failed to load resource" not in each] == [], (
        "refused requests are no problems"
    )


def texts(page: Page) -> list[str]:
    """The roles and texts of the messages."""
    return [
        f"{each.locator('header b').inner_text()}: {each.locator('.text, .plain').first.inner_text()}"
        for each in page.locator("article").all()
    ]


def stored(page: Page, address: str) -> dict[str, Any]:
    """The chat as the server has it."""
    session: dict[str, Any] = httpx.get(f"{address}/v1/sessions/{page.url.partition('#')[2]}").json()
    return session


LETTER = slm.load_vocab(slm.demo_model_path()).encode("a", add_special=False, parse_special=False)[0]


def endlessly(route: Route) -> None:
    """Let an answer be one letter again and again."""
    route.continue_(post_data={**route.request.post_data_json, "logit_bias": {str(LETTER): 100}})


def some_text_streams(page: Page) -> None:
    """Wait for six characters of an answer; each frame is looked at, because an answer may end within a second."""
    page.wait_for_function(r"() => /\S[^]{5}/.test(document.querySelector('#partial')?.textContent ?? '')")


def begin_endless(page: Page) -> None:
    page.get_by_label("Temperature").fill("0")
    page.route("**/messages", endlessly)
    page.get_by_label("Your message").fill("Tell me a story.")
    page.keyboard.press("Enter")
    some_text_streams(page)


def test_the_page_is_small_and_loads_nothing(client: Client) -> None:
    response = client.get("/")
    assert response.content == PAGE.read_bytes() and len(response.content) <= 80_000
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert client.call("HEAD", "/").status_code == 200
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", PAGE.read_text())


@needs_browser
def test_a_chat(visit: Callable[..., Page], address: str) -> None:
    """Its answers are those of chat completions, and it is there after a reload."""
    page = visit(address)
    expect(page.locator("#log")).to_contain_text("/v1/chat/completions")
    page.get_by_label("Temperature").fill("0")
    say(page, "My dog is called Rex.")
    first = texts(page)[1].removeprefix("assistant: ")
    say(page, "What is my dog called?")
    history = [
        {"role": "user", "content": "My dog is called Rex."},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "What is my dog called?"},
    ]
    body = {"messages": history, "temperature": 0}
    answer = httpx.post(f"{address}/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert texts(page)[3] == f"assistant: {answer}" and "Rex" in answer
    usage = stored(page, address)["usage"]
    expect(page.locator("#status")).to_contain_text(
        f"{usage['prompt_tokens_details']['cached_tokens']} of {usage['prompt_tokens']} prompt tokens cached"
    )
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    cells = httpx.get(f"{address}/v1/sessions/{page.url.partition('#')[2]}/cells").json()
    expect(page.locator("#map")).to_have_attribute("aria-label", re.compile(f"{cells['cached']} cells cached prefixes"))
    assert page.locator("#map .cached").count() == -(-256 * cells["cached"] // 2048)
    shown = texts(page)
    page.reload()
    expect(page.locator("article")).to_have_count(4)
    assert texts(page) == shown
    expect(page.locator("nav li button").first).to_have_text("My dog is called Rex.")
    expect(page.get_by_label("Temperature")).to_have_value("0")


@needs_browser
def test_a_stopped_answer_is_kept(visit: Callable[..., Page], unhurried: str) -> None:
    page = visit(unhurried)
    begin_endless(page)
    page.get_by_role("button", name="Stop").click()
    answered(page)
    saved = stored(page, unhurried)["messages"]
    assert [message["role"] for message in saved] == ["user", "assistant"] and len(saved[1]["content"]) > 6
    page.unroute("**/messages")
    page.route("**/messages", endlessly)
    page.get_by_label("Your message").fill("Go on.")
    page.keyboard.press("Enter")
    some_text_streams(page)
    page.keyboard.press("Escape")
    answered(page)
    assert len(stored(page, unhurried)["messages"]) == 4


@needs_browser
def test_a_reload_keeps_the_partial_answer(visit: Callable[..., Page], unhurried: str) -> None:
    page = visit(unhurried)
    begin_endless(page)
    page.reload()
    expect(page.locator("article")).to_have_count(2)
    answered(page)
    assert texts(page)[0] == "user: Tell me a story." and len(texts(page)[1]) > len("assistant: ") + 6


@needs_browser
def test_a_failed_answer_gives_the_question_back(visit: Callable[..., Page], address: str) -> None:
    page = visit(address)
    say(page, "My dog is called Rex.")
    page.get_by_label("Your message").fill("word " * 3000)
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text(re.compile(r"tokens"))
    assert page.get_by_label("Your message").input_value().startswith("word word")
    assert len(texts(page)) == 2
    page.get_by_role("alert").get_by_role("button", name="Close").click()
    expect(page.get_by_role("alert")).to_have_count(0)


@needs_browser
def test_edits(visit: Callable[..., Page], address: str) -> None:
    page = visit(address)
    say(page, "My dog is called Rex.")
    say(page, "What is my dog called?")
    page.get_by_role("textbox", name="Your message").press("ArrowUp")
    page.get_by_label("The message").fill("What is 12 + 30?")
    page.get_by_role("button", name="Save", exact=True).last.click()
    expect(page.locator("article").nth(2)).to_contain_text("What is 12 + 30?")
    assert len(stored(page, address)["messages"]) == 4

    press(page, 0, "Edit")
    page.get_by_label("The message").fill("My dog is called Luna.")
    page.get_by_role("button", name="Save and answer").click()
    expect(page.locator("article")).to_have_count(2)
    answered(page)
    say(page, "What is my dog called?")
    assert "Luna" in texts(page)[3]

    before = page.url
    press(page, 1, "Branch")
    expect(page.locator("article")).to_have_count(2)
    assert page.url != before and len(stored(page, address)["messages"]) == 2
    say(page, "What is 12 + 30?")
    press(page, 2, "Delete")
    expect(page.locator("article")).to_have_count(3)
    assert [message["role"] for message in stored(page, address)["messages"]] == ["user", "assistant", "assistant"]
    press(page, 2, "Delete")
    expect(page.locator("article")).to_have_count(2)
    press(page, 1, "Again")
    answered(page)
    expect(page.locator("article")).to_have_count(2)
    press(page, 0, "Edit")
    page.keyboard.press("Escape")
    expect(page.get_by_label("The message")).to_have_count(0)


@needs_browser
def test_forgetting_is_a_cut(visit: Callable[..., Page], address: str) -> None:
    page = visit(address)
    page.get_by_label("System prompt of new chats").fill("You are a friendly helper who answers every question.")
    say(page, "My dog is called Rex.")
    say(page, "I live in Rome, near the river, in a small house with a green door, two old cats and a garden.")
    assert texts(page)[0].startswith("system: You are a friendly helper")
    press(page, 2, "Forget")
    expect(page.locator(".cut")).to_have_text("a message was cut out of the KV cache here")
    press(page, 1, "Forget")
    expect(page.locator("article")).to_have_count(3)
    say(page, "What is 12 + 30?")
    shifted = stored(page, address)["usage"]["shifted_tokens"]
    assert shifted > 0
    expect(page.locator("#numbers")).to_contain_text(f"kept after a cut{shifted}")
    page.reload()
    expect(page.locator(".cut")).to_have_count(2)


@needs_browser
def test_a_chat_moves_to_another_engine(visit: Callable[..., Page], address: str) -> None:
    page = visit(address)
    say(page, "My dog is called Rex.")
    before = texts(page)
    page.get_by_role("combobox", name="Model").select_option("llamacpp")
    expect(page.locator("#status")).to_contain_text("moved to llamacpp")
    assert texts(page) == before and stored(page, address)["model"] == "llamacpp"
    say(page, "What is my dog called?")
    assert "Rex" in texts(page)[3]
    expect(page.get_by_role("combobox", name="Model").locator("option:checked")).to_contain_text("llamacpp")


@needs_browser
def test_the_prompt_and_its_control_tokens(visit: Callable[..., Page], address: str) -> None:
    page = visit(address)
    say(page, "What is <|im_end|>?")
    page.get_by_role("button", name="Prompt").click()
    dialog = page.get_by_role("dialog")
    messages = stored(page, address)["messages"]
    prompt = httpx.post(f"{address}/apply-template", json={"messages": messages}).json()["prompt"]
    assert "".join(dialog.locator(".token").all_text_contents()) == prompt
    controls = dialog.locator(".control").all_text_contents()
    assert set(controls) == {"<|im_start|>", "<|im_end|>"}
    assert controls.count("<|im_end|>") == prompt.count("<|im_end|>") - 1, "the one that was typed is text"
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_be_hidden()


@needs_browser
def test_probabilities_of_tokens(visit: Callable[..., Page], address: str) -> None:
    page = visit(address)
    page.get_by_label("Temperature").fill("0")
    say(page, "What is 12 + 30?")
    answer = texts(page)[1].removeprefix("assistant: ")
    press(page, 1, "Tokens")
    assert "".join(page.locator(".chance").all_text_contents()) == answer
    page.locator(".chance").first.hover()
    body = {
        "messages": [{"role": "user", "content": "What is 12 + 30?"}],
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 5,
    }
    expected = httpx.post(f"{address}/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"][0]
    lines = page.get_by_role("tooltip").inner_text().splitlines()
    assert [json.loads(line.split("%", 1)[1]) for line in lines] == [each["token"] for each in expected["top_logprobs"]]
    page.get_by_label("Your message").hover()
    expect(page.get_by_role("tooltip")).to_be_hidden()
    press(page, 1, "Tokens")
    expect(page.locator(".chance")).to_have_count(0)


@needs_browser
def test_a_chat_is_saved_and_opened(visit: Callable[..., Page], address: str, tmp_path: Path) -> None:
    page = visit(address)
    say(page, "My dog is called Rex.")
    before, url = texts(page), page.url
    with page.expect_download() as download:
        page.get_by_role("button", name="Save").click()
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    assert file.name == "My dog is called Rex..json"
    page.locator("nav li button[aria-label]").first.click()
    expect(page.locator("article")).to_have_count(0)
    page.locator("#file").set_input_files(file)
    expect(page.locator("article")).to_have_count(2)
    assert texts(page) == before and page.url != url
    bad = tmp_path / "bad.json"
    bad.write_text("no JSON")
    page.locator("#file").set_input_files(bad)
    expect(page.get_by_role("alert")).to_contain_text("bad.json is not JSON")


@needs_browser
def test_hostile_text_runs_nothing(visit: Callable[..., Page], address: str) -> None:
    """Neither as a message of anybody nor as the name of a chat; what a script would do is not done."""
    messages = [{"role": role, "content": HOSTILE} for role in ("system", "user", "assistant")]
    body = {"model": "native", "name": HOSTILE, "messages": messages}
    session = httpx.post(f"{address}/v1/sessions", json=body).json()["id"]
    page = visit(f"{address}/#{session}")
    expect(page.locator("article")).to_have_count(3)
    assert page.title() == "slm-core"
    answer = page.locator("article.assistant .text")
    assert answer.locator("script, img, svg, iframe, form, input, style, b, [onmouseover]").count() == 0
    links = [link.get_attribute("href") for link in answer.locator("a").all()]
    assert links == ["https://example.com/c.png", "https://example.com/d", "https://example.com/"]
    assert "<script>" in answer.inner_text() and "javascript:" in answer.inner_text()
    page.get_by_role("button", name="Prompt").click()
    expect(page.locator(".token").first).to_be_visible()
    assert page.title() == "slm-core"


@needs_browser
@pytest.mark.parametrize("text", ENDLESS_MARKS, ids=lambda text: text[:2])
def test_hostile_markdown_ends(visit: Callable[..., Page], address: str, text: str) -> None:
    lines = text + "\n" + "\n".join(text[i : i + 3_900] for i in range(0, len(text), 3_900))
    body = {"model": "native", "messages": [{"role": "assistant", "content": lines}]}
    session = httpx.post(f"{address}/v1/sessions", json=body).json()["id"]
    page = visit(f"{address}/#{session}")
    expect(page.locator("article")).to_have_count(1, timeout=5_000)


@needs_browser
def test_markdown(visit: Callable[..., Page], address: str) -> None:
    body = {"model": "native", "messages": [{"role": "assistant", "content": MARKDOWN}]}
    session = httpx.post(f"{address}/v1/sessions", json=body).json()["id"]
    page = visit(f"{address}/#{session}")
    answer = page.locator("article .text")
    expect(answer).to_be_visible()
    selectors = {
        "bold": "strong",
        "italic": "em",
        "code": "p code",
        "list": "ul > li > p",
        "inner": "ul ol li",
        "quote": "blockquote",
        "block": "pre",
        "head": "th",
        "cells": "td",
        "last": ":scope > p:last-child",
    }
    texts = {name: answer.locator(selector).all_inner_texts() for name, selector in selectors.items()}
    assert texts == {
        "bold": ["Title", "bold"],
        "italic": ["italic"],
        "code": ["co*de*"],
        "list": ["one", "two"],
        "inner": ["inner"],
        "quote": ["quoted"],
        "block": ["x = '<b>'\n\n# no heading"],
        "head": ["a", "b"],
        "cells": ["1", "2"],
        "last": ["2 * 3 * 4 and a_b_c"],
    }
    assert answer.locator("ol[start='3'] > li").inner_text() == "three"
    assert answer.locator("hr").count() == 1


@needs_browser
def test_keys(visit: Callable[..., Page], address: str) -> None:
    page = visit(address)
    say(page, "My dog is called Rex.")
    page.get_by_role("button", name="Help").focus()
    page.keyboard.press("/")
    expect(page.get_by_label("Your message")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(page.get_by_label("Your message")).to_have_value("one\ntwo")
    page.keyboard.press("Alt+n")
    expect(page.locator("article")).to_have_count(0)
    page.get_by_role("button", name="Help").click()
    expect(page.get_by_role("dialog")).to_contain_text("cuts the message out of the KV cache")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()


@needs_browser
def test_a_narrow_screen(visit: Callable[..., Page], address: str) -> None:
    page = visit(address, viewport={"width": 360, "height": 640})
    say(page, "What is 12 + 30? " + "A long line without end, " * 5 + "x" * 200)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
    expect(page.locator("nav")).to_be_hidden()
    page.get_by_role("button", name="Inside").click()
    expect(page.locator("#map")).to_be_visible()
    expect(page.locator("#log")).to_be_hidden()
    page.get_by_role("button", name="Chats").click()
    expect(page.locator("nav")).to_be_visible()
    page.locator("nav li button").first.click()
    expect(page.locator("#log")).to_be_visible()
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_axe_finds_nothing(visit: Callable[..., Page], address: str, scheme: str, width: int) -> None:
    page = visit(address, viewport={"width": width, "height": 800}, color_scheme=scheme, bypass_csp=True)

    def check() -> None:
        results = Axe().run(page)
        assert results.violations_count == 0, results.generate_report()

    check()
    say(page, "What is 12 + 30?")
    press(page, 1, "Tokens")
    page.locator(".chance").first.hover()
    check()
    press(page, 0, "Edit")
    check()
    page.get_by_role("button", name="Prompt").click()
    check()


@needs_browser
def test_a_key_is_asked_for(visit: Callable[..., Page]) -> None:
    demo = ServedModel("demo", lambda: slm.load(slm.demo_model_path()), settings=EngineSettings(n_ctx=2048))
    app = create_app([demo], ServerOptions(keys=(ApiKey("secret"),)), log=None)
    with serving(app) as url:
        page = visit(url)
        for key in ("wrong", "secret"):
            expect(page.get_by_role("dialog")).to_contain_text("needs an API key")
            page.get_by_label("Key", exact=True).fill(key)
            page.get_by_role("button", name="Use it").click()
        say(page, "What is 12 + 30?")
        expect(page.get_by_role("button", name="Forget").first).to_be_disabled()
        page.reload()
        expect(page.locator("article")).to_have_count(2)
