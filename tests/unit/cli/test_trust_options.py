"""`kvbaton serve` and its trust: what is refused before a model is loaded, and what reaches the instance."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from kvbaton.cli import running
from kvbaton.cli.main import main
from kvbaton.config import CLUSTER_KEY_VARIABLE
from kvbaton.core.auth import keys_of
from kvbaton.engines.embedded import instance
from kvbaton.engines.embedded.instance import InstanceSettings

KEY = "a key of thirty-two characters.."


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLUSTER_KEY_VARIABLE, raising=False)


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvbaton", "serve", "--model", "/does/not/exist", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[InstanceSettings]:
    """What would have been served."""
    seen: list[InstanceSettings] = []

    async def serve_instance(settings: InstanceSettings, say: object) -> None:
        seen.append(settings)

    def run_server(server: Coroutine[Any, Any, None]) -> int:
        with pytest.raises(StopIteration):
            server.send(None)
        return 0

    monkeypatch.setattr(instance, "serve_instance", serve_instance)
    monkeypatch.setattr(running, "run_server", run_server)
    return seen


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--host", "0.0.0.0"), "the control port would listen on 0.0.0.0"),  # noqa: S104
        (("--host", "10.1.2.3"), "the control port would listen on 10.1.2.3"),
        (("--allow", "10.0.0.0/33"), "--allow is '10.0.0.0/33'"),
        (("--allow", "10.0.0.0/8", "--allow", "10.0.0.1/8"), "--allow is '10.0.0.1/8'"),
        (("--cluster-key-file", "/does/not/exist.key"), "/does/not/exist.key"),
    ],
)
def test_what_cannot_be_trusted_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str
) -> None:
    assert _run(monkeypatch, *arguments) == 2
    said = capsys.readouterr().err
    assert named in said
    assert "Traceback" not in said


def test_a_short_key_in_the_environment_is_refused_by_name_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(CLUSTER_KEY_VARIABLE, "hush-hush")
    assert _run(monkeypatch) == 2
    said = capsys.readouterr().err
    assert f"{CLUSTER_KEY_VARIABLE} holds 9 bytes" in said
    assert "hush" not in said


def test_the_options_reach_the_instance(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, served: list[InstanceSettings]
) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o600)
    allow = ("--allow", "10.0.0.0/8", "--allow", "192.168.0.1")
    assert _run(monkeypatch, "--host", "10.0.0.1", "--cluster-key-file", str(path), *allow) == 0
    (settings,) = served
    assert settings.trust.key is not None
    assert keys_of(settings.trust.key) == (KEY.encode(),)
    assert str(settings.trust.allowed) == "10.0.0.0/8, 192.168.0.1/32"
    assert KEY not in repr(settings)


def test_the_environment_reaches_the_instance_and_without_anything_there_is_no_key(
    monkeypatch: pytest.MonkeyPatch, served: list[InstanceSettings]
) -> None:
    assert _run(monkeypatch) == 0
    monkeypatch.setenv(CLUSTER_KEY_VARIABLE, KEY)
    assert _run(monkeypatch, "--host", "10.0.0.1") == 0
    assert [settings.trust.key for settings in served] == [None, KEY.encode()]
