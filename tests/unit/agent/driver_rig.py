"""Instances without an engine: real drivers over real sockets, a transport in one process, and an intruder."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self, TypeVar

import msgspec
import numpy as np
import zmq

from kvbaton.agent.driver import Driver
from kvbaton.agent.engine_port import Allocation, EngineEvent, Granted, Landed, Offer, SourceEnded, SourceRequest, TargetEnded
from kvbaton.agent.ports import NO_STAMPS
from kvbaton.agent.rank_sets import LocalRanks
from kvbaton.agent.sockets import ControlSockets
from kvbaton.agent.stamps import open_stamps
from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings, Limits, Trust
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import Card, RankCard
from kvbaton.core.handoff import Aux, HandoffKey, Incarnation, Mode, TransferId
from kvbaton.core.messages import Envelope, Message, decode, encode
from kvbaton.engines.embedded.cache import PagedCache
from kvbaton.engines.embedded.config import ModelConfig
from kvbaton.launch.ports import PortPicker
from kvbaton.transport.base import Region, Transport, TransportSettings
from kvbaton.transport.faulty import Faults, FaultyTransport
from kvbaton.transport.memory import MemoryHub, MemoryTransport
from kvbaton.transport.mori import MoriTransport
from kvbaton.transport.neighbour import this_process
from mori_stand_in import MoriWorld
from watching import wait_until
from wire_peer import WirePeer

__all__ = [
    "AUX",
    "_PORTS",
    "TOKENS",
    "Intruder",
    "Side",
    "ask",
    "is_equal",
    "is_poison",
    "key_of",
    "landed",
    "pair",
    "start_handoff",
]

TOKENS = 10
_SOURCE_BLOCKS = (1, 5, 2)
_TARGET_BLOCKS = (7, 6, 3)
AUX = Aux(17, -0.25)
_CONFIG = ModelConfig("llama", 2, 8, 1, 1, 8, 8, 100, 64, 1e4, 1e-5, True)
_PORTS = PortPicker()
"""One for all intruders of a run: an instance that lives on remembers who was at a port, and takes the next one for that."""

_ANSWER_MS = 10_000

Event = TypeVar("Event", Granted, Landed, SourceEnded, TargetEnded)


def key_of(name: str) -> HandoffKey:
    return HandoffKey(TransferId(name))


class Side:
    """One instance. `events` are all that its engine would have got."""

    def __init__(
        self,
        hub: MemoryHub | MoriWorld,
        trust: Trust | None = None,
        faults: Faults | None = None,
        limits: Limits | None = None,
        settings: HandoffSettings = DEFAULT_HANDOFF,
        aux_slots: int = 4,
        *,
        has_stamps: bool = False,
    ) -> None:
        self.incarnation = Incarnation(secrets.token_hex(8))
        self.trust = trust or Trust()
        self.cache = PagedCache(_CONFIG, 8, 4, aux_slots=aux_slots)
        self.events: list[EngineEvent] = []
        self.engine_hangs = False
        self.wakes = 0
        self.sockets = ControlSockets(self.incarnation, "127.0.0.1", PortPicker().pick(), trust)
        region = Region.of(self.cache.memory)
        inner = _open(hub, region, TransportSettings(incarnation=self.incarnation, unfenced_writes=settings.unfenced_writes))
        self.transport = FaultyTransport(inner, region, faults or Faults())
        self.card = self._card()
        limits, unfenced = limits or Limits(), settings.unfenced_writes
        memory = self.cache.layout(), self.transport, limits.transfer_timeout, self.cache.memory
        ranks = LocalRanks(*memory, unfenced_writes=unfenced)
        stamps = open_stamps() if has_stamps else NO_STAMPS
        self.driver = Driver(self.card, ranks, limits, self.sockets, self._take_events, settings, stamps=stamps)

    def __enter__(self) -> Self:
        self.driver.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.close()

    def wait_for(self, kind: type[Event], key: HandoffKey) -> Event:
        """The event of that kind about `key`, once it is there."""
        wait_until(lambda: self._find(kind, key) is not None, f"{kind.__name__} of {key}: {self.events}")
        found = self._find(kind, key)
        assert found is not None
        return found

    def wait_dropped(self, cause: str, count: int) -> None:
        """Wait until at least `count` messages were dropped for `cause`."""
        wait_until(lambda: self.driver.stats().dropped_total[cause] >= count, f"{count} dropped as {cause!r}")

    def _take_events(self) -> None:
        self.wakes += 1
        if not self.engine_hangs:
            self.events += self.driver.events()

    def _find(self, kind: type[Event], key: HandoffKey) -> Event | None:
        return next((event for event in self.events if isinstance(event, kind) and event.key == key), None)

    def _card(self) -> Card:
        rank = RankCard(0, self.cache.layout(), (self.transport.endpoint(),), self.cache.aux_area)
        return Card(self.incarnation, "fake", "f00d", "tp1", (rank,), this_process(), defer_timeout=60.0, transfer_timeout=30.0)


def _open(hub: MemoryHub | MoriWorld, region: Region, settings: TransportSettings) -> Transport:
    if isinstance(hub, MemoryHub):
        return MemoryTransport(region, hub, settings)
    return MoriTransport(region, settings, hub.api())


@contextmanager
def pair(
    source_trust: Trust | None = None,
    target_trust: Trust | None = None,
    faults: Faults | None = None,
    settings: HandoffSettings = DEFAULT_HANDOFF,
) -> Iterator[tuple[Side, Side]]:
    """A source and a target, running; `faults` and `settings` are the target's."""
    hub = MemoryHub()
    with Side(hub, source_trust) as source, Side(hub, target_trust, faults, settings=settings) as target:
        yield source, target


def wanted(address: ControlAddress, name: str, mode: Mode = Mode.PULL) -> SourceRequest:
    return SourceRequest(key_of(name), "prompt", address, mode=mode)


def start_handoff(source: Side, target: Side, name: str, mode: Mode = Mode.PULL) -> None:
    """Both engines do their part: the source has prefilled, the target has blocks full of poison."""
    source.cache.data[:] = np.random.default_rng(len(name)).standard_normal(source.cache.data.shape, np.float32)
    target.cache.poison(range(target.cache.blocks))
    source.driver.expect_target(key_of(name), "prompt")
    offer(source, name)
    ask(target, source.driver.address, name, mode)


def offer(source: Side, name: str) -> None:
    """The source's engine has prefilled."""
    source.driver.offer(Offer(key_of(name), (_SOURCE_BLOCKS,), TOKENS, AUX))


def ask(target: Side, address: ControlAddress, name: str, mode: Mode = Mode.PULL) -> None:
    """The target's engine asks for a cache."""
    target.driver.expect_source(wanted(address, name, mode))
    target.driver.allocated(Allocation(wanted(address, name, mode), (_TARGET_BLOCKS,), TOKENS, 0))


def landed(source: Side, target: Side, name: str, mode: Mode = Mode.PULL) -> Landed:
    """Hand one request off from start to end."""
    start_handoff(source, target, name, mode)
    event = target.wait_for(Landed, key_of(name))
    source.wait_for(SourceEnded, key_of(name))
    return event


def is_equal(source: Side, target: Side) -> bool:
    """Whether the target's blocks hold what the source's do, and nothing but poison beyond the last token."""
    ours, theirs = (
        side.cache.data[:, :, blocks].reshape(2, 2, -1, 8)
        for side, blocks in ((target, list(_TARGET_BLOCKS)), (source, list(_SOURCE_BLOCKS)))
    )
    return bool((ours[:, :, :TOKENS] == theirs[:, :, :TOKENS]).all() and is_poison(ours[:, :, TOKENS:]))


def is_poison(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> bool:
    """Whether nothing was written here."""
    return bool((np.ascontiguousarray(values).view(np.uint8) == 0x4B).all())


def _is_free(address: ControlAddress) -> bool:
    try:
        socket.create_server((address.host, address.handshake)).close()
    except OSError:
        return False
    return True


class Intruder:
    """Sends whatever the test needs, to a bound port or from one; `key` is what it seals with. Without one it uses libzmq."""

    def __init__(self, key: bytes | None = None) -> None:
        self.incarnation = Incarnation("intruder-" + secrets.token_hex(4))
        self._key = key
        self._context = zmq.Context()
        self._caller = b""
        self._dialled: ControlAddress | None = None
        self._listener: socket.socket | None = None
        self._peer: WirePeer | None = None
        self.address = ControlAddress.of("127.0.0.1", _PORTS.pick())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)
        if self._peer is not None:
            self._peer.sock.close()
        if self._listener is not None:
            self._listener.close()

    def dial(self, address: ControlAddress) -> None:
        """Connect to an instance."""
        self._dialled = address
        if self._key is None:
            self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
            self._socket.connect(f"tcp://{address.host}:{address.handshake}")
        else:
            self._peer = WirePeer.dial(address.handshake, self._key)

    def listen(self) -> None:
        """Be dialled."""
        if self._key is None:
            self._socket = self._context.socket(zmq.ROUTER)
            self._socket.bind(f"tcp://{self.address.host}:{self.address.handshake}")
        else:
            self._listener = socket.create_server((self.address.host, self.address.handshake))
            self._listener.settimeout(_ANSWER_MS / 1000)

    def hang_up(self) -> None:
        """Close the connection, as a process does that ends, and listen again; `receive` takes the next one."""
        if self._key is None:
            self._socket.close(linger=0)
            wait_until(lambda: _is_free(self.address), "the port is free")
            self.listen()
        elif self._peer is not None:
            self._peer.sock.close()
            self._peer = None

    def send(self, *frames: bytes) -> None:
        """Send frames as they are; with a key, without a seal and over a connection of their own: each costs one."""
        if self._key is None:
            self._socket.send_multipart([self._caller, *frames] if self._caller else list(frames))
        else:
            assert self._dialled is not None
            with WirePeer.dial(self._dialled.handshake, self._key) as peer:
                with contextlib.suppress(ConnectionError):
                    peer.send_frame(*frames)
                assert peer.is_ended()

    def send_sealed(self, content: bytes) -> None:
        """Send one frame as a holder of the key does."""
        if self._key is None:
            self.send(content)
        else:
            self._connected().send(content)

    def send_message(self, message: Message, recipient: str = "", sender: str | None = None) -> None:
        """Send a well-formed message."""
        self.send_sealed(encode(Incarnation(sender or self.incarnation), recipient, message))

    def receive(self) -> bytes:
        """The next frame; its sender is answered from now on."""
        if self._key is not None:
            return self._connected().receive()
        assert self._socket.poll(_ANSWER_MS), "nothing was sent"
        *caller, frame = self._socket.recv_multipart()
        self._caller = caller[0] if caller else b""
        return frame

    def receive_message(self, kind: type[Message]) -> Envelope:
        """The next message of that kind."""
        give_up_at = time.monotonic() + _ANSWER_MS / 1000
        while time.monotonic() < give_up_at:
            envelope = decode(self.receive())
            if isinstance(envelope.message, kind):
                return envelope
        raise AssertionError(f"no {kind.__name__}")

    def _connected(self) -> WirePeer:
        if self._peer is None:
            assert self._listener is not None
            self._peer = WirePeer(self._listener.accept()[0], self._key, is_listener=True)
            self._peer.sock.settimeout(_ANSWER_MS / 1000)
            self._peer.shake_hands()
        return self._peer

    def card_like(self, card: Card) -> Card:
        """A card that fits, in the intruder's name."""
        (rank,), replace = card.ranks, msgspec.structs.replace
        (endpoint,) = rank.endpoints
        endpoint = replace(endpoint, details={**endpoint.details, "incarnation": self.incarnation})
        return replace(card, incarnation=self.incarnation, ranks=(replace(rank, endpoints=(endpoint,)),))
