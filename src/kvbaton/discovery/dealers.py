"""A connection to one router's discovery port: over libzmq, which real routers expect, or inside TLS, which libzmq lacks.

Neither waits: what cannot be sent now is not sent, and reconnecting is the connection's own business.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Protocol

import zmq

from kvbaton.wire.door import Door, DoorLimits, EndCause, PeerConnection
from kvbaton.wire.lookup import Lookups
from kvbaton.wire.tls import cluster_tls

__all__ = ["MAX_ANSWERS", "Dealer", "TlsDealer", "ZmqDealer"]

MAX_ANSWERS = 16
"""Answers of a router that are kept until they are read."""

_LINGER_MS = 300
_MAX_ANSWER_BYTES = 4096
_RETRY_S = 0.5
_DIAL_WAIT_S = 0.02


class Dealer(Protocol):
    """Sends messages of one frame to one router, and takes its answers."""

    def send(self, frame: bytes) -> bool:
        """Send; False when the router cannot be reached now."""

    def receive(self) -> bytes | None:
        """The next answer; None when there is none."""

    def refusal(self) -> str:
        """Why the router, or this side, has refused the connection since the last call; empty when neither did."""

    def close(self) -> None:
        """Let what was sent leave, for a moment, and close."""


class ZmqDealer:
    """A DEALER socket of libzmq."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], router: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDHWM, 4)
        self._socket.setsockopt(zmq.RCVHWM, MAX_ANSWERS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_ANSWER_BYTES)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.IPV6, int(router.startswith("[")))
        self._socket.connect(f"tcp://{router}")

    def send(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(self) -> bytes | None:
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.ZMQError:
            return None

    def refusal(self) -> str:
        return ""

    def close(self) -> None:
        self._socket.close()


class TlsDealer:
    """The same through a `Door`, inside TLS. Every call moves it on; it has no thread."""

    def __init__(self, router: str, tls_dir: Path) -> None:
        host, _, port = router.rpartition(":")
        self._host, self._port, self._name = host.strip("[]"), int(port), router
        limits = DoorLimits(connections=16, frame_bytes=_MAX_ANSWER_BYTES)
        self._door = Door(limits, self._on_end, on_open=self._on_open, tls=cluster_tls(tls_dir))
        self._lookups = Lookups()
        self._connection: PeerConnection | None = None
        self._retry_at = 0.0
        self._answers: deque[bytes] = deque(maxlen=MAX_ANSWERS)
        self._refusal = ""

    def send(self, frame: bytes) -> bool:
        self._move_on()
        if self._connection is None or not self._connection.is_open:
            return False
        is_sent = self._door.send(self._connection, frame)
        self._door.flush()
        return is_sent

    def receive(self) -> bytes | None:
        self._move_on()
        return self._answers.popleft() if self._answers else None

    def refusal(self) -> str:
        found, self._refusal = self._refusal, ""
        return found

    def close(self) -> None:
        self._door.close(_LINGER_MS / 1000)
        self._lookups.close()

    def _move_on(self) -> None:
        if self._connection is None:
            self._dial()
        # A handshake takes three turns, and turns are a tenth of a second apart.
        is_dialling = self._connection is not None and not self._connection.is_open
        self._door.wait(_DIAL_WAIT_S if is_dialling else 0.0)
        for _, parts in self._door.receive():
            if len(parts) == 1:
                self._answers.append(parts[0])

    def _dial(self) -> None:
        now = time.monotonic()
        found = self._lookups.find(self._host, self._port) if now >= self._retry_at else None
        if found is None:
            return
        self._retry_at = now + _RETRY_S
        if not found.error:
            try:
                self._connection = self._door.dial(found.family, found.address, self._name)
            except OSError:
                return

    def _on_open(self, connection: PeerConnection) -> None:
        """The router has shown its certificate: from now on the connection may last."""
        self._door.admit(connection)

    def _on_end(self, _connection: PeerConnection, cause: EndCause, detail: str) -> None:
        self._connection = None
        if cause in (EndCause.TLS_FAILED, EndCause.REFUSED, EndCause.NOT_ZMTP):
            self._refusal = detail
