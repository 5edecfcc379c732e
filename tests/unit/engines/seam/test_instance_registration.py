"""Late registration: an instance tells routers of itself when its API answers, not before, and never after its end."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import cast

import pytest

from kvbaton.config import Trust
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Incarnation, Mode
from kvbaton.core.topology import Shape
from kvbaton.discovery.announcer import Announcer
from kvbaton.discovery.messages import Registration
from kvbaton.engines import instance
from kvbaton.engines.instance import LateAnnouncer, ModelIdentity, answers
from kvbaton.launch.ports import PortPicker
from watching import wait_until


class Healthy(BaseHTTPRequestHandler):
    """Answers 200 to everything."""

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""


class Voice:
    """An announcer that only remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def start(self) -> None:
        """Remember."""
        self.said.append("start")

    def stop(self) -> None:
        """Remember."""
        self.said.append("stop")


@pytest.fixture
def api() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", PortPicker().pick()), Healthy)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(5)


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names a proxy, and nobody is there."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setattr("urllib.request._opener", None)


def test_the_api_of_this_instance_is_asked_without_a_proxy(api: str) -> None:
    assert answers(api)
    assert not answers(f"127.0.0.1:{PortPicker().pick()}")


def test_it_registers_when_the_api_answers_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance, "_LOOK_S", 0.01)
    voice, is_up, looks = Voice(), threading.Event(), []

    def look(address: str) -> bool:
        looks.append(address)
        return is_up.is_set()

    late = LateAnnouncer(cast(Announcer, voice), "127.0.0.1:1", look)
    late.start()
    wait_until(lambda: len(looks) > 2, "it looks again and again")
    assert voice.said == []
    is_up.set()
    wait_until(lambda: voice.said == ["start"], "it registers")
    late.stop()
    assert voice.said == ["start", "stop"]


def test_one_that_is_stopped_before_its_api_answers_never_registers() -> None:
    voice = Voice()
    late = LateAnnouncer(cast(Announcer, voice), "127.0.0.1:1", lambda _: False)
    late.start()
    late.stop()
    assert voice.said == ["stop"]


def test_an_api_that_never_answers_is_told_of_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A vLLM that speaks HTTPS would wait silently for ever."""
    monkeypatch.setattr(instance, "_LOOK_S", 0.001)
    monkeypatch.setattr(logging.getLogger("kvbaton"), "propagate", True)
    looks = itertools.count()
    late = LateAnnouncer(cast(Announcer, Voice()), "10.0.0.5:8443", lambda _: False, lambda: float(next(looks)))
    late.start()
    wait_until(lambda: len(caplog.messages) >= 2, "it says so twice")
    late.stop()
    assert "the API at 10.0.0.5:8443 has not answered for 300 s" in caplog.messages[0]
    assert "--ssl-certfile" in caplog.messages[0]
    assert next(looks) > 2 * 300


def test_nothing_is_said_of_an_api_that_is_only_slow(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(instance, "_LOOK_S", 0.001)
    voice, looks = Voice(), itertools.count()
    late = LateAnnouncer(cast(Announcer, voice), "10.0.0.5:8443", lambda _: next(looks) > 100, lambda: 299.0)
    late.start()
    wait_until(lambda: voice.said == ["start"], "it registers")
    late.stop()
    assert caplog.messages == []


def test_an_instance_registers_its_true_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Registration] = []
    monkeypatch.setattr(instance, "Announcer", lambda registration, *_, **__: sent.append(registration))
    instance.announcer_of(
        role="prefill",
        http_address="127.0.0.1:8001",
        control_address=ControlAddress.of("127.0.0.1", 7001),
        mode=Mode.PUSH,
        incarnation=Incarnation("one"),
        model=ModelIdentity("model", "print"),
        routers=["127.0.0.1:9"],
        is_used=lambda: False,
        trust=Trust(),
        shape=Shape.parse("dp2,pp3,tp4"),
    )
    assert [(each.dp_size, each.pp_size, each.tp_size) for each in sent] == [(2, 3, 4)]
