"""Messages that travel in one frame on the simulator's network: they share its fate, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from kvbaton.core.handoff import HandoffKey, Incarnation, TransferId
from kvbaton.core.messages import MAX_MORE, Envelope, Release, decode, encode, split
from kvbaton.sim.drills import script_of_seed
from kvbaton.sim.network import Network
from kvbaton.sim.run import run_script
from kvbaton.sim.world import World

HERE, THERE = Incarnation("p0#1"), Incarnation("d0#1")


def release(number: int) -> bytes:
    return encode(HERE, THERE, Release(HandoffKey(TransferId("tx")), number))


def grants_of(frame: bytes) -> list[int]:
    return [each.message.grant for each in split(decode(frame)) if isinstance(each.message, Release)]


class Wire:
    """A network between two addresses, and the frames that came through."""

    def __init__(self, *, joins_messages: bool = True) -> None:
        self.world = World(1)
        self.arrived: list[bytes] = []
        self.network = Network(self.world, lambda _address, frame, _sender: self.arrived.append(frame))
        self.network.joins_messages, self.network.is_ordered = joins_messages, True

    def send(self, *frames: bytes) -> None:
        for frame in frames:
            self.network.send("p0", "d0", frame)
        self.world.run(self.world.now + 1.0, 100)


@pytest.mark.parametrize(("joins", "frames"), [(True, [[1, 2, 3]]), (False, [[1], [2], [3]])])
def test_messages_of_one_moment_travel_in_one_frame_where_that_is_asked_for(joins: bool, frames: list[list[int]]) -> None:
    wire = Wire(joins_messages=joins)
    wire.send(release(1), release(2), release(3))
    assert [grants_of(frame) for frame in wire.arrived] == frames


def test_a_frame_is_lost_or_doubled_with_all_its_messages() -> None:
    wire = Wire()
    wire.network.link("p0", "d0").lose_next = 1
    wire.send(release(1), release(2))
    assert wire.arrived == []
    wire.network.link("p0", "d0").double_next = 1
    wire.send(release(3), release(4))
    assert [grants_of(frame) for frame in wire.arrived] == [[3, 4], [3, 4]]


def test_a_frame_has_no_more_messages_than_may_be_sent() -> None:
    wire = Wire()
    numbers = list(range(1, 2 * MAX_MORE + 4))
    wire.send(*map(release, numbers))
    assert [len(grants_of(frame)) for frame in wire.arrived] == [MAX_MORE + 1, MAX_MORE + 1, 1]
    assert [number for frame in wire.arrived for number in grants_of(frame)] == numbers


def test_what_is_for_another_process_or_no_message_travels_alone() -> None:
    wire = Wire()
    other = encode(HERE, "d0#2", Release(HandoffKey(TransferId("tx")), 3))
    wire.send(release(1), release(2), other, b"no message", release(4))
    assert wire.arrived[1:] == [other, b"no message", release(4)]
    assert grants_of(wire.arrived[0]) == [1, 2]


def test_seeds_have_runs_with_joined_messages_and_runs_without() -> None:
    assert {script_of_seed(seed).joins_messages for seed in range(40)} == {True, False}


def rules_broken(seeds: range) -> Iterator[str]:
    """What does not hold in the runs of these seeds, drills among them, if their messages are joined; run by run."""
    for seed in seeds:
        script = msgspec.structs.replace(script_of_seed(seed), joins_messages=True)
        yield from (violation.rule for violation in run_script(script).violations)


def test_every_rule_holds_in_every_kind_of_run_with_joined_messages() -> None:
    assert set(rules_broken(range(96))) == set()


def test_runs_notice_when_only_the_first_message_of_a_frame_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbaton.sim.instance.split", first_only)
    assert next(rules_broken(range(24)), None) is not None


def first_only(envelope: Envelope) -> list[Envelope]:
    return [next(split(envelope))]
