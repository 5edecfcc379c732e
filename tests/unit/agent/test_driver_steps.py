"""What peers and engines learn of each other from the agents, and when: hanging and idle engines, and turns with much to do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from driver_rig import Side, ask, key_of

from kvbaton.agent import driver as driver_module
from kvbaton.agent.engine_port import SourceEnded, TargetEnded
from kvbaton.config import Limits
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import PROTOCOL
from kvbaton.core.handoff import Incarnation, Mode, Outcome
from kvbaton.core.messages import Envelope, Heartbeat
from kvbaton.transport.memory import MemoryHub
from watching import wait_until

LIMITS = Limits(transfer_timeout=1.5, defer_timeout=3.0, stop_timeout=0.5, retry=0.1)
BEATS = round(3 * LIMITS.transfer_timeout / LIMITS.beat_s)
"""As many heartbeats as take much longer than a target waits."""


def _wait_for_prefill(source: Side, target: Side, name: str) -> None:
    """The target has granted blocks for a prefill that the source's engine has taken up, and not computed."""
    source.driver.expect_target(key_of(name), "prompt")
    ask(target, source.driver.address, name, Mode.PUSH)


def test_agents_that_beat_for_an_engine_that_hangs_keep_no_target() -> None:
    hub = MemoryHub()
    with Side(hub, limits=LIMITS) as source, Side(hub, limits=LIMITS) as target:
        source.engine_hangs = True
        _wait_for_prefill(source, target, "hung")
        ended = target.wait_for(TargetEnded, key_of("hung"))
        assert (ended.outcome, ended.reason) == (Outcome.EXPIRED, "no progress for 1.5 s while granted")
        source.engine_hangs = False
        assert source.wait_for(SourceEnded, key_of("hung")).outcome is Outcome.EXPIRED
        assert source.wakes > 1, "it was woken again and again"


def test_an_engine_that_has_nothing_to_do_is_woken_and_counts_as_alive() -> None:
    hub = MemoryHub()
    with Side(hub, limits=LIMITS) as source, Side(hub, limits=LIMITS) as target:
        _wait_for_prefill(source, target, "idle")
        wait_until(lambda: source.wakes >= BEATS, f"{BEATS} heartbeats, and an engine that was woken for each")
        assert target.driver.stats().handoffs_live == {"source": 0, "target": 1}
        assert target.events == []


def _frame(count: int) -> Envelope:
    beat = Heartbeat(from_source=True, live=())
    return Envelope(PROTOCOL, Incarnation("peer"), "", beat, (beat,) * (count - 1))


def _turn_over(side: Side, frames: list[Envelope], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the driver does, in order, in one turn in which these frames have arrived."""
    done: list[str] = []

    def receive() -> Iterator[tuple[Envelope, ControlAddress | None]]:
        for frame in frames:
            yield frame, None

    monkeypatch.setattr(side.sockets, "receive", receive)
    monkeypatch.setattr(side.sockets, "flush", lambda: done.append("flush"))
    monkeypatch.setattr(side.driver._coordinator, "on_frame", lambda *_: done.append("message"))
    side.driver._turn()
    return done


def test_what_follows_from_the_first_messages_leaves_before_the_last_are_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    side, most = Side(MemoryHub()), driver_module._MESSAGES_AT_ONCE
    try:
        done = _turn_over(side, [_frame(most), _frame(most), _frame(1)], monkeypatch)
    finally:
        side.driver.close()
    assert done == [*["message"] * most, "flush"] * 2 + ["message", "flush"]


def test_a_turn_with_little_to_do_sends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(MemoryHub())
    try:
        done = _turn_over(side, [_frame(2), _frame(1), _frame(3)], monkeypatch)
    finally:
        side.driver.close()
    assert done == ["message"] * 6 + ["flush"]
