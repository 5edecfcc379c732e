"""The control channel over ZeroMQ: one bound port for whoever dials us, one connection per address that we dial.

Answers travel back over the connection that the question came in on, so a source never has to trust an address. Every
socket belongs to the driver's thread. Sends never wait: what does not fit into a queue is dropped and counted, and the
logic asks again.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator

import zmq

from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Incarnation
from kvbaton.core.messages import MAX_FRAME_BYTES, Envelope, Message, decode, encode
from kvbaton.errors import ConfigError, ProtocolError

__all__ = ["ControlSockets"]

log = logging.getLogger(__name__)

_MAX_DIALLED = 1024
_QUEUE_FRAMES = 10_000
_FRAMES_PER_TURN = 256


class ControlSockets:
    """All sockets of one coordinator."""

    def __init__(self, me: Incarnation, host: str, port: int) -> None:
        self._me = me
        self._context = zmq.Context()
        self._bound = self._socket(zmq.ROUTER)
        self._bound.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
        self.address = self._bind(host, port)
        self._dialled: OrderedDict[ControlAddress, zmq.Socket[bytes]] = OrderedDict()
        self._routes: OrderedDict[Incarnation, bytes | ControlAddress] = OrderedDict()
        self.dropped_total: Counter[str] = Counter()

    def dial(self, address: ControlAddress, message: Message) -> None:
        """Send to whoever answers at `address`; connects first if need be."""
        socket = self._dialled.get(address)
        if socket is None:
            socket = self._connect(address)
        self._dialled.move_to_end(address)
        self._send(socket, [encode(self._me, "", message)])

    def send(self, peer: Incarnation, message: Message) -> None:
        """Send to a peer over the connection it was last heard on."""
        route = self._routes.get(peer)
        frame = encode(self._me, peer, message)
        if isinstance(route, bytes):
            self._send(self._bound, [route, frame])
        elif route is not None and route in self._dialled:
            self._send(self._dialled[route], [frame])
        else:
            self.dropped_total["no route"] += 1

    def wait(self, timeout_s: float, wakeups: list[int]) -> bool:
        """Wait until a frame or one of the file descriptors `wakeups` is ready, at most `timeout_s`; whether anything is."""
        poller = zmq.Poller()
        for socket in (self._bound, *self._dialled.values()):
            poller.register(socket, zmq.POLLIN)
        for descriptor in wakeups:
            poller.register(descriptor, zmq.POLLIN)
        return bool(poller.poll(max(0, math.ceil(timeout_s * 1000))))

    def receive(self) -> Iterator[tuple[Envelope, ControlAddress | None]]:
        """Read what has arrived, a bounded number of frames per socket; what is no message of ours is dropped and counted."""
        for parts in self._frames(self._bound):
            if len(parts) != 2:
                self._drop("wrong number of frames", f"{len(parts)} frames")
            elif (envelope := self._decode(parts[1])) is not None:
                self._learn_route(envelope.sender, parts[0])
                yield envelope, None
        for address, socket in list(self._dialled.items()):
            for parts in self._frames(socket):
                if len(parts) != 1:
                    self._drop("wrong number of frames", f"{len(parts)} frames from {address}")
                elif (envelope := self._decode(parts[0])) is not None:
                    self._learn_route(envelope.sender, address)
                    yield envelope, address

    def close(self) -> None:
        """Close every socket; unsent frames get a moment to leave."""
        for socket in (self._bound, *self._dialled.values()):
            socket.close(linger=200)
        self._context.term()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _QUEUE_FRAMES)
        socket.setsockopt(zmq.RCVHWM, _QUEUE_FRAMES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        return socket

    def _bind(self, host: str, port: int) -> ControlAddress:
        address = ControlAddress.of(host, port)
        try:
            self._bound.bind(address.zmq_url)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"control port {port} on {host}: {error.strerror}; choose another with --control-port") from error
        return address

    def _connect(self, address: ControlAddress) -> zmq.Socket[bytes]:
        if len(self._dialled) >= _MAX_DIALLED:
            _, oldest = self._dialled.popitem(last=False)
            oldest.close(linger=0)
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.IPV6, 1 if ":" in address.host else 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.connect(address.zmq_url)
        self._dialled[address] = socket
        return socket

    def _send(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        try:
            socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._drop("not sent", error.strerror)

    def _frames(self, socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
        for _ in range(_FRAMES_PER_TURN):
            try:
                yield socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return

    def _decode(self, frame: bytes) -> Envelope | None:
        try:
            return decode(frame)
        except ProtocolError as error:
            self._drop("not a message", str(error))
            return None

    def _learn_route(self, sender: Incarnation, route: bytes | ControlAddress) -> None:
        self._routes[sender] = route
        self._routes.move_to_end(sender)
        while len(self._routes) > 2 * _MAX_DIALLED:
            self._routes.popitem(last=False)

    def _drop(self, cause: str, detail: str) -> None:
        self.dropped_total[cause] += 1
        if self.dropped_total[cause].bit_count() == 1:
            log.warning("control channel: dropped (%s, %d so far): %s", cause, self.dropped_total[cause], detail)
