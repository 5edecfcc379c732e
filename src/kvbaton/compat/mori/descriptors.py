"""Descriptors of engines and memories, which their users pack, send to peers, and unpack there.

The packed form is MoRI's array, and one more item at its end with what kvbaton needs: where and how the engine is reached, or
which slot and stamp the memory has. A descriptor that a real MoRI packed is unpacked too, and refused when a session is made
with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvbaton.compat.mori.names import MemoryLocationType
from kvbaton.core.card import Endpoint
from kvbaton.transport.exchange.base import MemoryHandle

__all__ = ["IPC_HANDLE_BYTES", "EngineDesc", "MemoryDesc"]

IPC_HANDLE_BYTES = 64
_NO_HANDLE = bytes(IPC_HANDLE_BYTES)
_ENGINE_FIELDS = 6
_MEMORY_FIELDS = 15


@dataclass(frozen=True, slots=True)
class EngineDesc:
    """How peers know an engine."""

    key: str
    node_id: str
    hostname: str
    host: str
    port: int
    pid: int
    endpoint: Endpoint | None = field(default=None, repr=False)

    def pack(self) -> bytes:
        """The descriptor as bytes."""
        fields = (self.key, self.node_id, self.hostname, self.host, self.port, self.pid)
        return msgspec.msgpack.encode((*fields, self.endpoint))

    @staticmethod
    def unpack(data: bytes) -> EngineDesc:
        """The inverse of `pack`. Raises RuntimeError for anything else."""
        items = _items(data, _ENGINE_FIELDS, "EngineDesc")
        key, node, hostname, host, port, pid, *rest = items
        texts, numbers = (key, node, hostname, host), (port, pid)
        if any(not isinstance(text, str) for text in texts) or any(not isinstance(number, int) for number in numbers):
            raise RuntimeError("EngineDesc: a field has another type")
        return EngineDesc(key, node, hostname, host, port, pid, _converted(rest, Endpoint))


@dataclass(frozen=True, slots=True)
class MemoryDesc:
    """How peers know a registered memory; `data` is its address at its owner."""

    engine_key: str
    id: int
    device_id: int
    device_bus_id: str
    data: int
    size: int
    loc: MemoryLocationType
    numa_node: int = -1
    ipc_handle: bytes = field(default=_NO_HANDLE, repr=False, compare=False)
    handle: MemoryHandle | None = field(default=None, repr=False)

    def pack(self) -> bytes:
        """The descriptor as bytes."""
        first = (self.engine_key, self.id, self.device_id, self.device_bus_id, self.data, self.size, self.loc.value)
        second = (self.ipc_handle, self.numa_node, 0, _NO_HANDLE, 0, 0, 0, 0)
        return msgspec.msgpack.encode((*first, *second, self.handle))

    @staticmethod
    def unpack(data: bytes) -> MemoryDesc:
        """The inverse of `pack`. Raises RuntimeError for anything else."""
        items = _items(data, _MEMORY_FIELDS, "MemoryDesc")
        key, number, device, bus, address, size, loc, ipc, numa = items[:9]
        try:
            place = MemoryLocationType(loc)
        except ValueError as error:
            raise RuntimeError(f"MemoryDesc: {error}") from error
        numbers = (number, device, address, size, numa)
        if not isinstance(key, str) or not isinstance(bus, str) or not isinstance(ipc, bytes) or len(ipc) != IPC_HANDLE_BYTES:
            raise RuntimeError("MemoryDesc: a field has another type")
        if any(not isinstance(each, int) for each in numbers) or size < 0:
            raise RuntimeError("MemoryDesc: a number has another type, or is negative")
        return MemoryDesc(
            key, number, device, bus, address, size, place, numa, ipc, _converted(items[_MEMORY_FIELDS:], MemoryHandle)
        )


def _items(data: bytes, least: int, name: str) -> list[Any]:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"{name}.unpack takes bytes, not {type(data).__name__}")
    try:
        items: list[Any] = msgspec.msgpack.decode(data, type=list)
    except msgspec.MsgspecError as error:
        raise RuntimeError(f"{name}: these bytes are no descriptor ({error})") from error
    if len(items) < least:
        raise RuntimeError(f"{name}: {len(items)} fields, at least {least} are needed")
    return items


def _converted(rest: list[Any], kind: type[Any]) -> Any:
    """Our own item at the end of a descriptor; None where there is none, or not one of ours."""
    if not rest or rest[0] is None:
        return None
    try:
        return msgspec.convert(rest[0], kind)
    except msgspec.ValidationError:
        return None
