"""The aux area: slots in a rank's registered memory through which aux records can travel, and the format of a record.

A target reads a slot some time after the source has sent the pointer. If the hand-off ended in between, the source may have
reused the slot for another one. So a record names its hand-off, and the pointer carries a checksum of the whole record.
"""

from __future__ import annotations

import hashlib

import msgspec

from kvbaton.core.handoff import Aux, HandoffKey
from kvbaton.errors import ProtocolError

__all__ = ["AuxArea", "AuxPointer", "AuxSlots", "pack_aux", "point_at", "pointer_problem", "unpack_aux"]


class AuxArea(msgspec.Struct, frozen=True, gc=False):
    """`slots` slots of `slot_bytes` each, starting at `offset` bytes from the start of the registered region."""

    offset: int
    slots: int
    slot_bytes: int


class AuxPointer(msgspec.Struct, frozen=True, gc=False):
    """Where a record lies in its source's region, how long it is, and the checksum of its bytes."""

    offset: int
    size_bytes: int
    checksum: int


class _Packed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    key: HandoffKey
    grant: int
    generation: int
    aux: Aux


_decoder = msgspec.msgpack.Decoder(_Packed)


def pack_aux(key: HandoffKey, grant: int, generation: int, aux: Aux) -> bytes:
    """What is written into a slot."""
    return msgspec.msgpack.encode(_Packed(key, grant, generation, aux))


def point_at(offset: int, data: bytes) -> AuxPointer:
    """The pointer to `data` at `offset`."""
    return AuxPointer(offset, len(data), _checksum(data))


def unpack_aux(data: bytes, pointer: AuxPointer, key: HandoffKey, grant: int) -> Aux:
    """The record at a pointer; raises ProtocolError when it is not that of this hand-off and grant."""
    if _checksum(data) != pointer.checksum:
        raise ProtocolError(f"the checksum is {_checksum(data):x} where {pointer.checksum:x} was announced")
    try:
        packed = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not an aux record: {error}") from error
    if (packed.key, packed.grant) != (key, grant):
        raise ProtocolError(f"it is the record of {packed.key} under grant {packed.grant}, not of {key} under grant {grant}")
    return packed.aux


def _checksum(data: bytes) -> int:
    # 7 bytes stay below 2^62, the largest whole number on the wire.
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


def pointer_problem(pointer: AuxPointer, area: AuxArea) -> str:
    """Why a pointer is not a record in a slot of `area`; empty when it is. Checked before anything is read there."""
    if area.slot_bytes < 1:
        return f"an area with slots of {area.slot_bytes} bytes"
    slot, within = divmod(pointer.offset - area.offset, area.slot_bytes)
    if within or not 0 <= slot < area.slots or pointer.offset < 0:
        return f"offset {pointer.offset} is not the start of one of {area.slots} slots from {area.offset} on"
    if not 0 < pointer.size_bytes <= area.slot_bytes:
        return f"{pointer.size_bytes} bytes are not between 1 and {area.slot_bytes}"
    return ""


class AuxSlots:
    """The free and the taken slots of an area. Without an area there are none."""

    def __init__(self, area: AuxArea | None) -> None:
        self.area = area
        self._free = [] if area is None else [area.offset + slot * area.slot_bytes for slot in range(area.slots)]
        self._taken: set[int] = set()

    def __len__(self) -> int:
        return len(self._taken)

    def refusal(self, size_bytes: int) -> str:
        """Why there is no slot for a record of that size now; empty when there is."""
        if self.area is None:
            return "no aux area"
        if size_bytes > self.area.slot_bytes:
            return "larger than a slot"
        return "" if self._free else "no free slot"

    def take(self) -> int:
        """The offset of a free slot; call it only after `refusal` was empty."""
        offset = self._free.pop()
        self._taken.add(offset)
        return offset

    def give(self, offset: int) -> None:
        """Return a slot; one that is not taken is left alone."""
        if offset in self._taken:
            self._taken.discard(offset)
            self._free.append(offset)
