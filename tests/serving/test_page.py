"""The page in a real Chromium, in front of the server's own HTTP, whose answers are written here."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
from pathlib import Path

import pytest
from fastapi.responses import JSONResponse, StreamingResponse

from spectrain.serve import Server, bound, listen, port_of
from spectrain.serving import server as serving_server
from spectrain.serving.access import Access
from spectrain.serving.protocol import ApiError
from spectrain.serving.service import Limits

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect
PIECES = [["Hé", "root"], ["llo ", "draft"], ["wörld", "input"], [" 🎉", "datastore"], ["!", "logits"]]
TEXT = "Héllo wörld 🎉!"
ENDED = {"tokens": 6, "tau": 2.5, "drafted": 8, "accepted": 4}
ENDED |= {"drafted_by_position": [4, 3, 1], "accepted_by_position": [3, 1, 0]}
SPEEDS = {"auto": 100.0, "autoregressive": 40.0}
HTML = "<img src=x onerror=\"document.title='run'\">"
COMPARE = "Plain decoding beside it"
SIDEWAYS = "[document.documentElement, document.querySelector('main')].map(node => node.scrollWidth - node.clientWidth)"


class Service:
    """Answers each chat with `pieces`, sent `n_bytes` at a time, and remembers what was asked."""

    pieces, n_bytes, pause_s, refusal, is_cut, n_open = PIECES, 1 << 20, 0.0, None, False, 0
    limits = Limits()

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.has_left = threading.Event()  # the reader, before the end

    async def models(self, request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "tiny", "methods": list(SPEEDS)}]})

    health = numbers = models

    async def answer(self, request, kind) -> StreamingResponse:
        if self.refusal:
            raise ApiError(self.refusal, HTML, retry_s=7)
        self.asked.append(await request.json())
        method = self.asked[-1]["method"]
        events = [{"choices": [{"delta": {}}], "spectrain": {"pieces": [piece]}} for piece in self.pieces]
        ended = {**ENDED, "method": method, "tokens_per_s": SPEEDS[method]}
        events += [] if self.is_cut else [{"choices": [{"delta": {}, "finish_reason": "stop"}], "spectrain": ended}]
        lines = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n" for event in events)
        return StreamingResponse(self.stream(lines.encode()), media_type="text/event-stream")

    async def stream(self, text: bytes):
        try:
            for start in range(0, len(text), self.n_bytes):
                yield text[start : start + self.n_bytes]
                await asyncio.sleep(self.pause_s)
        except asyncio.CancelledError:
            self.has_left.set()


@pytest.fixture
def service():
    return Service()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as tools:
        paths = [tools.chromium.executable_path, *map(shutil.which, ("chromium", "google-chrome"))]
        path = next((path for path in paths if path and Path(path).exists()), None)
        if path is None:
            pytest.skip("no Chromium is installed (apt-get install chromium, or playwright install chromium)")
        yield tools.chromium.launch(executable_path=path, args=["--no-sandbox"])


@pytest.fixture
def page(service, browser, request, monkeypatch):
    monkeypatch.setattr(serving_server, "Endpoints", lambda service: service)  # it answers by itself
    listener, server = bound("127.0.0.1", 0), Server(service, Access(getattr(request, "param", None)))
    listen(listener, 0)
    thread = threading.Thread(target=server.run, args=[[listener]])
    thread.start()
    page, wrong = browser.new_page(base_url=f"http://127.0.0.1:{port_of(listener)}"), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if "Content Security Policy" in line.text else None)
    page.goto("/")
    page.locator("#target:not(:empty), #problem:not(:empty)").wait_for()
    yield page
    page.close()
    server.should_exit = True
    thread.join()
    assert wrong == []


def ask(page, text: str = "Hello", wait_for: str = ".turn:last-child .actions button") -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    page.locator(wait_for).first.wait_for()


def styles(page, selector: str, name: str) -> list[str]:
    return page.locator(selector).evaluate_all(f"nodes => nodes.map(node => getComputedStyle(node).{name})")


def test_streams_tokens_with_their_sources(page, service):
    service.n_bytes, service.pause_s = 1, 0.001  # chunks end within characters, lines and "\r\n"
    ask(page)
    spans = page.locator(".text span").evaluate_all("spans => spans.map(span => [span.textContent, span.className])")
    assert spans == [[piece.lstrip(), source] for piece, source in PIECES]
    assert page.locator(".text").text_content() == TEXT
    said = "auto · 100 tokens/s · tau 2.50 · 6 tokens · 4 of 8 drafted accepted"
    expect(page.locator(".note").first).to_have_text(said)
    assert page.locator("figure li").all_text_contents() == ["75", "33", "0"]
    seen = ["target", "draft model", "text so far", "datastore", "logits"]
    assert page.locator("#legend li:visible").all_text_contents() == seen


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_sources_differ_in_readable_colours_and_in_their_underlines(page, scheme):
    def luminance(colour: str) -> float:  # WCAG 2
        values = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
        r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    page.emulate_media(color_scheme=scheme)
    back = luminance(*styles(page, "body", "backgroundColor"))
    assert (back > 0.9) == (scheme == "light")
    colours = styles(page, "#legend li", "color")
    lines = [line.split("rgb")[0] for line in styles(page, "#legend li", "textDecoration")]
    assert len(set(colours)) == len(set(lines)) == 7
    for colour in colours:
        darker, lighter = sorted([back, luminance(colour)])
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5
    page.get_by_label("Colours").uncheck()
    assert set(styles(page, "#legend li", "textDecorationLine")) == {"none"}


def test_shows_html_as_text_also_in_code(page, service):
    service.pieces = [["```html\n", "root"], [HTML, "draft"], ["\n```", "root"], ["\n\n", "root"], [HTML, "input"]]
    ask(page, HTML)
    assert page.locator(".question").text_content() == HTML
    assert page.locator(".text").text_content() == "".join(text for text, _ in service.pieces)
    assert page.locator(".code").text_content() == f"```html\n{HTML}\n```\n"


@pytest.mark.parametrize("key", ["Enter", "Escape"])
def test_stop_ends_the_request_and_keeps_what_was_written(page, service, key):
    service.pieces, service.n_bytes, service.pause_s = [["word ", "root"]] * 10_000, 1000, 0.02
    ask(page, wait_for=".text span")
    page.get_by_role("button", name="Stop").press(key)
    assert service.has_left.wait(10)
    expect(page.locator(".note")).to_contain_text("Stopped.")
    service.pieces, written = PIECES, page.locator(".text").text_content()
    ask(page, "Go on")
    assert service.asked[1]["messages"][1] == {"role": "assistant", "content": written}


def test_plain_decoding_stands_beside_an_answer(page, service):
    ask(page)
    page.get_by_role("button", name=COMPARE).click()
    said = "2.50 times plain decoding: 100 instead of 40 tokens/s. Both texts are the same."
    expect(page.locator(".verdict")).to_contain_text(said)
    ours, plain = (column.bounding_box() for column in page.locator(".columns section").all())
    assert ours["y"] == plain["y"]
    assert ours["x"] + ours["width"] < plain["x"]
    assert service.asked[1] == {**service.asked[0], "method": "autoregressive"}


def test_a_phone_needs_no_sideways_scrolling(page, service):
    service.pieces = [["x" * 500, "draft"], ["\n```\n", "root"], ["x" * 500, "root"]]
    page.set_viewport_size({"width": 320, "height": 640})
    ask(page, "x" * 500)
    page.get_by_role("button", name=COMPARE).click()
    page.locator(".verdict").wait_for()
    assert page.evaluate(SIDEWAYS) == [0, 0]


def test_settings_and_turns_reach_the_server(page, service):
    page.get_by_text("System prompt").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Method").select_option("autoregressive")
    page.get_by_label("Temperature").press("ArrowRight")
    page.get_by_label("Message").type("one")
    page.keyboard.press("Shift+Enter")
    ask(page, page.get_by_label("Message").input_value() + "two")
    ask(page, "three")
    said = [message["content"] for message in service.asked[1].pop("messages")]
    assert said == ["Be brief.", "one\ntwo", TEXT, "three"]
    asked = {"model": "tiny", "method": "autoregressive", "temperature": 0.1, "stream": True, "annotate": True}
    assert service.asked[1] == asked
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    page.locator("#empty button").first.click()
    expect(page.get_by_role("button", name="Copy")).to_be_visible()
    assert len(service.asked[2]["messages"]) == 2


def test_the_keyboard_reaches_every_control_and_shows_where_it_is(page):
    page.get_by_label("Message").focus()
    for name in ("prompt", "send", "method", "", "temperature", "colours"):
        assert page.evaluate("document.activeElement.id") == name
        assert styles(page, ":focus", "outlineStyle") != ["none"]
        page.keyboard.press("Tab")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"refusal": 429}, "The server is busy. Try again in 7 s."),
        ({"refusal": 400}, f"The server says: {HTML}"),
        ({"is_cut": True}, "The connection to the server was lost."),
    ],
)
def test_says_in_a_sentence_what_went_wrong(page, service, state, said):
    vars(service).update(state)
    ask(page)
    expect(page.locator(".note.bad")).to_contain_text(said)
    vars(service).update(refusal=None, is_cut=False)
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".text")).to_have_text(TEXT)
    assert len(service.asked[-1]["messages"]) == 1


@pytest.mark.parametrize("page", ["secret"], indirect=True)
def test_asks_for_the_key_of_the_server(page):
    for key, said in (("wrong", "The server asks for a key."), ("secret", "The server does not accept this key.")):
        expect(page.locator("#problem")).to_have_text(said)
        page.get_by_label("The server asks for a key.").fill(key)
        page.keyboard.press("Enter")
    expect(page.locator("#target")).to_have_text("tiny")
    ask(page)
    assert page.evaluate("[document.cookie, localStorage.length, sessionStorage.length]") == ["", 0, 1]


def test_long_answers_are_appended_and_follow_only_a_reader_at_their_end(page, service):
    service.pieces, service.n_bytes, service.pause_s = [["word ", "root"], ["and ", "draft"]] * 5000, 100_000, 1
    ask(page, wait_for=".text span:nth-child(1000)")
    first = page.locator(".text span").first.element_handle()
    assert page.locator("main").evaluate("node => node.scrollTop") > 0
    page.evaluate("document.querySelector('main').scrollTop = 0")
    service.pause_s = 0.05
    page.get_by_role("button", name="Copy").wait_for(state="attached")
    assert page.locator(".text span").count() == 10_000
    assert first.evaluate("node => node.isConnected")
    assert page.locator("main").evaluate("node => node.scrollTop") == 0
