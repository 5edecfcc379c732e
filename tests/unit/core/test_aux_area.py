"""The aux area: slots are given once, pointers lead into slots or nowhere, and a record is taken only for its own hand-off."""

from __future__ import annotations

import pytest

from kvbaton.core.aux_area import AuxArea, AuxPointer, AuxSlots, pack_aux, point_at, pointer_problem, unpack_aux
from kvbaton.core.handoff import Aux, HandoffKey, TransferId
from kvbaton.errors import ProtocolError

KEY, OTHER = HandoffKey(TransferId("k")), HandoffKey(TransferId("other"))
AUX = Aux(7, -0.5, ((7, -0.5), (8, -1.5)), 0.25, 1.5)
AREA = AuxArea(1000, 3, 256)


def test_a_record_comes_out_as_it_went_in() -> None:
    data = pack_aux(KEY, 4, 9, AUX)
    assert unpack_aux(data, point_at(1000, data), KEY, 4) == AUX


def test_control_a_record_of_another_handoff_grant_or_generation_is_not_taken() -> None:
    data = pack_aux(KEY, 4, 9, AUX)
    pointer = point_at(1000, data)
    for other in (pack_aux(OTHER, 4, 9, AUX), pack_aux(KEY, 5, 9, AUX), pack_aux(KEY, 4, 8, AUX)):
        with pytest.raises(ProtocolError, match="checksum"):
            unpack_aux(other, pointer, KEY, 4)
    with pytest.raises(ProtocolError, match="not of other"):
        unpack_aux(data, pointer, OTHER, 4)
    with pytest.raises(ProtocolError, match="under grant 5"):
        unpack_aux(data, pointer, KEY, 5)


def test_control_every_changed_byte_is_found() -> None:
    data = pack_aux(KEY, 4, 9, AUX)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(ProtocolError, match="checksum"):
            unpack_aux(bytes(changed), point_at(0, data), KEY, 4)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x94\x01\x02\x03\x04", b"\xff" * 40])
def test_what_is_no_record_is_refused_even_with_the_right_checksum(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not an aux record"):
        unpack_aux(data, point_at(0, data), KEY, 4)


@pytest.mark.parametrize("offset", [1000, 1256, 1512])
def test_a_pointer_leads_to_the_start_of_a_slot(offset: int) -> None:
    assert pointer_problem(AuxPointer(offset, 256, 0), AREA) == ""


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (999, 1),
        (1001, 1),
        (744, 1),
        (1768, 1),
        (-24, 1),
        (0, 1),
        (1 << 70, 1),
        (1000, 0),
        (1000, -1),
        (1000, 257),
        (1000, 1 << 70),
    ],
)
def test_every_other_pointer_is_refused(offset: int, size: int) -> None:
    assert pointer_problem(AuxPointer(offset, size, 0), AREA)


@pytest.mark.parametrize("area", [AuxArea(0, 0, 256), AuxArea(0, 4, 0), AuxArea(-1000, 4, 256), AuxArea(0, -1, 256)])
def test_nothing_is_read_of_an_odd_area(area: AuxArea) -> None:
    assert pointer_problem(AuxPointer(area.offset, 1, 0), area)


def test_a_slot_is_given_to_one_at_a_time() -> None:
    slots = AuxSlots(AREA)
    taken = {slots.take() for _ in range(3)}
    assert taken == {1000, 1256, 1512}
    assert slots.refusal(1) == "no free slot"
    slots.give(1256)
    slots.give(1256)
    slots.give(77)
    assert len(slots) == 2
    assert slots.refusal(256) == ""
    assert slots.refusal(257) == "larger than a slot"
    assert slots.take() == 1256
    assert slots.refusal(1) == "no free slot", "a slot that is given twice is free once"
    assert AuxSlots(None).refusal(1) == "no aux area"
