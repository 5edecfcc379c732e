"""Which pair of instances a transfer was routed to; the newest transfers only, of all processes that share a port."""

from __future__ import annotations

import heapq
import mmap
import struct
import zlib
from collections.abc import Iterator

import msgspec

from kvbaton.discovery.messages import InstanceType, Registration, TransferMode
from kvbaton.discovery.registry import Instance, Registry
from kvbaton.router.policy import InstancePair
from kvbaton.router.slots import InstanceKey, SlotBook, instance_key

__all__ = ["Rings", "Routed", "RoutedTransfers"]

_CELL = struct.Struct("=d16sHHII")
_RING = 2048
_NO_PREFILL = 0xFFFF
_PREFIX = "tx-"
_MOST_CODES = 4096
# Written many at once where no other process can ask for them, which costs a request less than one by one.
_AT_ONCE = 64


class Routed(msgspec.Struct, frozen=True):
    """One transfer: the pair that serves it, and when it came, on the router's clock."""

    transfer_id: str
    pair: InstancePair
    arrived: float


class _TransferCell(msgspec.Struct, frozen=True):
    """One transfer as it is shared: slots of the board in place of instances, and digests that show when a slot was reused."""

    arrived: float
    id_bytes: bytes
    prefill_slot: int
    decode_slot: int
    prefill_digest: int
    decode_digest: int


class Rings:
    """Memory that children of this process share: for each of `rows` processes, a ring of its newest transfers."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._memory = memoryview(mmap.mmap(-1, rows * _RING * _CELL.size))

    def write(self, place: int, arrived: float, id_bytes: bytes, code: tuple[int, int, int, int]) -> None:
        """Put a transfer at a place; those of one row are `_RING` places one after the other."""
        _CELL.pack_into(self._memory, place * _CELL.size, arrived, id_bytes, *code)

    def cells(self) -> Iterator[_TransferCell]:
        """Every transfer of every process; one that is being written just now may be missing or garbled."""
        for values in _CELL.iter_unpack(self._memory[:]):
            if values[0]:
                yield _TransferCell(*values)


class RoutedTransfers:
    """The newest transfers of all processes of a router; this one writes `row` of `rings`. Belongs to the event loop's thread.

    An instance is written as its slot, on which all processes agree; what has become of it is looked up when it is read.
    """

    def __init__(self, rings: Rings, row: int, slots: SlotBook, registry: Registry) -> None:
        self._rings = rings
        self._first = self._next = row * _RING
        self._slots = slots
        self._registry = registry
        self._codes: dict[InstancePair, tuple[int, int, int, int]] = {}
        self._unwritten: list[tuple[str, InstancePair, float]] = []
        self._at_once = _AT_ONCE if rings.rows == 1 else 1

    def add(self, transfer_id: str, pair: InstancePair, arrived: float) -> None:
        """Remember a transfer; the oldest one of this process is overwritten."""
        unwritten = self._unwritten
        unwritten.append((transfer_id, pair, arrived))
        if len(unwritten) >= self._at_once:
            self._write_all()

    def _write_all(self) -> None:
        for transfer_id, pair, arrived in self._unwritten:
            self._write(transfer_id, pair, arrived)
        self._unwritten.clear()

    def _write(self, transfer_id: str, pair: InstancePair, arrived: float) -> None:
        code = self._codes.get(pair)
        if code is None:
            if len(self._codes) >= _MOST_CODES:
                self._codes.clear()
            code = self._codes[pair] = self._code(pair)
        self._rings.write(self._next, arrived, bytes.fromhex(transfer_id[len(_PREFIX) :]), code)
        self._next += 1
        if self._next == self._first + _RING:
            self._next = self._first

    def get(self, transfer_id: str) -> Routed | None:
        """The transfer of that id; None when it is not known, or not any more."""
        try:
            wanted = bytes.fromhex(transfer_id.removeprefix(_PREFIX))
        except ValueError:
            return None
        self._write_all()
        found = next((cell for cell in self._rings.cells() if cell.id_bytes == wanted), None)
        return None if found is None else self._routed(found)

    def newest(self, count: int) -> list[Routed]:
        """The newest transfers, the very newest first."""
        self._write_all()
        return [self._routed(cell) for cell in heapq.nlargest(count, self._rings.cells(), key=_arrival)]

    def _code(self, pair: InstancePair) -> tuple[int, int, int, int]:
        decode = instance_key(pair.decode.registration)
        if pair.prefill is None:
            return _NO_PREFILL, self._slots.slot_of(decode), 0, _digest(decode)
        prefill = instance_key(pair.prefill.registration)
        return self._slots.slot_of(prefill), self._slots.slot_of(decode), _digest(prefill), _digest(decode)

    def _routed(self, cell: _TransferCell) -> Routed:
        prefill = None
        if cell.prefill_slot != _NO_PREFILL:
            prefill = self._instance(cell.prefill_slot, cell.prefill_digest, InstanceType.PREFILL)
        decode = self._instance(cell.decode_slot, cell.decode_digest, InstanceType.DECODE)
        return Routed(f"{_PREFIX}{cell.id_bytes.hex()}", InstancePair(prefill, decode), cell.arrived)

    def _instance(self, slot: int, digest: int, kind: InstanceType) -> Instance:
        """The instance of the slot, if that is still the one that was written; else a placeholder that is not live."""
        key = self._slots.key_of(slot)
        if key is None or _digest(key) != digest:
            key = ("forgotten", str(kind), "")
        known = self._registry.find_process(key[0], kind, key[2])
        if known is not None:
            return known
        mode = TransferMode.WRITE
        return Instance(
            Registration(type=kind, http_address=key[0], zmq_address="", transfer_mode=mode, incarnation=key[2]), 0, 0
        )


def _digest(key: InstanceKey) -> int:
    return zlib.crc32("\n".join(key).encode())


def _arrival(cell: _TransferCell) -> float:
    return cell.arrived
