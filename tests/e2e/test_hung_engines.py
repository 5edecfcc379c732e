"""An engine that hangs while its agents, its HTTP server and its heartbeats go on: what that costs its peers and its clients.

Before agents reported the progress of their engines, a client waited for ever, and a hung decode engine kept the blocks of all
its sources. `docs/promises.md` names these tests.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from system import Reply, Stand, blocks

from kvbaton.config import HandoffSettings
from kvbaton.core.handoff import Mode
from watching import wait_until

pytestmark = pytest.mark.e2e

PROGRAM = Path(__file__).with_name("hanging_engine.py")
LIMITS = ("--transfer-timeout", "3", "--defer-timeout", "5", "--retry", "0.2")
MODES = [Mode.PUSH, Mode.PULL]
REQUESTS = 6
ANSWER_S = 45.0
"""How long a client waits at most; without a limit of the hand-off it would be for ever."""


@contextmanager
def hanging(role: str, mode: Mode) -> Iterator[tuple[Stand, int]]:
    """Two instances of `role`, one of which hangs, and one of the other, whose port it is; all have served before."""
    other = "decode" if role == "prefill" else "prefill"
    settings = HandoffSettings(mode=mode)
    with Stand() as stand:
        stand.start("hung", role, "tiny", *LIMITS, handoff=settings, program=PROGRAM)
        stand.start("healthy", role, "tiny", *LIMITS, handoff=settings)
        port = stand.start("peer", other, "tiny", *LIMITS, handoff=settings)
        stand.wait_for("live", 3)
        for number in range(4):
            assert stand.client.complete(f"number {number}").status == 200
        stand.signal("hung", signal.SIGUSR1)
        yield stand, port


def _ask(stand: Stand, pool: ThreadPoolExecutor) -> list[Future[Reply]]:
    return [pool.submit(stand.client.complete, f"while it hangs {number} " * 10) for number in range(REQUESTS)]


def _is_idle(port: int) -> bool:
    states = blocks(port)
    return states["held"] == states["in_use"] == 0


def _is_aside(stand: Stand) -> bool:
    return len(stand.instances("live")) == 2


def _goes_on(stand: Stand) -> None:
    stand.signal("hung", signal.SIGUSR2)
    wait_until(lambda: len(stand.instances("live")) == 3, "it has registered again", 30)
    for number in range(4):
        assert stand.client.complete(f"afterwards {number}").status == 200


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", MODES)
def test_a_hung_prefill_engine_is_an_error_and_its_decode_blocks_are_back(mode: Mode) -> None:
    with hanging("prefill", mode) as (stand, decode), ThreadPoolExecutor(REQUESTS) as pool:
        asked = _ask(stand, pool)
        if mode is Mode.PUSH:
            # In pull the decode instance has no part in it before the prefill is complete: only the router can notice.
            replies = [each.result(ANSWER_S) for each in asked]
            assert {reply.status for reply in replies} <= {200, 500, 502, 503, 504}
            failed = [reply.error for reply in replies if reply.status != 200]
            assert all("no progress for 3 s" in error for error in failed), failed
        wait_until(lambda: _is_idle(decode), "every decode block is back", ANSWER_S)
        wait_until(lambda: _is_aside(stand), "the router has put it aside", ANSWER_S)
        assert [each.result(ANSWER_S).status for each in _ask(stand, pool)] == [200] * REQUESTS
        _goes_on(stand)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", MODES)
def test_a_hung_decode_engine_keeps_no_source_and_no_other_request(mode: Mode) -> None:
    with hanging("decode", mode) as (stand, prefill), ThreadPoolExecutor(3 * REQUESTS) as pool:
        asked = _ask(stand, pool)
        wait_until(lambda: sum(each.done() for each in asked) >= REQUESTS // 2, "the healthy one answers its share", ANSWER_S)
        wait_until(lambda: _is_idle(prefill), "every prefill block is back", ANSWER_S)
        wait_until(lambda: _is_aside(stand), "the router has put it aside", ANSWER_S)
        assert [each.result(ANSWER_S).status for each in _ask(stand, pool)] == [200] * REQUESTS
        _goes_on(stand)
        for each in asked:
            each.result(ANSWER_S)
