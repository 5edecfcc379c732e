"""What peers learn of an engine from its agents: one that hangs is given up, one that has nothing to do is not."""

from __future__ import annotations

from driver_rig import Side, ask, key_of

from kvbaton.agent.engine_port import SourceEnded, TargetEnded
from kvbaton.config import Limits
from kvbaton.core.handoff import Mode, Outcome
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
