"""Two bare instances in processes of their own: hand-offs run, stand still on command, and go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from held_instances import CancelTask, Free, HeldProcess, HeldSettings, Hold, Lift, SetFaults, SetHold
from kvbaton.bench.bare.instance import BareSettings, Ended, Task
from kvbaton.bench.bare.process import BareProcess, Relay
from kvbaton.core.handoff import Mode
from kvbaton.errors import LocalError

TOKENS = 60
PATIENCE_S = 30.0

Pair = tuple[HeldProcess, HeldProcess]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    settings = HeldSettings(blocks=64, most_tokens=TOKENS)
    with HeldProcess("source", settings) as source, HeldProcess("target", settings) as target:
        yield source, target


@pytest.fixture(scope="module")
def relay(pair: Pair) -> Relay:
    return Relay(pair)


def run(relay: Relay, task: Task) -> None:
    relay.begin(task, *relay.processes)
    finish(relay, task)


def finish(relay: Relay, task: Task) -> None:
    sides = [relay.ends[task.name, process.name] for process in relay.processes]
    relay.wait(lambda: all(len(side) == task.count for side in sides), f"{task.name} is over", PATIENCE_S)


def outcomes(relay: Relay, name: str) -> set[str]:
    return {end.outcome for process in relay.processes for end in relay.ends[name, process.name]}


@pytest.mark.parametrize("mode", Mode)
def test_hand_offs_land_whole_and_all_blocks_come_back(pair: Pair, relay: Relay, mode: Mode) -> None:
    _, target = pair
    before = target.gauges().landed_total
    run(relay, Task(f"plain {mode}", mode, 40, 8, TOKENS, 32))
    assert outcomes(relay, f"plain {mode}") == {"delivered"}
    assert target.gauges().landed_total == before + 40
    for process in pair:
        gauges = process.gauges()
        assert (gauges.blocks_in_use, gauges.live, gauges.foreign_bytes, gauges.errors_total) == (0, 0, 0, 0)


class CountingRelay(Relay):
    """Counts the reports of ends that it takes."""

    reports = 0

    def _take_reports(self, process: BareProcess) -> None:
        self.reports += sum(isinstance(report, Ended) for report in process.reports)
        super()._take_reports(process)


@pytest.mark.parametrize("wait_s", [0.0, 3600.0])
def test_ends_are_reported_as_they_come_or_together_and_never_kept_back_for_good(wait_s: float) -> None:
    settings = BareSettings(64, TOKENS, report_s=wait_s)
    with BareProcess("source", settings) as source, BareProcess("target", settings) as target:
        relay = CountingRelay([source, target])
        run(relay, Task("together", Mode.PUSH, 20, 1, TOKENS, 32))
        assert outcomes(relay, "together") == {"delivered"}
    assert (relay.reports == 2) is (wait_s > 0)


HOLDS = {
    "not asked for": (Hold(), Hold(pulls=False)),
    "in mid-stream": (Hold(spans=4), Hold()),
    "grant swallowed": (Hold(), Hold(muted=("grant",))),
    "confirmation swallowed": (Hold(muted=("confirmed",)), Hold()),
}


@pytest.mark.parametrize("name", HOLDS)
def test_hand_offs_stand_still_until_the_hold_is_lifted(pair: Pair, relay: Relay, name: str) -> None:
    source_hold, target_hold = HOLDS[name]
    task = Task(name, Mode.PUSH, 3, 3, TOKENS, 32)
    source, target = pair
    source.order(SetHold(name, source_hold))
    target.order(SetHold(name, target_hold))
    relay.begin(task, source, target)
    relay.wait(lambda: max(process.gauges().held[name] for process in (source, target)) == 3, "they stand", PATIENCE_S)
    assert not relay.ends[name, "target"]
    for process in relay.processes:
        process.order(Lift(name))
    finish(relay, task)
    assert outcomes(relay, name) == {"delivered"}


def test_what_is_kept_is_looked_at_again(pair: Pair, relay: Relay) -> None:
    target = pair[1]
    target.order(SetHold("kept", Hold(keeps=True)))
    run(relay, Task("kept", Mode.PULL, 4, 4, TOKENS, 32))
    assert target.gauges().blocks_in_use == 16
    target.order(Free("kept"))
    assert target.gauges().blocks_in_use == 0
    assert target.gauges().foreign_bytes == 0


def test_a_cancelled_task_gives_everything_back(pair: Pair, relay: Relay) -> None:
    task = Task("cancelled", Mode.PUSH, 3, 3, TOKENS, 32)
    source, target = pair
    source.order(SetHold("cancelled", Hold(spans=4)))
    relay.begin(task, source, target)
    relay.wait(lambda: source.gauges().held["cancelled"] == 3, "they stand", PATIENCE_S)
    target.order(CancelTask("cancelled"))
    finish(relay, task)
    assert outcomes(relay, "cancelled") == {"cancelled"}


def test_a_byte_that_goes_wrong_on_its_way_is_counted(pair: Pair, relay: Relay) -> None:
    target = pair[1]
    target.order(SetFaults(corrupt=True))
    run(relay, Task("wrong", Mode.PULL, 2, 2, TOKENS, 32))
    target.order(SetFaults())
    assert target.gauges().foreign_bytes > 0


def test_an_instance_ends_with_its_input_and_on_request() -> None:
    settings = BareSettings(blocks=8, most_tokens=TOKENS)
    process = BareProcess("alone", settings)
    assert process.here.pid == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    with pytest.raises(LocalError, match="does not answer"):
        process.gauges()
    process.end()
    with BareProcess("other", settings) as other:
        assert other.here.pid == other.pid
        assert other.cpu_s() > 0
    with pytest.raises(ProcessLookupError):
        os.kill(other.pid, 0)
