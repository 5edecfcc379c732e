"""Stamps: none is given out twice, slots are bounded, and what a peer may send of them is."""

from __future__ import annotations

import msgspec
import pytest

from kvbaton.core.handoff import HandoffKey, Incarnation, TransferId
from kvbaton.core.messages import MAX_NUMBER, Prefilled, decode, encode
from kvbaton.core.stamps import Stamp, StampArea, StampSlots
from kvbaton.errors import ProtocolError

AREA = StampArea(3, 77, 4)
KEY = HandoffKey(TransferId("k"))


def test_a_slot_is_used_again_and_a_stamp_never_is() -> None:
    slots, seen = StampSlots(AREA, "one"), set()
    for _ in range(100):
        stamp = slots.take()
        assert stamp is not None
        assert 0 <= stamp.slot < AREA.slots
        assert stamp.value not in seen
        seen.add(stamp.value)
        slots.give(stamp)
    assert len(slots) == AREA.slots


def test_there_are_as_many_at_a_time_as_slots() -> None:
    slots = StampSlots(AREA, "one")
    taken = [slots.take() for _ in range(AREA.slots)]
    assert len({stamp.slot for stamp in taken if stamp is not None}) == AREA.slots
    assert slots.take() is None
    assert taken[2] is not None
    slots.give(taken[2])
    again = slots.take()
    assert again is not None
    assert again.slot == taken[2].slot


def test_without_an_area_there_are_none() -> None:
    assert StampSlots(None, "one").take() is None


def test_processes_begin_with_different_numbers() -> None:
    firsts = {stamp.value for name in ("one", "two", "three") if (stamp := StampSlots(AREA, name).take()) is not None}
    assert len(firsts) == 3


def test_the_last_number_of_the_wire_is_followed_by_the_first() -> None:
    slots = StampSlots(AREA, "one")
    slots._last = MAX_NUMBER - 1
    assert [stamp.value for _ in range(3) if (stamp := slots.take()) is not None] == [MAX_NUMBER, 1, 2]


@pytest.mark.parametrize(("slot", "value"), [(-1, 1), (0, 0), (0, -1), (0, MAX_NUMBER + 1), (MAX_NUMBER + 1, 1)])
def test_control_a_stamp_that_none_shows_is_no_message(slot: int, value: int) -> None:
    """An empty slot shows 0: a peer that names 0 would have everything taken for confirmed."""
    true = Prefilled(KEY, 1, 1, 1, 1, 0.0, Stamp(0, 1))
    frame = encode(Incarnation("s"), "t", true)
    assert decode(frame).message == true
    false = msgspec.msgpack.decode(frame)
    false["message"]["stamp"] = {"slot": slot, "value": value}
    with pytest.raises(ProtocolError, match="stamp"):
        decode(msgspec.msgpack.encode(false))
