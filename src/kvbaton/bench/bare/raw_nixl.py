"""The same hand-offs by raw NIXL agents: a bare instance whose agents are one NIXL agent, polled by the thread of its engine.

Per hand-off: in push the target asks by a notification; the source answers one with the block ids once all is computed; the
target posts one read, whose notification releases the source's blocks. In pull nothing is asked: offers are sent ahead, as a
router that forwards block ids does. Descriptors of all pages are prepared once, as connectors built on NIXL do. Nothing is
announced by layer, no lease is kept, nothing is confirmed, and no peer is expected to fail.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from kvbaton.agent.engine_port import (
    AgentStats,
    Allocation,
    EngineEvent,
    Granted,
    HandoffStats,
    Landed,
    Offer,
    SourceEnded,
    SourceRequest,
    SpansReady,
)
from kvbaton.bench.bare.instance import BareInstance, BareSettings, run_child
from kvbaton.bench.bare.pages import TaggedPages
from kvbaton.bench.bare.process import BareProcess
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Aux, BlockLists, HandoffKey, Mode, Outcome, Span
from kvbaton.core.timeline import Side
from kvbaton.errors import Bug
from kvbaton.launch.ports import PortPicker

__all__ = ["RawNixlAgents", "RawNixlInstance", "RawNixlProcess", "main"]

_HOST = "127.0.0.1"
_SIZE_BYTES = 8
_MEETING_S = 60.0


class _Asked(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    key: HandoffKey


class _Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    key: HandoffKey
    blocks: tuple[int, ...]
    token_id: int


class _Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    key: HandoffKey


_notification_decoder: msgspec.msgpack.Decoder[_Asked | _Ready | _Done] = msgspec.msgpack.Decoder(_Asked | _Ready | _Done)
_encode = msgspec.msgpack.Encoder().encode


class _NixlIntroduction(msgspec.Struct, frozen=True):
    """What two agents send each other first, over a socket."""

    metadata: bytes
    address: int
    blocks: int


@dataclass(frozen=True, slots=True)
class _Partner:
    name: str
    pages: Any


class RawNixlAgents:
    """What a `Driver` is to a bare instance, with NIXL alone. One thread calls it; `events` is where it works."""

    def __init__(self, pages: TaggedPages) -> None:
        api: Any = importlib.import_module("nixl._api")
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._nixl = api.nixl_agent(f"raw {os.getpid()}", config)
        self._pages = pages
        data = pages.data
        self._nixl.register_memory([(data.ctypes.data, data.nbytes, 0, "")], "DRAM")
        self._listener = socket.create_server((_HOST, PortPicker().pick()))
        self._listener.setblocking(False)
        self._own = self._prepare("", data.ctypes.data, pages.blocks)
        self._partner: _Partner | None = None
        self._unsent: list[bytes] = []
        self._sources: set[HandoffKey] = set()
        self._parked: set[HandoffKey] = set()
        self._targets: dict[HandoffKey, Allocation | None] = {}
        self._offered: dict[HandoffKey, _Ready] = {}
        self._reads: dict[HandoffKey, tuple[Any, int]] = {}
        self._events: list[EngineEvent] = []

    @property
    def address(self) -> ControlAddress:
        return ControlAddress.of(_HOST, self._listener.getsockname()[1])

    @property
    def has_live(self) -> bool:
        """Whether there is something to poll for: NIXL has no descriptor to wait on."""
        return bool(self._sources or self._targets)

    def start(self) -> None:
        pass

    def close(self) -> None:
        self._listener.close()

    def expect_target(self, key: HandoffKey, prompt: str) -> None:
        del prompt
        self._sources.add(key)
        if key in self._parked:
            self._parked.discard(key)
            self._events.append(Granted(key))

    def spans_ready(self, key: HandoffKey, blocks: BlockLists, spans: tuple[Span, ...]) -> None:
        """Nothing: there is one read per hand-off."""

    def spans_ready_all(self, ready: Sequence[SpansReady]) -> None:
        """Nothing, as `spans_ready`."""

    def offer(self, offer: Offer) -> None:
        self._notify(_Ready(offer.key, offer.blocks[0], offer.aux.token_id))

    def expect_source(self, request: SourceRequest) -> None:
        self._targets[request.key] = None
        if self._partner is None:
            with socket.create_connection((request.source.host, request.source.handshake), _MEETING_S) as sock:
                self._meet(sock)

    def allocated(self, allocation: Allocation) -> None:
        self._targets[allocation.key] = allocation
        if allocation.request.mode is Mode.PUSH:
            self._notify(_Asked(allocation.key))
        elif (ready := self._offered.pop(allocation.key, None)) is not None:
            self._read(ready)

    def retract(self, key: HandoffKey) -> None:
        raise Bug(f"{key}: raw NIXL takes nothing back")

    def decline(self, request: SourceRequest, reason: str) -> None:
        raise Bug(f"{request.key}: raw NIXL declines nothing ({reason})")

    def refuse(self, key: HandoffKey, reason: str) -> None:
        raise Bug(f"{key}: raw NIXL refuses nothing ({reason})")

    def cancel(self, key: HandoffKey, side: Side | None = None) -> None:
        raise Bug(f"{key}: raw NIXL cancels nothing ({side})")

    def events(self) -> list[EngineEvent]:
        """Poll NIXL and return what follows."""
        if self._partner is None:
            with contextlib.suppress(BlockingIOError), self._listener.accept()[0] as sock:
                sock.settimeout(_MEETING_S)
                self._meet(sock)
        if self._partner is not None:
            for texts in self._nixl.get_new_notifs().values():
                for text in texts:
                    self._on_notification(_notification_decoder.decode(text))
        for key in [key for key, (handle, _) in self._reads.items() if self._nixl.check_xfer_state(handle) != "PROC"]:
            self._land(key)
        events, self._events = self._events, []
        return events

    def stats(self) -> AgentStats:
        live = {"source": len(self._sources), "target": len(self._targets)}
        return AgentStats(live, 0, Counter(), Counter(), 0, Counter(), 0, 0, 0.0, 0.0)

    def _on_notification(self, message: _Asked | _Ready | _Done) -> None:
        match message:
            case _Asked() if message.key in self._sources:
                self._events.append(Granted(message.key))
            case _Asked():
                # Its target is ahead: the notification of the read before it has not been taken here.
                self._parked.add(message.key)
            case _Ready() if self._targets.get(message.key) is None:
                self._offered[message.key] = message
            case _Ready():
                self._read(message)
            case _Done():
                self._sources.discard(message.key)
                self._events.append(SourceEnded(message.key, Outcome.DELIVERED))

    def _read(self, ready: _Ready) -> None:
        allocation, partner = self._targets[ready.key], self._partner
        if allocation is None or partner is None:
            raise Bug(f"{ready.key}: a read without blocks or without a peer")
        sides = [self._indices(blocks) for blocks in (allocation.blocks[0], ready.blocks)]
        done = _encode(_Done(ready.key))
        handle = self._nixl.make_prepped_xfer("READ", self._own, sides[0], partner.pages, sides[1], done)
        self._reads[ready.key] = handle, ready.token_id
        if self._nixl.transfer(handle) == "ERR":
            raise Bug(f"{ready.key}: NIXL does not take the read")

    def _land(self, key: HandoffKey) -> None:
        handle, token_id = self._reads.pop(key)
        if (state := self._nixl.check_xfer_state(handle)) != "DONE":
            raise Bug(f"{key}: the read ended as {state}")
        self._nixl.release_xfer_handle(handle)
        del self._targets[key]
        self._events.append(Landed(key, Aux(token_id, 0.0), HandoffStats(transport="raw NIXL")))

    def _notify(self, message: _Asked | _Ready) -> None:
        text = _encode(message)
        if self._partner is None:
            self._unsent.append(text)
        else:
            self._nixl.send_notif(self._partner.name, text)

    def _meet(self, sock: socket.socket) -> None:
        """Exchange metadata with the one peer, and send it what has waited for it."""
        data = self._pages.data
        own = _encode(_NixlIntroduction(self._nixl.get_agent_metadata(), data.ctypes.data, self._pages.blocks))
        sock.sendall(len(own).to_bytes(_SIZE_BYTES, "big") + own)
        size = int.from_bytes(_exactly(sock, _SIZE_BYTES), "big")
        other = msgspec.msgpack.decode(_exactly(sock, size), type=_NixlIntroduction)
        name = self._nixl.add_remote_agent(other.metadata)
        self._partner = _Partner(name, self._prepare(name, other.address, other.blocks))
        for text in self._unsent:
            self._nixl.send_notif(name, text)
        self._unsent.clear()

    def _prepare(self, agent: str, address: int, blocks: int) -> Any:
        """Descriptors of every page of a region: by layer, plane and block."""
        shape = self._pages.shape
        page_bytes = shape.block_tokens * shape.token_bytes
        count = self._planes * blocks
        descriptors = np.zeros((count, 3), np.uint64)
        descriptors[:, 0] = address + np.arange(count, dtype=np.uint64) * np.uint64(page_bytes)
        descriptors[:, 1] = page_bytes
        return self._nixl.prep_xfer_dlist(agent, self._nixl.get_xfer_descs(descriptors, "DRAM"))

    @property
    def _planes(self) -> int:
        return int(np.prod(self._pages.data.shape[:2]))

    def _indices(self, blocks: tuple[int, ...]) -> Any:
        planes = np.arange(self._planes, dtype=np.int32) * np.int32(self._pages.blocks)
        return (planes[:, None] + np.asarray(blocks, np.int32)).reshape(-1)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = sock.recv(count, socket.MSG_WAITALL)
    if len(data) != count:
        raise Bug(f"the other NIXL agent sent {len(data)} of {count} bytes of its introduction")
    return data


class RawNixlInstance(BareInstance):
    """A bare instance with NIXL alone; while a hand-off is live it polls without a pause."""

    driver: RawNixlAgents

    def open_driver(self, settings: BareSettings, pages: TaggedPages, news: Callable[[], None]) -> RawNixlAgents:
        del settings, news
        return RawNixlAgents(pages)

    def work(self) -> bool:
        more = super().work()
        return more or self.driver.has_live


class RawNixlProcess(BareProcess):
    """Such an instance in a process of its own."""

    program = ("-m", "kvbaton.bench.bare.raw_nixl")


def main() -> None:
    """The process of such an instance."""
    run_child(RawNixlInstance, BareSettings)


if __name__ == "__main__":
    main()
