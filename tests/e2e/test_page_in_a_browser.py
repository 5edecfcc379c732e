"""The page in a real browser: chat, stop, error, timeline, instances that die and come back, phones, keyboard, dark mode."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page, browser, find_browser
from system import Stand

from watching import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.sampled(4, group="page"),
    pytest.mark.skipif(find_browser() is None, reason="no Chromium here; on Debian: apt-get install chromium"),
]

ANSWERED = "document.querySelectorAll('.assistant:not(.writing) .timing').length"
LAST = "[...document.querySelectorAll('.assistant .text')].at(-1)?.textContent ?? ''"
PICTURES = os.environ.get("KVBATON_PICTURES")
"""A directory in which pictures of the page are kept."""


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    with Stand() as running:
        for role in ("prefill", "decode"):
            running.start(role, role)
        running.wait_for("live", 2)
        yield running


@pytest.fixture
def page(stand: Stand) -> Iterator[Page]:
    """The page, which at its end must have complained of nothing, and asked no other server for anything."""
    with browser() as opened:
        opened.open(f"http://127.0.0.1:{stand.router_port}/")
        opened.wait("document.querySelectorAll('.instance:not(.missing)').length === 2", "both instances are shown")
        yield opened
        assert opened.complaints == []
        own = f"http://127.0.0.1:{stand.router_port}/"
        assert [url for url in opened.requested if not url.startswith((own, "about:", "data:"))] == []


def ask(page: Page, text: str, tokens: int = 16) -> None:
    """With the keyboard alone: the cursor is in the message when the page opens, and after each answer."""
    page.run(f"document.getElementById('max-tokens').value = {tokens}")
    assert page.run("document.activeElement.id") == "prompt"
    page.write(text)
    page.press("Enter")


def picture(page: Page, name: str) -> None:
    if PICTURES:
        page.picture(Path(PICTURES) / f"{name}.png")


def test_an_answer_is_streamed_and_its_hand_off_is_shown(page: Page) -> None:
    watched = "document.getElementById('conversation'), {subtree: true, childList: true, characterData: true}"
    noted = f"() => window.lengths.add(({LAST}).length)"
    page.run(f"window.lengths = new Set(); new MutationObserver({noted}).observe({watched})")
    ask(page, "What is the capital of France?", 200)
    page.wait(f"{ANSWERED} === 1", "an answer with its timing")
    assert page.run("window.lengths.size") > 3, "the answer was not shown piece by piece"
    assert "moved over" in page.run("document.querySelector('.timing').textContent")
    assert page.run("document.querySelector('.user .text').textContent") == "What is the capital of France?"
    ask(page, "And of Spain?")
    page.wait(f"{ANSWERED} === 2", "the next answer of the same chat")
    page.click(".timeline summary")
    page.wait("document.querySelectorAll('.timeline svg rect').length > 2", "the timeline is drawn")
    picture(page, "page")


def test_stop_ends_the_answer_here_and_at_the_instances(page: Page, stand: Stand) -> None:
    ask(page, "Go on for long", 4000)
    page.wait(f"({LAST}).length > 20", "the answer has begun")
    page.click("#stop")
    page.wait("document.querySelector('.note')?.textContent === 'Stopped.'", "it has stopped")
    kept = page.run(LAST)
    wait_until(lambda: all(each["in_flight"] == 0 for each in stand.instances("live")), "the instances have stopped too")
    assert page.run(LAST) == kept


def test_a_model_that_answers_with_a_script_runs_none(page: Page) -> None:
    answer = "<img src=x onerror='window.attacked = 1'><script>window.attacked = 1</script><b>bold</b>"
    events = [{"choices": [{"index": 0, "delta": {"content": answer}, "finish_reason": "stop"}]}]
    stream = "".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n"
    page.answer_instead("/v1/chat/completions", stream.encode())
    ask(page, "Attack me")
    page.wait(f"{ANSWERED} === 1", "the answer")
    assert page.run(LAST) == answer
    assert page.run("document.querySelectorAll('.assistant .text *').length") == 0
    # The control: what the policy of the page forbids is noticed here.
    page.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.attacked = 1'}))")
    wait_until(lambda: bool(page.complaints), "the browser refuses the script")
    assert page.run("window.attacked") is None
    page.complaints.clear()


@pytest.mark.parametrize(("width", "height", "scheme"), [(360, 640, "light"), (360, 640, "dark"), (1280, 800, "dark")])
def test_it_fits_a_phone_and_the_dark(page: Page, width: int, height: int, scheme: str) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    ask(page, "A word that is far too long for one line of a phone: " + "x" * 200)
    page.wait(f"{ANSWERED} === 1", "the answer")
    assert page.run("document.documentElement.scrollWidth") <= width
    for name in ("prompt", "send"):
        found = f"document.getElementById('{name}').getBoundingClientRect()"
        box = page.run(f"(() => {{ const box = {found}; return [box.left, box.right, box.bottom]; }})()")
        assert box[0] >= 0
        assert box[1] <= width
        assert box[2] <= height
    paper, ink = (
        sum(map(int, page.run(f"getComputedStyle(document.body).{name}.match(/\\d+/g).slice(0, 3)"))) / 3
        for name in ("backgroundColor", "color")
    )
    assert abs(paper - ink) > 150
    assert (paper < ink) == (scheme == "dark")
    picture(page, f"page-{scheme}-{width}")


LIVE_ROWS = "document.querySelectorAll('.instance-row').length"
FIRST_CAUSE = "document.querySelector('#causes td:nth-child(2)')?.textContent ?? '0'"


def test_the_live_page_shows_hand_offs_bytes_and_failures_as_they_happen(page: Page, stand: Stand) -> None:
    page.click("#to-live")
    page.wait(f"location.pathname === '/page/live.html' && {LIVE_ROWS} === 2", "both instances are shown")
    seen = "window.seen = {rates: new Set(), underWay: new Set()}"
    look = "() => { window.seen.rates.add(at('rate')); window.seen.underWay.add(at('under-way')); }"
    watched = "document.querySelector('main'), {subtree: true, childList: true, characterData: true}"
    page.run(
        f"{seen}; window.at = (id) => document.getElementById(id).textContent; new MutationObserver({look}).observe({watched})"
    )
    stop = threading.Event()

    def load() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            stand.client.complete(f"{number} " + "a long prompt whose cache is handed over " * 20, max_tokens=2)

    clients = [threading.Thread(target=load, daemon=True) for _ in range(3)]
    for client in clients:
        client.start()
    try:
        page.wait("[...window.seen.rates].some((rate) => /^[1-9].* [kMG]B\\/s$/.test(rate))", "bytes per second are shown")
        page.wait("[...window.seen.underWay].some((count) => Number(count) > 0)", "hand-offs under way are shown")
        page.wait("Number(at('requests')) > 0", "requests in flight are shown")
        page.call("Emulation.setDeviceMetricsOverride", width=1280, height=800, deviceScaleFactor=1, mobile=False)
        picture(page, "live")
        before = int(page.run(FIRST_CAUSE))
        stand.signal("decode", signal.SIGSTOP)  # in mid-transfer, so that the source gives up on it
        page.wait(f"{LIVE_ROWS} === 1 || document.querySelector('.reason') !== null", "it is shown as silent, or gone")
        stand.signal("decode", signal.SIGCONT)
        page.wait(f"{LIVE_ROWS} === 2 && document.querySelector('.reason') === null", "it is back")
        stand.kill("decode")
        page.wait(
            "[...document.querySelectorAll('#events .failure')].some((line) => line.textContent.includes('has left'))",
            "it has left",
        )
        page.wait(f"Number({FIRST_CAUSE}) > {before}", "what failed with it is counted by its cause")
        assert page.run("document.querySelector('#causes td').textContent") not in ("", "none")
        stand.fleets.pop("decode").stop()
        stand.start("decode", "decode")
        page.wait("document.querySelector('#events').textContent.includes('has joined')", "its successor has joined")
    finally:
        stop.set()
        for client in clients:
            client.join(60)
    page.call("Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=1, mobile=True)
    assert page.run("document.documentElement.scrollWidth") <= 360
    page.run("document.getElementById('to-live').focus()")
    page.press("Enter")
    page.wait("location.pathname === '/'", "the keyboard leads back to the chat")


def test_instances_that_die_and_come_back_are_shown_and_an_error_can_be_tried_again(page: Page, stand: Stand) -> None:
    stand.kill("decode")
    page.wait("document.querySelector('.instance.missing')?.textContent.includes('No decode instance')", "it is missed")
    ask(page, "Is there an answer?")
    page.wait("document.querySelector('.problem button') !== null", "an error that can be tried again")
    assert "Start what is missing" in page.run("document.querySelector('.problem').textContent")
    stand.fleets.pop("decode").stop()
    stand.start("decode", "decode")
    page.wait("document.querySelectorAll('.instance:not(.missing)').length === 2", "it is back")
    page.click(".problem button")
    page.wait(f"{ANSWERED} === 1", "the answer after all")
    assert page.run("document.querySelectorAll('.problem').length") == 0
