"""Faults between hosts, at every stage of a hand-off: a process dies, a host loses power, a link is cut both ways or one way.

As `test_faults_processes.py`, with each instance on a host of its own: another network namespace and host name, real packets
between them. No process can look at another one here, so that time and messages are all that a survivor has. `docs/promises.md`
names these tests; `-s` prints the times until memory was back.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from faults import LIMITS, Scene, Times, scene, stages_of
from hosts import Host, Switch, can_have_two_hosts, hosts

from held_instances import SetFaults
from kvbaton.core.handoff import Mode

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not can_have_two_hosts(), reason="needs root, ip, tc and /dev/net/tun"),
]

DELAY_S = 0.001
LONGEST_S = LIMITS.defer_timeout + 0.5
"""Longer than every deadline."""

modes = pytest.mark.parametrize("mode", [Mode.PUSH, Mode.PULL])
victims = pytest.mark.parametrize("victim", ["source", "target"])


@pytest.fixture(scope="module")
def times() -> Iterator[Times]:
    times = Times()
    yield times
    for line in times.lines():
        print(line)


@contextmanager
def apart(mode: Mode) -> Iterator[tuple[Scene, Switch, dict[str, Host]]]:
    """Source, target and spare on three hosts; hand-offs stand at every stage."""
    with hosts(3) as (switch, (_, *places)), scene(mode, "tcp", places) as here:
        switch.delay_s = DELAY_S
        here.hold_at_every_stage()
        yield here, switch, dict(zip(("source", "target", "spare"), places, strict=True))


def _ended(here: Scene, side: str, struck_at: float, what: str, times: Times) -> dict[str, set[str]]:
    """Wait until one side has ended everything and has its memory back; how, by stage."""
    process = here.process(side)
    found = {stage.name: here.outcomes(stage.name, process) for stage in stages_of(here.mode)}
    here.wait_idle(process)
    ends = [end for stage in found for end in here.relay.ends[stage, side]]
    times.add(f"{what}: at the {side}", *(end.at - struck_at for end in ends if end.at > struck_at))
    return found


def _serve_fresh(here: Scene, name: str, *sides: str) -> None:
    """Every block that came back is used again, and every byte that lands in it is the right one."""
    for side in sides:
        here.begin_fresh(f"{name} {side}", side, here.spare)
        here.finish_fresh(f"{name} {side}")
    for process in (*map(here.process, sides), here.spare):
        here.wait_idle(process)
        gauges = process.gauges()
        assert (gauges.foreign_bytes, gauges.errors_total) == (0, 0), gauges


@pytest.mark.sampled(2)
@modes
@victims
@pytest.mark.parametrize("has_power", [True, False], ids=["a process is killed", "a host loses power"])
def test_one_side_is_lost_on_another_host(has_power: bool, victim: str, mode: Mode, times: Times) -> None:
    """A process that dies leaves a host that closes its connections; a host without power leaves nothing."""
    survivor = "target" if victim == "source" else "source"
    with apart(mode) as (here, switch, at):
        struck_at = time.monotonic()
        if not has_power:
            for other in ("source", "target", "spare"):
                switch.separate(at[victim], at[other])
        here.process(victim).send_signal(signal.SIGKILL)
        here.cancel_queued(survivor)
        what = f"{victim} killed" if has_power else f"host of the {victim} without power"
        found = _ended(here, survivor, struck_at, what, times)
        assert here.process(victim).wait() == -signal.SIGKILL
        last = found.pop("before release")
        assert last <= ({"delivered"} if victim == "source" else {"failed", "expired"}), last
        queued = found.pop("queued", {"cancelled"})
        assert queued <= {"cancelled", "expired", "failed"}
        # The control for "another host": on one host a dead process is noticed, and nothing expires.
        assert {"expired"} <= set().union(*found.values()) <= {"expired", "failed"}, found
        assert has_power or set().union(*found.values()) == {"expired"}, found
        _serve_fresh(here, "fresh", survivor)


@pytest.mark.sampled(1)
@modes
def test_a_link_that_is_cut_both_ways(mode: Mode, times: Times) -> None:
    with apart(mode) as (here, switch, at):
        struck_at = time.monotonic()
        switch.separate(at["source"], at["target"])
        for side in ("source", "target"):
            here.cancel_queued(side)
        source, target = (_ended(here, side, struck_at, "link cut both ways", times) for side in ("source", "target"))
        assert target.pop("before release") == {"delivered"}
        for found in (source, target):
            assert found.pop("queued", {"cancelled"}) <= {"cancelled", "expired"}
            assert set().union(*found.values()) == {"expired"}, found
        assert switch.stopped_total > 0
        here.relay.wait(lambda: time.monotonic() > struck_at + LONGEST_S, "no deadline is left", 2 * LONGEST_S)
        switch.join()
        _serve_again(here)


@pytest.mark.sampled(1)
@modes
@pytest.mark.parametrize("receiver", ["target", "source"])
def test_a_link_that_is_cut_one_way(receiver: str, mode: Mode, times: Times) -> None:
    """Acknowledgements of TCP are lost too, so that the other way carries what is under way, and soon nothing more."""
    sender = "target" if receiver == "source" else "source"
    with apart(mode) as (here, switch, at):
        struck_at = time.monotonic()
        switch.stop(at[sender], at[receiver])
        for side in ("source", "target"):
            here.cancel_queued(side)
        what = f"link cut towards the {receiver}"
        source, target = (_ended(here, side, struck_at, what, times) for side in ("source", "target"))
        assert target.pop("before release") == {"delivered"}
        for found in (source, target):
            found.pop("queued", None)
        silent = target if receiver == "target" else source
        assert "expired" in set().union(*silent.values()), silent
        for found in (source, target):
            assert set().union(*found.values()) <= {"expired", "failed", "cancelled"}, found
        here.relay.wait(lambda: time.monotonic() > struck_at + LONGEST_S, "no deadline is left", 2 * LONGEST_S)
        switch.join()
        _serve_again(here)


def _serve_again(here: Scene) -> None:
    """The same two instances, when the link is back; then each with a third one."""
    here.begin_load("again", 32)
    ends = here.relay.ends["again", "target"]
    here.relay.wait(lambda: len(ends) == 32, "hand-offs pass again", 30)
    assert {end.outcome for end in ends} == {"delivered"}, ends
    _serve_fresh(here, "fresh", "source", "target")


@modes
def test_a_byte_that_does_not_cross_would_be_noticed(mode: Mode) -> None:
    """The control for all tests of this file."""
    with hosts(3) as (switch, (_, *places)), scene(mode, "tcp", places) as here:
        switch.delay_s = DELAY_S
        here.target.order(SetFaults(drop_writes=True))
        here.begin_load("wrong", 8)
        here.relay.wait(lambda: len(here.relay.ends["wrong", "source"]) == 8, "it runs", 20)
        here.wait_idle(here.target)
        assert here.target.gauges().foreign_bytes > 0
