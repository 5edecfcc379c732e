"""`kvbaton explain`: a picture or JSON with exit code 0, or exit code 2 and what to do next."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from kvbaton.cli.main import main
from kvbaton.core.timeline import Side
from kvbaton.launch.ports import PortPicker
from kvbaton.observe.transfer_report import SideAnswer, build_report
from true_notes import TRANSFER, Way, account, notes_of_pull, notes_of_push


class FakeRouter:
    """Serves `pages` (path to status and body) on a free port."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, bytes]] = {}
        pages = self.pages

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = pages.get(self.path, (404, b'{"error":{"message":"this router knows no transfer"}}'))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", PortPicker().pick()), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    fake = FakeRouter()
    thread = threading.Thread(target=fake.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()
    thread.join(10)


def explained(monkeypatch: pytest.MonkeyPatch, *arguments: str, columns: int = 120) -> int:
    monkeypatch.setattr(sys, "argv", ["kvbaton", "explain", *arguments])
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def story_page(*ways: Way) -> tuple[int, bytes]:
    return 200, msgspec.json.encode(build_report(TRANSFER, account(Side.SOURCE, *ways), account(Side.TARGET, *ways)))


@pytest.mark.parametrize("columns", [20, 80, 300])
def test_a_picture_with_a_row_per_phase(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], router: FakeRouter, columns: int
) -> None:
    router.pages[f"/handoffs/{TRANSFER}"] = story_page(notes_of_push(Way()))
    assert explained(monkeypatch, TRANSFER, "--router", router.url, columns=columns) == 0
    shown = capsys.readouterr().out
    for phase in ("queue at the source", "prefill", "queue at the target", "grant", "wire", "confirmation", "first step"):
        assert re.search(rf"^{phase} .*[█▒▓░]", shown, re.MULTILINE), phase
    assert "▓" in shown
    assert "The first decode step came" in shown
    assert "layers" not in shown


def test_last_is_the_newest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], router: FakeRouter) -> None:
    router.pages["/handoffs"] = (200, json.dumps({"handoffs": [{"transfer_id": TRANSFER}, {"transfer_id": "old"}]}).encode())
    router.pages[f"/handoffs/{TRANSFER}"] = story_page(notes_of_pull(Way()))
    assert explained(monkeypatch, "last", "--router", router.url, "--verbose") == 0
    shown = capsys.readouterr().out
    assert f"transfer {TRANSFER}" in shown
    assert "router" in shown
    assert "announced at" in shown


def test_json_is_one_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], router: FakeRouter) -> None:
    router.pages[f"/handoffs/{TRANSFER}"] = story_page(notes_of_push(Way()))
    assert explained(monkeypatch, TRANSFER, "--router", router.url, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["command"], document["ok"], document["settings"]) == ("explain", True, {"router": router.url})
    assert document["summary"]["transfer_id"] == TRANSFER


def test_one_side_and_many_hand_offs_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], router: FakeRouter
) -> None:
    way = notes_of_push(Way())
    lone = build_report(TRANSFER, account(Side.SOURCE, way), SideAnswer("decode:1", problem="it is gone"))
    many = msgspec.structs.replace(lone, handoffs=lone.handoffs * 12)
    router.pages[f"/handoffs/{TRANSFER}"] = (200, msgspec.json.encode(many))
    assert explained(monkeypatch, TRANSFER, "--router", router.url) == 0
    shown = capsys.readouterr().out
    assert "target: decode:1 (it is gone)" in shown
    assert "and 4 more hand-offs" in shown


@pytest.mark.parametrize(
    ("page", "transfer", "expected"),
    [
        (None, TRANSFER, "this router knows no transfer"),
        ((200, b'{"handoffs": []}'), "last", "has routed nothing yet"),
        ((200, b"[1]"), "last", "is it a kvbaton router?"),
        ((200, b"<html>"), "last", "is it a kvbaton router?"),
        ((500, b"<html>"), "last", "answered 500; is it a kvbaton router?"),
    ],
)
def test_what_cannot_be_explained_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    router: FakeRouter,
    page: tuple[int, bytes] | None,
    transfer: str,
    expected: str,
) -> None:
    if page is not None:
        router.pages["/handoffs"] = page
    assert explained(monkeypatch, transfer, "--router", router.url) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert expected in said.err
    assert "Traceback" not in said.err


def test_a_story_of_another_shape_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], router: FakeRouter
) -> None:
    router.pages[f"/handoffs/{TRANSFER}"] = (200, b'{"transfer_id": 1}')
    assert explained(monkeypatch, TRANSFER, "--router", router.url) == 2
    assert "is it of the same version?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("router_address", "expected"),
    [(None, "is it running?"), ("ftp://x", "--router is 'ftp://x'"), ("http://[", "no router at"), ("file:///etc", "--router")],
)
def test_no_router_is_told_by_its_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], router_address: str | None, expected: str
) -> None:
    address = router_address or f"127.0.0.1:{PortPicker().pick()}"
    assert explained(monkeypatch, "last", "--router", address) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert "Traceback" not in said
