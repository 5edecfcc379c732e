"""The control channel over ZeroMQ: one bound port for whoever dials us, one connection per address that we dial.

Answers travel back over the connection that the question came in on, so a source never has to trust an address. Every
socket belongs to the driver's thread. Sends never wait: what does not fit into a queue is dropped and counted, and the
logic asks again.

Frames are sealed with the cluster key if there is one, and only peers that `Trust` admits are dialled or heard. Whoever
sends what we do not take is told so once per frame, sealed with our own key: a peer with another key cannot read that, but
what it cannot read tells it as much. What arrives unreadable over a connection that we dialled, and an address that we must
not dial, are handed out by `refusals`, so that whoever waits for that peer need not wait for a deadline.
"""

from __future__ import annotations

import enum
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator

import zmq

from kvbaton.config import Trust
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.auth import SEAL_BYTES, Seal, Way
from kvbaton.core.handoff import Incarnation
from kvbaton.core.messages import MAX_FRAME_BYTES, Envelope, Message, Refused, decode, encode
from kvbaton.errors import ConfigError, ProtocolError

__all__ = ["FRAMES_PER_TURN", "ControlSockets", "Dropped"]

log = logging.getLogger(__name__)

_MAX_DIALLED = 256
"""Each connection takes two file descriptors, and libzmq ends the process when it finds none left."""

_MAX_ROUTES = 2048
_UNSENT_FRAMES = 10_000
_UNREAD_FRAMES = 256
FRAMES_PER_TURN = 256
"""Frames that are read from one socket before everything else has its turn."""

_MAX_REASON = 1000
_MAX_RECEIVED_BYTES = 4 * MAX_FRAME_BYTES
"""Frames up to here are taken off the wire, so that those that are too large are counted; larger ones end the connection."""


class Dropped(enum.StrEnum):
    """Why a frame was not sent or not taken."""

    NO_ROUTE = "no route"
    NOT_SENT = "not sent"
    NOT_DIALLED = "not dialled"
    WRONG_FRAMES = "wrong number of frames"
    NOT_ALLOWED = "not on the allow-list"
    NOT_AUTHENTICATED = "not authenticated"
    NOT_A_MESSAGE = "not a message"


class ControlSockets:
    """All sockets of one coordinator. Raises ConfigError when `trust` or the system forbids to listen there."""

    def __init__(self, me: Incarnation, host: str, port: int, trust: Trust | None = None) -> None:
        self._me = me
        self._trust = trust or Trust()
        self._trust.check_bind(host)
        self._seal = Seal(self._trust.key)
        self._context = zmq.Context()
        self._bound = self._socket(zmq.ROUTER)
        self._bound.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
        self.address = self._bind(host, port)
        self._dialled: OrderedDict[ControlAddress, zmq.Socket[bytes]] = OrderedDict()
        self._proven: set[ControlAddress] = set()
        self._routes: OrderedDict[Incarnation, bytes | ControlAddress] = OrderedDict()
        self._refusals: dict[ControlAddress, str] = {}
        self._poller: zmq.Poller | None = None
        self._wakeups: list[int] = []
        self.dropped_total: Counter[str] = Counter(dict.fromkeys(Dropped, 0))

    def dial(self, address: ControlAddress, message: Message) -> None:
        """Send to whoever answers at `address`; connects first if need be. Where that is forbidden, `refusals` tells."""
        refusal = self._trust.dial_refusal(address.host)
        if refusal is not None:
            self._drop(Dropped.NOT_DIALLED, refusal)
            self._refuse(address, refusal)
            return
        socket = self._connected(address)
        if socket is not None:
            self._send(socket, [self._sealed("", message, Way.TO_LISTENER)])

    def send(self, peer: Incarnation, message: Message) -> None:
        """Send to a peer over the connection it was last heard on."""
        route = self._routes.get(peer)
        if isinstance(route, bytes):
            self._send(self._bound, [route, self._sealed(peer, message, Way.TO_DIALLER)])
        elif route is not None and (socket := self._connected(route)) is not None:
            self._send(socket, [self._sealed(peer, message, Way.TO_LISTENER)])
        else:
            self.dropped_total[Dropped.NO_ROUTE] += 1

    def wait(self, timeout_s: float, wakeups: list[int]) -> bool:
        """Wait until a frame or one of the file descriptors `wakeups` is ready, at most `timeout_s`; whether anything is."""
        if self._refusals:
            return True
        if self._poller is None or self._wakeups != wakeups:
            self._poller, self._wakeups = zmq.Poller(), wakeups
            for watched in (self._bound, *self._dialled.values(), *wakeups):
                self._poller.register(watched, zmq.POLLIN)
        return bool(self._poller.poll(max(0, math.ceil(timeout_s * 1000))))

    def receive(self) -> Iterator[tuple[Envelope, ControlAddress | None]]:
        """Read what has arrived, a bounded number of frames per socket; what is no message of a peer is dropped and counted."""
        for parts in self._frames(self._bound):
            envelope = self._heard(parts)
            if envelope is not None:
                self._learn_route(envelope.sender, parts[0].bytes)
                yield envelope, None
        for address, socket in list(self._dialled.items()):
            for parts in self._frames(socket):
                envelope = self._answered(address, parts)
                if envelope is not None:
                    self._proven.add(address)
                    self._learn_route(envelope.sender, address)
                    yield envelope, address

    def refusals(self) -> list[tuple[ControlAddress, str]]:
        """Take the addresses that turned out to be no peers of ours since the last call, each with the reason.

        Where no peer of ours ever answered we hang up; else libzmq would connect there again and again, for good.
        """
        refusals = list(self._refusals.items())
        self._refusals.clear()
        for address, _ in refusals:
            if address in self._dialled and address not in self._proven:
                self._hang_up(address)
        return refusals

    def close(self) -> None:
        """Close every socket; unsent frames get a moment to leave. Idempotent."""
        for socket in (self._bound, *self._dialled.values()):
            socket.close(linger=200)
        self._context.term()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _UNSENT_FRAMES)
        socket.setsockopt(zmq.RCVHWM, _UNREAD_FRAMES)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_RECEIVED_BYTES)
        return socket

    def _bind(self, host: str, port: int) -> ControlAddress:
        address = ControlAddress.of(host, port)
        try:
            self._bound.bind(address.zmq_url)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"control port {port} on {host}: {error.strerror}; choose another with --control-port") from error
        return address

    def _connected(self, address: ControlAddress) -> zmq.Socket[bytes] | None:
        """The connection to `address`, made anew if it had to make room; None, and told by `refusals`, if there can be none."""
        try:
            socket = self._dialled.get(address) or self._connect(address)
        except zmq.ZMQError as error:
            self._drop(Dropped.NOT_DIALLED, error.strerror)
            self._refuse(address, f"{address} cannot be dialled: {error.strerror}")
            return None
        self._dialled.move_to_end(address)
        return socket

    def _connect(self, address: ControlAddress) -> zmq.Socket[bytes]:
        if len(self._dialled) >= _MAX_DIALLED:
            self._hang_up(self._least_needed())
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.IPV6, 1 if ":" in address.host else 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            socket.connect(address.zmq_url)
        except zmq.ZMQError:
            socket.close()
            raise
        self._dialled[address] = socket
        self._poller = None
        return socket

    def _least_needed(self) -> ControlAddress:
        """The oldest connection; addresses at which nobody of ours ever answered come first."""
        return next((address for address in self._dialled if address not in self._proven), next(iter(self._dialled)))

    def _hang_up(self, address: ControlAddress) -> None:
        self._proven.discard(address)
        self._poller = None
        self._dialled.pop(address).close(linger=0)

    def _sealed(self, recipient: str, message: Message, way: Way) -> bytes:
        return self._seal.seal(encode(self._me, recipient, message), way)

    def _send(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        try:
            socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._drop(Dropped.NOT_SENT, error.strerror)

    def _frames(self, socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
        for _ in range(FRAMES_PER_TURN):
            if socket.closed:
                return
            try:
                yield socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return

    def _heard(self, parts: list[zmq.Frame]) -> Envelope | None:
        """What somebody who dialled us says; whoever is not understood is told so."""
        if len(parts) != 2:
            self._drop(Dropped.WRONG_FRAMES, f"{len(parts)} frames")
            return None
        speaker = self._speaker(parts[1])
        if not self._trust.accepts_from(speaker):
            reason = f"{speaker or 'your address'} is not on the allow-list here"
            self._drop(Dropped.NOT_ALLOWED, reason)
        else:
            envelope, reason = self._read(parts[1], Way.TO_LISTENER)
            if envelope is not None:
                return envelope
        self._send(self._bound, [parts[0].bytes, self._sealed("", Refused(reason[:_MAX_REASON]), Way.TO_DIALLER)])
        return None

    def _answered(self, address: ControlAddress, parts: list[zmq.Frame]) -> Envelope | None:
        """What the peer that we dialled says; one that is not understood is none."""
        if len(parts) == 1:
            envelope, reason = self._read(parts[0], Way.TO_DIALLER)
        else:
            envelope, reason = None, f"a message of {len(parts)} frames; ours have one"
            self._drop(Dropped.WRONG_FRAMES, f"{len(parts)} frames from {address}")
        if envelope is None:
            self._refuse(address, f"what answers at {address} is no peer of ours: {reason}")
        return envelope

    def _read(self, frame: zmq.Frame, way: Way) -> tuple[Envelope | None, str]:
        """The envelope in a frame, or None and what is wrong with it."""
        cause = Dropped.NOT_A_MESSAGE
        try:
            if len(frame) > MAX_FRAME_BYTES + SEAL_BYTES:
                raise ProtocolError(f"a frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES} are read")
            cause = Dropped.NOT_AUTHENTICATED
            content = self._seal.open(frame.bytes, way)
            cause = Dropped.NOT_A_MESSAGE
            return decode(content), ""
        except ProtocolError as error:
            self._drop(cause, str(error))
            return None, str(error)

    def _speaker(self, frame: zmq.Frame) -> str:
        """From which address a frame came; looked up only where that matters, and empty where it cannot be known."""
        if self._trust.allowed is None:
            return ""
        try:
            return str(frame.get("Peer-Address"))
        except zmq.ZMQError:
            return ""

    def _refuse(self, address: ControlAddress, reason: str) -> None:
        if len(self._refusals) < _MAX_DIALLED:
            self._refusals[address] = reason

    def _learn_route(self, sender: Incarnation, route: bytes | ControlAddress) -> None:
        self._routes[sender] = route
        self._routes.move_to_end(sender)
        while len(self._routes) > _MAX_ROUTES:
            self._routes.popitem(last=False)

    def _drop(self, cause: Dropped, detail: str) -> None:
        self.dropped_total[cause] += 1
        if self.dropped_total[cause].bit_count() == 1:
            log.warning("control channel: dropped (%s, %d so far): %s", cause, self.dropped_total[cause], detail)
