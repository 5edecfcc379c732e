"""How the workers of one vLLM instance reach each other: two channels from every other rank to the first one.

One channel carries the orders of the coordinator, which runs in the worker of rank 0, to a rank's agent, and its reports. The
other one carries what has to be the same on all ranks in a step. The first rank sends when blocks that a forward may overwrite
are drained, and which requests have finished; the others send which layers they have computed, and that they have reached a
step that gives blocks to a target. The first rank never waits for
another one: in a pipeline a later stage begins a step only when the first one has computed it.

The sockets are in Linux's abstract namespace, and taken only from processes of the same user on the same host.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from kvbaton.agent.channel import Channel, ChannelClosed, ChannelStuck
from kvbaton.core.handoff import Incarnation
from kvbaton.core.topology import Shape
from kvbaton.errors import ConfigError

__all__ = [
    "FirstRankLinks",
    "LayersDone",
    "OneRank",
    "RankExchange",
    "RankLinks",
    "StepCleared",
    "StepEnded",
    "StepReached",
]

log = logging.getLogger(__name__)

T = TypeVar("T")

_CONNECT_S = 120.0
_SEND_S = 10.0
_TURN_S = 1.0
_INTRODUCTION = struct.Struct("<II")
_CREDENTIALS = struct.Struct("iII")
_AGENT, _STEPS = 0, 1
_FIRST = "the first rank"


class RankExchange(Protocol):
    """Lets all ranks of an instance exchange values while they start; every rank calls `gather` equally often."""

    rank: int
    shape: Shape

    def gather(self, value: T) -> list[T]:
        """The value of each rank, in the order of rank numbers."""


class OneRank:
    """The exchange of an instance that is not cut."""

    rank = 0
    shape = Shape()

    def gather(self, value: T) -> list[T]:
        return [value]


class LayersDone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank to the first one: these layers of a step are in its cache."""

    step: int
    layers: tuple[int, ...]


class StepReached(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank to the first one: it begins this step, which gives blocks to a target."""

    rank: int
    step: int


class StepCleared(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first rank to the others: what was retracted before this step is drained, its blocks may be overwritten."""

    step: int


class StepEnded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first rank to the others: what to report to vLLM after a step."""

    step: int
    sending: frozenset[str]
    receiving: frozenset[str]
    failed: frozenset[str]


_decode: Callable[[bytes | bytearray], LayersDone | StepReached | StepCleared | StepEnded] = msgspec.msgpack.Decoder(
    LayersDone | StepReached | StepCleared | StepEnded
).decode


def _name(incarnation: Incarnation) -> str:
    return f"\0kvbaton.{incarnation}"


class FirstRankLinks:
    """The ends of rank 0: listens from the start, `accept` waits for all others. `close` is idempotent."""

    def __init__(self, incarnation: Incarnation, shape: Shape) -> None:
        self._shape = shape
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(_name(incarnation))
        self._listener.listen(2 * shape.ranks)
        self.agents: dict[int, Channel] = {}
        self._steps: dict[int, Channel] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def accept(self) -> None:
        """Wait until every other rank has connected. Raises ConfigError."""
        until = time.monotonic() + _CONNECT_S
        others = self._shape.ranks - 1
        while len(self.agents) < others or len(self._steps) < others:
            self._listener.settimeout(max(0.0, until - time.monotonic()))
            try:
                connected, _ = self._listener.accept()
            except TimeoutError:
                raise ConfigError(
                    f"{len(self.agents)} of {others} other ranks have connected to {_FIRST} in {_CONNECT_S:g} s; their logs"
                    " have the reason"
                ) from None
            self._take(connected)
        self._listener.close()

    def _take(self, connected: socket.socket) -> None:
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
            connected.close()
            return
        connected.settimeout(_SEND_S)
        rank, kind = _INTRODUCTION.unpack(connected.recv(_INTRODUCTION.size, socket.MSG_WAITALL))
        at = self._shape.at(rank)
        channel = Channel(connected, f"pp rank {at.pp}, tp rank {at.tp}")
        (self.agents if kind == _AGENT else self._steps)[rank] = channel

    def start(self, take: Callable[[LayersDone | StepReached], None]) -> None:
        """Read what the other ranks send; `take` is called from a thread of its own."""
        self._thread = threading.Thread(target=self._read, args=(take,), name="kvbaton-steps", daemon=True)
        self._thread.start()

    def send(self, message: StepCleared | StepEnded) -> None:
        """Send to every other rank. One that is gone is logged: vLLM ends an instance that has lost a worker."""
        frame = msgspec.msgpack.encode(message)
        for channel in self._steps.values():
            try:
                channel.send(frame, _SEND_S)
            except (ChannelClosed, ChannelStuck) as error:
                log.error("a step's end was not delivered: %s", error)

    def _read(self, take: Callable[[LayersDone | StepReached], None]) -> None:
        poll = select.poll()
        channels = {channel.fileno(): channel for channel in self._steps.values()}
        for number in channels:
            poll.register(number, select.POLLIN)
        while channels and not self._stopping.is_set():
            for number, _ in poll.poll(_TURN_S * 1000):
                try:
                    self._take_frame(channels[number], take)
                except (ChannelClosed, ChannelStuck) as error:
                    if not self._stopping.is_set():
                        log.error("a rank does not report its layers any more: %s", error)
                    poll.unregister(number)
                    del channels[number]

    def _take_frame(self, channel: Channel, take: Callable[[LayersDone | StepReached], None]) -> bool:
        """Take the next message of a rank, if one has arrived; whether there was one. Raises ChannelClosed or ChannelStuck."""
        frame = channel.receive(0.0)
        message = None if frame is None else _decode(frame)
        if isinstance(message, LayersDone | StepReached):
            take(message)
        return frame is not None

    def close(self) -> None:
        """Close every end; the other ranks notice."""
        self._stopping.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(2 * _TURN_S)
        for channel in (*self._steps.values(), *self.agents.values()):
            channel.close()
        self._listener.close()


class RankLinks:
    """The ends of another rank. `agent` is for its rank agent, `receive` belongs to the worker's thread."""

    def __init__(self, incarnation: Incarnation, rank: int) -> None:
        self.rank = rank
        self.agent, self._steps = (Channel(_connect(incarnation, rank, kind), _FIRST) for kind in (_AGENT, _STEPS))
        self._sending = threading.Lock()
        self._is_lost = False

    def send(self, message: LayersDone | StepReached) -> None:
        """Send to the first rank. Safe to call from any thread: computed layers are reported by the one that waits for them."""
        try:
            with self._sending:
                self._steps.send(msgspec.msgpack.encode(message), _SEND_S)
        except (ChannelClosed, ChannelStuck) as error:
            self._lose(error)

    def receive(self, timeout_s: float) -> StepCleared | StepEnded | None:
        """The next message; None when there is none in that time, and when the first rank is gone."""
        try:
            frame = None if self._is_lost else self._steps.receive(timeout_s)
        except (ChannelClosed, ChannelStuck) as error:
            self._lose(error)
            return None
        message: Any = None if frame is None else _decode(frame)
        return message if isinstance(message, StepCleared | StepEnded) else None

    @property
    def is_lost(self) -> bool:
        """Whether the first rank is gone."""
        return self._is_lost

    def close(self) -> None:
        """Close this rank's ends."""
        self._steps.close()
        self.agent.close()

    def _lose(self, error: Exception) -> None:
        if not self._is_lost:
            self._is_lost = True
            log.error("this rank has lost the first one: %s", error)


def _connect(incarnation: Incarnation, rank: int, kind: int) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX)
    connected.settimeout(_CONNECT_S)
    try:
        connected.connect(_name(incarnation))
        connected.sendall(_INTRODUCTION.pack(rank, kind))
    except OSError as error:
        connected.close()
        raise ConfigError(f"rank {rank} cannot reach {_FIRST} of its instance: {error}") from error
    return connected


def check_one_host(hosts: Sequence[str]) -> None:
    """Raise ConfigError for ranks on several hosts."""
    others = sorted(set(hosts))
    if len(others) > 1:
        raise ConfigError(f"the ranks of this instance are on the hosts {', '.join(others)}; one host is possible so far")
