"""Kills, pauses and orderly ends of real processes, at every stage of a hand-off, on either side, in push and in pull.

In each test hand-offs stand at every stage at the same time when the fault strikes. What is checked afterwards: every one ends
on the survivor, as promised; all its blocks come back; they are used again at once, and every byte that lands in them is the
right one; and a fresh peer is served. `docs/promises.md` names these tests; `-s` prints the times until memory was back.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
from faults import LIMITS, Fault, Scene, Times, scene, stages_of

from held_instances import SetFaults
from kvbaton.core.handoff import Mode

pytestmark = pytest.mark.e2e

KILLED = Fault("killed", signal.SIGKILL)
PAUSED = Fault("paused", signal.SIGSTOP, resumes=True)
ASKED_TO_END = Fault("asked to end", signal.SIGTERM)

LONGEST_S = LIMITS.defer_timeout + 0.5
"""Longer than every deadline."""

MODES_AND_TRANSPORTS = [(Mode.PUSH, "local"), (Mode.PULL, "local"), (Mode.PUSH, "tcp")]
"""Both modes on this host, and one of them through sockets."""

OUTCOMES: dict[tuple[str, str], set[str]] = {
    ("killed", "source"): {"failed"},
    ("killed", "target"): {"failed"},
    ("paused", "source"): {"expired"},
    ("paused", "target"): {"expired"},
    ("asked to end", "source"): {"failed"},
    ("asked to end", "target"): {"cancelled"},
}
"""How hand-offs end on the survivor, by the fault and its victim; what differs by stage is in `_expected`."""


@pytest.fixture(scope="module")
def times() -> Iterator[Times]:
    times = Times()
    yield times
    for line in times.lines():
        print(line)


def _expected(fault: Fault, victim: str, stage: str) -> set[str]:
    if stage == "before release":
        return {"delivered"} if victim == "source" else {"failed", "expired"}
    if stage == "offered, grant lost":
        return OUTCOMES[fault.name, victim] | {"expired"}
    if stage == "queued":
        return OUTCOMES[fault.name, victim] | {"cancelled"}
    return OUTCOMES[fault.name, victim]


def _strike(here: Scene, fault: Fault, victim: str, times: Times) -> None:
    """Let the fault strike, and wait until the survivor has ended everything as promised and has its memory back."""
    survivor = here.process("target" if victim == "source" else "source")
    struck_at = time.monotonic()
    here.process(victim).send_signal(fault.number)
    here.cancel_queued(survivor.name)
    for stage in stages_of(here.mode):
        found = here.outcomes(stage.name, survivor)
        assert found <= _expected(fault, victim, stage.name), (stage.name, here.relay.ends[stage.name, survivor.name])
    here.wait_idle(survivor)
    ends = [end for stage in stages_of(here.mode) for end in here.relay.ends[stage.name, survivor.name]]
    times.add(f"{victim} {fault.name}: at the {survivor.name}", *(end.at - struck_at for end in ends if end.at > struck_at))


def _nothing_foreign(here: Scene, *processes: str) -> None:
    for process in here.processes:
        if process.name in processes:
            gauges = process.gauges()
            assert gauges.foreign_bytes == 0, gauges
            assert gauges.errors_total == 0, gauges


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("mode", "transport"), MODES_AND_TRANSPORTS)
@pytest.mark.parametrize("victim", ["source", "target"])
@pytest.mark.parametrize("fault", [KILLED, ASKED_TO_END], ids=lambda fault: fault.name)
def test_one_side_ends(fault: Fault, victim: str, mode: Mode, transport: str, times: Times) -> None:
    survivor = "target" if victim == "source" else "source"
    with scene(mode, transport) as here:
        here.hold_at_every_stage()
        _strike(here, fault, victim, times)
        here.begin_fresh("fresh", survivor, here.spare)
        here.finish_fresh("fresh")
        here.wait_idle(here.process(survivor))
        here.wait_idle(here.spare)
        _nothing_foreign(here, survivor, "spare")
        code = here.process(victim).wait()
        assert code == (0 if fault is ASKED_TO_END else -fault.number)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mode", "transport"), MODES_AND_TRANSPORTS)
@pytest.mark.parametrize("victim", ["source", "target"])
def test_one_side_is_paused_for_longer_than_every_deadline(victim: str, mode: Mode, transport: str, times: Times) -> None:
    survivor = "target" if victim == "source" else "source"
    with scene(mode, transport) as here:
        here.hold_at_every_stage()
        struck_at = time.monotonic()
        _strike(here, PAUSED, victim, times)
        here.relay.wait(lambda: time.monotonic() > struck_at + LONGEST_S, "no deadline is left", 2 * LONGEST_S)
        here.begin_fresh("fresh", survivor, here.spare)
        here.process(victim).send_signal(signal.SIGCONT)
        resumed_at = time.monotonic()
        here.cancel_queued(victim)
        times.add(f"{victim} paused: at the {victim}, once it goes on", here.wait_idle(here.process(victim)) - resumed_at)
        here.finish_fresh("fresh")
        here.begin_fresh("again", survivor, here.process(victim))
        here.finish_fresh("again")
        for process in here.processes:
            here.wait_idle(process)
        _nothing_foreign(here, "source", "target", "spare")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", [KILLED, PAUSED], ids=lambda fault: fault.name)
@pytest.mark.parametrize("mode", [Mode.PUSH, Mode.PULL])
@pytest.mark.parametrize("victim", ["source", "target"])
def test_one_side_falls_under_load(victim: str, mode: Mode, fault: Fault, times: Times) -> None:
    """Copies are in flight here, and blocks are freed and used again all the time."""
    survivor = "target" if victim == "source" else "source"
    with scene(mode, "local") as here:
        here.begin_load("load", 5000)
        ends = here.relay.ends["load", "target"]
        here.relay.wait(lambda: len(ends) >= 60, "the load runs", 20)
        here.process(victim).send_signal(fault.number)
        struck_at = time.monotonic()
        here.halt("load")
        what = f"{victim} {fault.name} under load: the last one at the {survivor}"
        times.add(what, here.wait_idle(here.process(survivor)) - struck_at)
        here.begin_fresh("fresh", survivor, here.spare)
        if fault.resumes:
            here.process(victim).send_signal(signal.SIGCONT)
            here.wait_idle(here.process(victim))
            _nothing_foreign(here, victim)
        here.finish_fresh("fresh")
        here.wait_idle(here.process(survivor))
        _nothing_foreign(here, survivor, "spare")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("faults", [SetFaults(corrupt=True), SetFaults(drop_writes=True)], ids=["corrupt", "drop_writes"])
@pytest.mark.parametrize("mode", [Mode.PUSH, Mode.PULL])
def test_a_foreign_byte_would_be_noticed(mode: Mode, faults: SetFaults) -> None:
    """The control for all tests of this file: copies that go wrong in silence must be seen by the bytes."""
    with scene(mode, "local") as here:
        here.begin_load("load", 8)
        here.relay.wait(lambda: len(here.relay.ends["load", "source"]) == 8, "it runs", 20)
        here.wait_idle(here.target)
        _nothing_foreign(here, "target")
        here.target.order(faults)
        here.begin_load("wrong", 8)
        here.relay.wait(lambda: len(here.relay.ends["wrong", "source"]) == 8, "it runs", 20)
        here.wait_idle(here.target)
        assert here.target.gauges().foreign_bytes > 0
