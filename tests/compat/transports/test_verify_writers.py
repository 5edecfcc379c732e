"""`kvbaton verify` over every transport that writes: every answer the same in both modes, and controls that go red."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from kvbaton.transport.table import TRANSPORTS

pytestmark = [pytest.mark.e2e, pytest.mark.sampled(1)]
_WRITERS = sorted(name for name, entry in TRANSPORTS.items() if entry.can_write and not entry.stand_in)


def _needs(transport: str) -> None:
    if why := TRANSPORTS[transport].why_not_here():
        pytest.skip(f"{why}; see make test-compat")


def _writes(transport: str) -> list[str]:
    """The options with which the source writes."""
    return [f"--{setting.replace('_', '-')}" for setting in TRANSPORTS[transport].writing(is_on=True)]


def _verify(transport: str, mode: str, *more: str) -> tuple[int, dict[str, Any]]:
    arguments = [
        "--transport",
        transport,
        "--mode",
        mode,
        "--model",
        "tiny",
        "--requests",
        "6",
        "--longest-prompt",
        "400",
        "--json",
    ]
    command = [sys.executable, "-m", "kvbaton.cli.main", "verify", *arguments, *more]
    done = subprocess.run(command, capture_output=True, timeout=250, check=False)
    lines = done.stdout.splitlines()
    assert lines, done.stderr.decode()[-2000:]
    return done.returncode, json.loads(lines[-1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("transport", _WRITERS)
def test_every_answer_is_the_same(transport: str, mode: str) -> None:
    _needs(transport)
    code, found = _verify(transport, mode)
    assert (code, found["failed"], found["different"]) == (0, 0, 0)
    assert found["handed_off"] == found["requests"] == 6
    assert found["bytes_moved"] == found["bytes_planned"] > 0
    assert found["source_writes"] == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", _WRITERS)
def test_every_answer_is_the_same_when_the_source_writes(transport: str) -> None:
    _needs(transport)
    code, found = _verify(transport, "push", *_writes(transport))
    assert (code, found["failed"], found["different"]) == (0, 0, 0)
    assert found["handed_off"] == found["source_writes"] == found["requests"] == 6


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", _WRITERS)
def test_control_without_the_bytes_that_the_source_writes_it_goes_red(transport: str) -> None:
    _needs(transport)
    code, found = _verify(transport, "push", *_writes(transport), "--drop-writes")
    assert code == 1
    assert found["different"] > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", _WRITERS)
def test_control_without_the_bytes_it_goes_red(transport: str) -> None:
    _needs(transport)
    code, found = _verify(transport, "pull", "--drop-writes")
    assert code == 1
    assert found["different"] > 0
