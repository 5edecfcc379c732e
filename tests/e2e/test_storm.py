"""A thousand requests with clients that go away, and five hundred at once: nothing is left, and every answer is right."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from functools import partial

import pytest
from storm import Footprint, Storm, gauges_not_zero
from system import Stand

from kvbaton.config import HandoffSettings
from kvbaton.core.handoff import Mode
from kvbaton.launch.local import kvbaton_command
from watching import wait_until

pytestmark = pytest.mark.e2e

REQUESTS = 1000
CONCURRENCY = 32


@pytest.fixture
def stand() -> Iterator[Stand]:
    with Stand() as stand:
        yield stand


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", Mode)
def test_a_thousand_requests_with_aborts_leave_nothing_behind(stand: Stand, mode: Mode) -> None:
    limits = ("--transfer-timeout", "10", "--defer-timeout", "15")
    handoff = HandoffSettings(mode=mode)
    ports = {role: stand.start(role, role, "tiny", *limits, handoff=handoff) for role in ("prefill", "decode")}
    stand.wait_for("live", 2)
    pids = {name: stand.fleets[name].pid(name) for name in ("router", "prefill", "decode")}
    assert Storm(stand.router_port, 1, CONCURRENCY).run(REQUESTS // 5)["200"] > 0
    _wait_until_idle(ports)
    before = {name: Footprint.of(pid) for name, pid in pids.items()}
    fates = Storm(stand.router_port, 2, CONCURRENCY).run(REQUESTS)
    assert fates["aborted"] > REQUESTS // 40, fates
    assert fates["200"] + fates["aborted"] == REQUESTS, fates
    _wait_until_idle(ports)
    for name, pid in pids.items():
        after = Footprint.of(pid)
        assert after.descriptors - before[name].descriptors <= CONCURRENCY, (name, before[name], after)
        assert after.threads <= before[name].threads + 1, (name, before[name], after)
        assert after.segments <= before[name].segments, (name, before[name], after)
    assert stand.client.complete().status == 200
    assert not _tracebacks(stand.lines)


def _wait_until_idle(ports: dict[str, int]) -> None:
    for role, port in ports.items():
        wait_until(partial(_is_idle, port), f"every gauge of {role} is zero; not so: {gauges_not_zero(port)}", 40)


def _is_idle(port: int) -> bool:
    return not gauges_not_zero(port)


def test_a_live_request_shows_in_the_gauges(stand: Stand) -> None:
    """The control: gauges that are zero because nothing is counted prove nothing."""
    ports = {role: stand.start(role, role, "tiny") for role in ("prefill", "decode")}
    stand.wait_for("live", 2)
    body = {"prompt": "Hello there", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
    with stand.client.stream("/v1/completions", body) as answer:
        answer.readline()
        wait_until(lambda: bool(gauges_not_zero(ports["decode"])), "the request is seen")
    _wait_until_idle(ports)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", Mode)
def test_five_hundred_requests_at_once_are_all_answered_like_a_single_instance(mode: Mode) -> None:
    arguments = ["--model", "tiny", "--requests", "512", "--concurrency", "512", "--longest-prompt", "64", "--max-tokens", "6"]
    command = kvbaton_command("verify", "--mode", mode.value, *arguments, "--json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[:1000]
    report = json.loads(done.stdout)
    assert report["handed_off"] == 512
    assert report["equal"] + report["near_ties"] == 512


def _tracebacks(lines: list[str]) -> list[str]:
    """What the instances logged from the first traceback on, if there is one."""
    printed = [line for line in lines if not line.startswith("router |")]
    first = next((number for number, line in enumerate(printed) if "Traceback" in line), len(printed))
    return printed[first : first + 40]
