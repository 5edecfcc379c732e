"""A prefill process that is killed, terminated or stopped in mid-transfer: decode fails the request and serves on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sglang_instances import Instance, Request, instances, wait_for
from sglang_prefill_process import LIMITS, PROMPT

from kvbaton.engines.sglang.halves import Poll
from kvbaton.launch.ports import PortPicker

_SCRIPT = Path(__file__).parent / "sglang_prefill_process.py"


@contextmanager
def prefill(port: int, room: int, pages: int) -> Iterator[subprocess.Popen[str]]:
    """The process, once its instance is up."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((*sys.path, str(_SCRIPT.parent)))}
    command = [sys.executable, str(_SCRIPT), str(port), str(room), str(pages)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert _line(process) == "ready"
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _target(decode: Instance, port: int, room: int) -> Request:
    target = Request(decode, room, PROMPT, f"127.0.0.1:{port}")
    target.each("ready")
    target.each("allocated", [1, 2, 3, 4], 2, 0)
    return target


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=lambda number: number.name)
def test_decode_fails_the_request_and_is_served_by_the_prefill_that_comes_back(number: signal.Signals) -> None:
    ports = PortPicker()
    port, decode = ports.pick(), Instance("decode", ports, limits=LIMITS)
    with instances(decode):
        with prefill(port, 1, pages=2) as process:
            target = _target(decode, port, 1)
            assert _line(process) == "announced"
            process.send_signal(number)
            assert wait_for(target, Poll.SUCCESS, Poll.FAILED) is Poll.FAILED
            assert not decode.ranks[0].halves.live
        with prefill(port, 2, pages=4) as process:
            again = _target(decode, port, 2)
            assert wait_for(again, Poll.SUCCESS, Poll.FAILED) is Poll.SUCCESS, again.reason
            assert [_line(process), _line(process)] == ["announced", "SUCCESS"]


def test_a_prefill_that_goes_on_after_its_target_has_failed_fails_too() -> None:
    ports = PortPicker()
    port, decode = ports.pick(), Instance("decode", ports, limits=LIMITS)
    with instances(decode), prefill(port, 1, pages=2) as process:
        target = _target(decode, port, 1)
        assert _line(process) == "announced"
        process.send_signal(signal.SIGSTOP)
        assert wait_for(target, Poll.SUCCESS, Poll.FAILED) is Poll.FAILED
        process.send_signal(signal.SIGCONT)
        assert _line(process) == "FAILED"
