"""`kvbaton serve`, `up` and `router`: which options reach what they start, and which addresses an instance goes by."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from typing import Any

import pytest

from kvbaton.cli import running
from kvbaton.cli.main import main
from kvbaton.config import CLUSTER_KEY_VARIABLE, HandoffSettings, OnFailure
from kvbaton.core.handoff import AuxChannel, Integrity, Mode
from kvbaton.discovery.messages import TransferMode
from kvbaton.engines.embedded import instance
from kvbaton.engines.embedded.instance import InstanceSettings
from kvbaton.engines.embedded.settings import HttpSettings
from kvbaton.router import app
from kvbaton.router.settings import RouterSettings

ALL = ("--mode", "pull", "--integrity", "full", "--aux-channel", "data", "--on-failure", "recompute")


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvbaton", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings of what would have been served."""
    seen: list[Any] = []

    async def serve(settings: object, say: object) -> None:
        seen.append(settings)

    def run_server(server: Coroutine[Any, Any, None]) -> int:
        with pytest.raises(StopIteration):
            server.send(None)
        return 0

    monkeypatch.setenv(CLUSTER_KEY_VARIABLE, "k" * 32)
    monkeypatch.setattr(instance, "serve_instance", serve)
    monkeypatch.setattr(app, "serve_router", serve)
    monkeypatch.setattr(running, "run_server", run_server)
    return seen


def _served(monkeypatch: pytest.MonkeyPatch, started: list[Any], *arguments: str) -> InstanceSettings:
    assert _run(monkeypatch, "serve", *arguments) == 0
    settings = started.pop()
    assert isinstance(settings, InstanceSettings)
    return settings


@pytest.mark.parametrize(
    ("environment", "arguments", "shown"),
    [
        ({}, (), True),
        ({"KVBATON_API_KEY": "k"}, (), False),
        ({"KVBATON_INSTANCE_API_KEY": "k"}, (), False),
        ({"KVBATON_API_KEY": "k"}, ("--show-details",), True),
        ({}, ("--no-show-details",), False),
    ],
)
def test_details_are_hidden_where_clients_need_a_key(
    monkeypatch: pytest.MonkeyPatch, started: list[Any], environment: dict[str, str], arguments: tuple[str, ...], shown: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _served(monkeypatch, started, *arguments).http.show_details is shown


def test_the_budgets_of_requests_reach_the_server(monkeypatch: pytest.MonkeyPatch, started: list[Any]) -> None:
    limits = ("--max-prompt-bytes", "1", "--max-request-bytes", "2", "--max-body-bytes", "3", "--max-request-sequences", "4")
    settings = _served(monkeypatch, started, *limits, "--max-waiting", "5")
    assert settings.http == HttpSettings(1, 2, 3, 4, show_details=True)
    assert settings.engine.max_waiting == 5


def test_how_it_hands_over_reaches_agents_and_engine(monkeypatch: pytest.MonkeyPatch, started: list[Any]) -> None:
    settings = _served(monkeypatch, started, *ALL)
    told = HandoffSettings(Mode.PULL, Integrity.FULL, AuxChannel.DATA, OnFailure.RECOMPUTE)
    assert settings.handoff == settings.engine.handoff == told
    assert _served(monkeypatch, started).handoff.mode is Mode.PUSH
    assert _served(monkeypatch, started, "--transport", "nixl", "--unfenced-writes").handoff.unfenced_writes
    assert not _served(monkeypatch, started, "--transport", "nixl").handoff.unfenced_writes


@pytest.mark.parametrize(
    ("arguments", "http", "control", "bound"),
    [
        ((), "127.0.0.1:8100", "host:127.0.0.1,handshake:8101,notify:8101", "127.0.0.1"),
        (("--host", "::1"), "[::1]:8100", "host:::1,handshake:8101,notify:8101", "::1"),
        (("--host", "localhost"), "localhost:8100", "host:localhost,handshake:8101,notify:8101", "127.0.0.1"),
        (
            ("--host", "0.0.0.0", "--advertise-host", "10.1.2.3"),  # noqa: S104
            "10.1.2.3:8100",
            "host:10.1.2.3,handshake:8101,notify:8101",
            "0.0.0.0",  # noqa: S104
        ),
        (
            ("--host", "0.0.0.0", "--router", "127.0.0.1:8001"),  # noqa: S104
            "127.0.0.1:8100",
            "host:127.0.0.1,handshake:8101,notify:8101",
            "0.0.0.0",  # noqa: S104
        ),
    ],
)
def test_where_others_reach_it(
    monkeypatch: pytest.MonkeyPatch, started: list[Any], arguments: tuple[str, ...], http: str, control: str, bound: str
) -> None:
    settings = _served(monkeypatch, started, *arguments)
    assert (settings.http_address, str(settings.control_address), settings.control_host) == (http, control, bound)


def test_an_address_that_nobody_can_reach_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], started: list[Any]
) -> None:
    assert _run(monkeypatch, "serve", "--host", "0.0.0.0") == 2  # noqa: S104
    assert "--advertise-host" in capsys.readouterr().err
    assert _run(monkeypatch, "serve", "--advertise-host", "::") == 2
    assert "--advertise-host is '::'" in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize(("option", "mode"), [("auto", None), ("READ", TransferMode.READ), ("WRITE", TransferMode.WRITE)])
def test_the_mode_of_a_router(
    monkeypatch: pytest.MonkeyPatch, started: list[Any], option: str, mode: TransferMode | None
) -> None:
    assert _run(monkeypatch, "router", "--transfer-mode", option) == 0
    settings = started.pop()
    assert isinstance(settings, RouterSettings)
    assert settings.transfer_mode is mode


@pytest.mark.parametrize("command", ["serve", "up", "verify"])
@pytest.mark.parametrize("option", ["--mode", "--integrity", "--aux-channel", "--on-failure"])
def test_a_way_to_hand_over_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, option: str
) -> None:
    assert _run(monkeypatch, command, option, "carrier-pigeon") == 2
    assert "carrier-pigeon" in capsys.readouterr().err
