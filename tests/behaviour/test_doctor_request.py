"""`kvbaton doctor --request` against a real deployment: 0 where the cache was handed over, 1 where it was computed again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from system import Stand

from kvbaton.cli.main import main
from kvbaton.launch.ports import PortPicker


class Deployment:
    """A router, a prefill and a decode instance."""

    def __init__(self, stand: Stand) -> None:
        stand.start("prefill", "prefill")
        self.decode = f"http://127.0.0.1:{stand.start('decode', 'decode')}"
        stand.wait_for("live", 2)
        self.router = f"http://127.0.0.1:{stand.router_port}"


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Stand(router_arguments=("--local-prefill-chars", "16")) as stand:
        yield Deployment(stand)


class Doctor:
    """Runs the command: its exit code, what it printed as JSON, and its errors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        self._monkeypatch.setattr(sys, "argv", ["kvbaton", "doctor", *arguments, "--json"])
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        shown = self._capsys.readouterr()
        return caught.value.code, json.loads(shown.out) if shown.out else {}, shown.err


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    return Doctor(monkeypatch, capsys)


def test_a_router_with_a_pair_hands_over(deployment: Deployment, doctor: Doctor) -> None:
    code, found, errors = doctor("--request", deployment.router, "--metrics", deployment.decode)
    assert (code, found["ok"], found["verdict"]) == (0, True, "handed over"), (found, errors)
    places = " ".join(row["place"] for row in found["evidence"])
    for place in ("the record in the answer", "the timeline of tx-", "the metrics at"):
        assert place in places
    assert {row["verdict"] for row in found["evidence"]} == {"handed over"}


def test_the_control_a_decode_instance_that_is_asked_directly_computes_the_prompt(
    deployment: Deployment, doctor: Doctor
) -> None:
    code, found, errors = doctor("--request", deployment.decode, "--metrics", deployment.decode)
    assert (code, found["ok"], found["verdict"]) == (1, False, "not handed over"), (found, errors)
    assert "no series of delivered hand-offs grew" in json.dumps(found["evidence"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--request", "ftp://x"), "--request is 'ftp://x'"),
        (("--request", "127.0.0.1:{free}"), "is the deployment running?"),
        (("--metrics", "http://127.0.0.1:1"), "--metrics and --model belong to --request"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(doctor: Doctor, arguments: tuple[str, ...], expected: str) -> None:
    free = str(PortPicker().pick())
    code, found, errors = doctor(*(each.replace("{free}", free) for each in arguments))
    assert (code, found) == (2, {})
    assert expected in " ".join(errors.split())
    assert "Traceback" not in errors
