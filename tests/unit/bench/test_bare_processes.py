"""Two bare instances in processes of their own: hand-offs run, stand still on command, and go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from kvbaton.bench.bare.orders import BareSettings, CancelTask, Check, Free, Hold, Lift, SetFaults
from kvbaton.bench.bare.process import BareProcess
from kvbaton.bench.bare.relay import Load, Relay
from kvbaton.core.handoff import Mode
from kvbaton.errors import LocalError

TOKENS = 60
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def relay() -> Iterator[Relay]:
    settings = BareSettings(blocks=64, most_tokens=TOKENS, can_hold=True)
    with BareProcess("source", settings) as source, BareProcess("target", settings) as target:
        yield Relay([source, target])


def run(relay: Relay, load: Load) -> None:
    relay.begin(load, *relay.processes)
    finish(relay, load)


def finish(relay: Relay, load: Load) -> None:
    sides = [relay.ends[load.name, process.name] for process in relay.processes]
    relay.wait(lambda: all(len(side) == load.count for side in sides), f"{load.name} is over", PATIENCE_S)


def outcomes(relay: Relay, name: str) -> set[str]:
    return {end.outcome for process in relay.processes for end in relay.ends[name, process.name]}


@pytest.mark.parametrize("mode", Mode)
def test_hand_offs_land_whole_and_all_blocks_come_back(relay: Relay, mode: Mode) -> None:
    _, target = relay.processes
    before = target.gauges().landed_total
    run(relay, Load(f"plain {mode}", mode, 40, 8, TOKENS, 32))
    assert outcomes(relay, f"plain {mode}") == {"delivered"}
    assert target.gauges().landed_total == before + 40
    for process in relay.processes:
        gauges = process.gauges()
        assert (gauges.blocks_in_use, gauges.live, gauges.foreign_bytes, gauges.errors_total) == (0, 0, 0, 0)


HOLDS = {
    "not asked for": (Hold(), Hold(pulls=False)),
    "in mid-stream": (Hold(spans=4), Hold()),
    "grant swallowed": (Hold(), Hold(muted=("grant",))),
    "confirmation swallowed": (Hold(muted=("confirmed",)), Hold()),
}


@pytest.mark.parametrize("name", HOLDS)
def test_hand_offs_stand_still_until_the_hold_is_lifted(relay: Relay, name: str) -> None:
    source_hold, target_hold = HOLDS[name]
    load = Load(name, Mode.PUSH, 3, 3, TOKENS, 32, source_hold=source_hold, target_hold=target_hold)
    source, target = relay.processes
    relay.begin(load, source, target)
    relay.wait(lambda: max(process.gauges().held[name] for process in (source, target)) == 3, "they stand", PATIENCE_S)
    assert not relay.ends[name, "target"]
    for process in relay.processes:
        process.order(Lift(name))
    finish(relay, load)
    assert outcomes(relay, name) == {"delivered"}


def test_what_is_kept_is_looked_at_again(relay: Relay) -> None:
    run(relay, Load("kept", Mode.PULL, 4, 4, TOKENS, 32, check=Check(keeps=True)))
    target = relay.processes[1]
    assert target.gauges().blocks_in_use == 16
    target.order(Free("kept"))
    assert target.gauges().blocks_in_use == 0
    assert target.gauges().foreign_bytes == 0


def test_a_cancelled_task_gives_everything_back(relay: Relay) -> None:
    load = Load("cancelled", Mode.PUSH, 3, 3, TOKENS, 32, source_hold=Hold(spans=4))
    source, target = relay.processes
    relay.begin(load, source, target)
    relay.wait(lambda: source.gauges().held["cancelled"] == 3, "they stand", PATIENCE_S)
    target.order(CancelTask("cancelled"))
    finish(relay, load)
    assert outcomes(relay, "cancelled") == {"cancelled"}


def test_a_byte_that_goes_wrong_on_its_way_is_counted(relay: Relay) -> None:
    target = relay.processes[1]
    target.order(SetFaults(corrupt=True))
    run(relay, Load("wrong", Mode.PULL, 2, 2, TOKENS, 32))
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
