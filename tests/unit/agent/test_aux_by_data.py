"""Aux records over the data transport: fetched, checked, and by message wherever that does not work; no slot is lost."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from agent_rig import BLOCKS, Net, card_of, key_of
from driver_rig import AUX as DRIVER_AUX
from driver_rig import is_equal, landed, pair

from kvbaton.agent.engine_port import Allocation, Landed, Offer, SourceEnded, SourceRequest
from kvbaton.agent.source import SourceRecord
from kvbaton.config import HandoffSettings
from kvbaton.core.aux_area import AuxArea, AuxPointer
from kvbaton.core.card import Card, RankCard
from kvbaton.core.handoff import Aux, AuxChannel, Mode
from kvbaton.core.lifecycle import TargetState
from kvbaton.core.messages import AuxSent, Grant, Stop
from kvbaton.transport.faulty import Faults

KEY = key_of("k")
TOKENS = 3
AUX = Aux(7, -0.5)
DATA = HandoffSettings(aux_channel=AuxChannel.DATA)
AREA = AuxArea(1000, 2, 256)


def card(name: str, area: AuxArea | None = AREA) -> Card:
    plain = card_of(name)
    (rank,) = plain.ranks
    return msgspec.structs.replace(plain, ranks=(RankCard(0, rank.layout, rank.endpoints, area),))


class Two:
    """A source and a target that wants its aux records by data."""

    def __init__(self, source_area: AuxArea | None = AREA, target_area: AuxArea | None = AREA) -> None:
        self.net = Net()
        self.source = self.net.add(card("s", source_area), 1)
        self.target = self.net.add(card("t", target_area), 2, settings=DATA)

    def start(self, name: str = "k", aux: Aux = AUX, *, is_moved: bool = True) -> None:
        """Up to the point where all is announced, and moved, and the aux record is on its way."""
        key = key_of(name)
        wanted = SourceRequest(key, name, self.source.address, None, Mode.PULL)
        self.source.coordinator.expect_target(key, name)
        self.source.coordinator.offer(Offer(key, BLOCKS, TOKENS, aux))
        self.target.coordinator.expect_source(wanted)
        self.target.coordinator.allocated(Allocation(wanted, BLOCKS, TOKENS, 0))
        self.net.deliver_all()
        if is_moved:
            self.target.ranks.finish_all()
        self.settle()

    def read(self, error: str = "") -> None:
        self.target.ranks.read_all_aux(self.source.ranks, error)
        self.settle()

    def settle(self) -> None:
        self.target.settle()
        self.net.deliver_all()

    def sent(self) -> list[AuxSent]:
        return [message for message in self.source.sent if isinstance(message, AuxSent)]

    def delivered(self) -> list[Any]:
        return [event.aux for event in self.target.events if isinstance(event, Landed)]

    def slots(self) -> tuple[int, int]:
        return len(self.source.coordinator.source.aux_slots), len(self.target.coordinator.target.aux_slots)

    def fallbacks(self) -> dict[str, int]:
        return dict(self.source.coordinator.source.aux_fallbacks_total + self.target.coordinator.target.aux_fallbacks_total)


def test_a_record_is_fetched_out_of_a_slot_and_both_slots_are_free_afterwards() -> None:
    two = Two()
    two.start()
    (sent,) = two.sent()
    assert (sent.aux, sent.pointer is not None) == (None, True)
    assert two.slots() == (1, 1)
    assert two.delivered() == []
    two.read()
    assert two.delivered() == [AUX]
    assert two.slots() == (0, 0)
    assert two.fallbacks() == {}
    assert [type(event) for event in two.source.events if isinstance(event, SourceEnded)] == [SourceEnded]


def test_a_record_that_comes_when_its_hand_off_is_being_stopped_is_late_and_its_slot_is_free() -> None:
    two = Two()
    two.start(is_moved=False)
    side = two.target.coordinator.target
    side.cancel(KEY, "the client is gone")
    record = side.live[KEY]
    assert record.state is TargetState.STOPPING
    until = record.give_up_at
    two.net.clock.now += 1.0
    two.target.ranks.read_all_aux(two.source.ranks, "")
    two.target.settle()
    assert side.late_total["aux"] == 1
    assert (record.aux, record.give_up_at) == (None, until)
    assert len(side.aux_slots) == 0


@pytest.mark.parametrize("areas", [(None, AREA), (AREA, None), (None, None)])
def test_without_an_area_on_either_side_it_comes_by_message(areas: tuple[AuxArea | None, AuxArea | None]) -> None:
    two = Two(*areas)
    two.start()
    assert two.delivered() == [AUX]
    assert two.fallbacks() == {"no aux area": 1}
    assert {message.aux_channel for message in two.target.sent if isinstance(message, Grant)} == {AuxChannel.CONTROL}


def test_a_record_that_is_larger_than_a_slot_comes_by_message() -> None:
    two = Two()
    large = Aux(7, -0.5, tuple((token, -1.0) for token in range(100)))
    two.start(aux=large)
    assert two.delivered() == [large]
    assert two.fallbacks() == {"larger than a slot": 1}


def test_when_all_slots_are_taken_it_comes_by_message() -> None:
    two = Two()
    for name in ("a", "b", "c"):
        two.start(name)
    assert two.delivered() == [AUX]
    assert two.fallbacks() == {"no free slot": 1}
    two.read()
    assert two.delivered() == [AUX] * 3
    assert two.slots() == (0, 0)


BAD = [AuxPointer(-1000, 50, 1), AuxPointer(1001, 50, 1), AuxPointer(1 << 62, 50, 1), AuxPointer(1000, 0, 1)]
BAD += [AuxPointer(1000, -1, 1), AuxPointer(1000, 257, 1)]


@pytest.mark.parametrize("pointer", BAD, ids=str)
def test_a_pointer_that_leads_elsewhere_is_never_followed(pointer: AuxPointer, monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two()

    def bad_pointer(record: SourceRecord, _: Aux) -> AuxPointer | None:
        return None if record.grant is None or record.grant.aux_channel is AuxChannel.CONTROL else pointer

    monkeypatch.setattr(two.source.coordinator.source, "_point_at_aux", bad_pointer)
    two.start()
    assert two.target.ranks.aux_reads == []
    assert two.fallbacks() == {"bad pointer": 1}
    assert two.delivered() == [AUX]
    assert [grant.aux_channel for grant in two.target.sent if isinstance(grant, Grant)] == [AuxChannel.DATA, AuxChannel.CONTROL]


@pytest.mark.parametrize(("damage", "cause"), [("error", "not read"), ("byte", "not the record"), ("other", "not the record")])
def test_what_is_not_read_or_is_not_the_record_comes_by_message(damage: str, cause: str) -> None:
    two = Two()
    two.start()
    memory = two.source.ranks.aux
    (offset,) = memory
    if damage == "byte":
        memory[offset] = memory[offset][:-1] + b"\x55"
    elif damage == "other":
        memory[offset] = memory[offset].replace(b"k", b"j", 1)
    two.read("the link broke" if damage == "error" else "")
    assert two.fallbacks() == {cause: 1}
    assert two.delivered() == [AUX]
    assert two.slots() == (0, 0)


def test_a_slot_that_is_being_read_when_its_handoff_ends_is_free_when_that_is_over() -> None:
    two = Two()
    two.start()
    two.target.coordinator.cancel(KEY)
    two.settle()
    two.target.ranks.quiet_all()
    two.settle()
    assert two.slots() == (0, 1), "it may still be written to"
    two.read()
    assert two.slots() == (0, 0)
    assert two.delivered() == []


def test_a_pointer_that_comes_again_is_followed_once_and_not_at_all_after_the_record() -> None:
    two = Two()
    two.start()
    (sent,) = two.sent()
    two.target.coordinator.target.on_aux(two.source.card.incarnation, sent)
    assert len(two.target.ranks.aux_reads) == 1
    two.read("the link broke")
    assert two.delivered() == [AUX]
    assert two.fallbacks() == {"not read": 1}


@pytest.mark.parametrize("pointer", [AuxPointer(1000, 50, 1), BAD[0]], ids=["good", "bad"])
def test_a_pointer_to_the_record_of_what_is_ending_is_not_followed_nor_asked_for_again(pointer: AuxPointer) -> None:
    two = Two()
    two.net.loses = lambda message: isinstance(message, AuxSent)
    two.start()
    two.target.coordinator.cancel(KEY)
    assert two.target.coordinator.target.live[KEY].state is TargetState.STOPPING
    two.target.coordinator.target.on_aux(two.source.card.incarnation, AuxSent(KEY, 1, None, pointer))
    assert two.target.ranks.aux_reads == []
    assert two.slots()[1] == 0
    assert isinstance(two.target.sent[-1], Stop), "a grant that follows its stop asks for what is over"
    assert two.fallbacks() == {}


# Over real sockets and real memory.


def test_real_records_travel_through_real_slots() -> None:
    with pair(settings=DATA) as (source, target):
        for number in range(10):
            assert landed(source, target, f"k{number}").aux == DRIVER_AUX
            assert is_equal(source, target)
        assert source.driver.stats().aux_fallbacks_total == target.driver.stats().aux_fallbacks_total == {}
        assert bytes(source.cache.memory[source.cache.data.nbytes :]).strip(b"\0"), "the record has been in a slot"


@pytest.mark.parametrize("faults", [Faults(corrupt=True), Faults(drop_writes=True)], ids=["corrupt", "dropped"])
def test_a_record_that_is_damaged_on_its_way_comes_by_message(faults: Faults) -> None:
    with pair(faults=faults, settings=DATA) as (source, target):
        assert landed(source, target, "k").aux == DRIVER_AUX
        assert target.driver.stats().aux_fallbacks_total == {"not the record": 1}
