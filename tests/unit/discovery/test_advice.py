"""What an instance's log shows its owner: refusals at once, and advice when no request ever comes."""

from __future__ import annotations

import logging

import pytest

from kvbaton.discovery.advice import Adviser
from kvbaton.discovery.heartbeats import RouterEvent, RouterEventKind
from kvbaton.discovery.messages import InstanceType, Registration, TransferMode

REGISTRATION = Registration(
    type=InstanceType.DECODE,
    http_address="127.0.0.1:8201",
    zmq_address="host:127.0.0.1,handshake:1,notify:1",
    transfer_mode=TransferMode.WRITE,
)


@pytest.fixture(autouse=True)
def _everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def advised(caplog: pytest.LogCaptureFixture) -> int:
    return caplog.text.count("no request has come")


def test_advice_comes_once_when_no_request_arrives(caplog: pytest.LogCaptureFixture) -> None:
    adviser = Adviser(REGISTRATION, lambda: False, 60.0)
    adviser.on_event(RouterEvent("r:1", RouterEventKind.REACHED), 0.0)
    adviser.advise(59.9)
    assert advised(caplog) == 0
    for now in (60.0, 61.0, 500.0):
        adviser.advise(now)
    assert advised(caplog) == 1
    for part in ("transfer_mode WRITE", "--mode push", "restarted", "r:1", "127.0.0.1:8201", "(prefill)"):
        assert part in caplog.text


@pytest.mark.parametrize("kind", [RouterEventKind.WELCOME, RouterEventKind.REFUSED])
def test_a_router_that_answers_needs_no_guesses(caplog: pytest.LogCaptureFixture, kind: RouterEventKind) -> None:
    adviser = Adviser(REGISTRATION, lambda: False, 60.0)
    adviser.on_event(RouterEvent("r:1", RouterEventKind.REACHED), 0.0)
    adviser.on_event(RouterEvent("r:1", kind, "because"), 0.1)
    adviser.advise(100.0)
    assert advised(caplog) == 0
    assert ("because" in caplog.text) == (kind is RouterEventKind.REFUSED)


def test_no_advice_once_a_request_has_come(caplog: pytest.LogCaptureFixture) -> None:
    adviser = Adviser(REGISTRATION, lambda: True, 60.0)
    adviser.on_event(RouterEvent("r:1", RouterEventKind.REACHED), 0.0)
    adviser.advise(100.0)
    assert advised(caplog) == 0


def test_a_router_that_was_never_reached_gives_no_advice(caplog: pytest.LogCaptureFixture) -> None:
    adviser = Adviser(REGISTRATION, lambda: False, 60.0)
    adviser.on_event(RouterEvent("r:1", RouterEventKind.AWAY, "5 s"), 5.0)
    adviser.advise(100.0)
    assert advised(caplog) == 0
    assert "r:1 has not been reachable for 5 s" in caplog.text
