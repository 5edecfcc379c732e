"""Both ends of the tcp transport by hand: transports to test, and sockets that play their peers."""

from __future__ import annotations

import select
import socket
from typing import Any

import numpy as np

from kvbaton.core.handoff import Incarnation
from kvbaton.transport.base import Batch, Completion, Direction, Endpoint, PeerRank, Region, TransportSettings
from kvbaton.transport.tcp import TcpTransport
from kvbaton.transport.tcp.wire import (
    CHALLENGE_BYTES,
    HANDSHAKE_BYTES,
    HELLO_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    REPLY_BYTES,
    Secret,
    Status,
    pack_hello,
    pack_reply,
    unpack_handshake,
    unpack_hello,
    unpack_reply,
)

__all__ = ["CHALLENGE", "CONTENT", "NONCE", "ONE_RUN", "SOURCE", "TOKEN"]
__all__ += ["complete", "dial", "endpoint_of", "shake_hands", "is_closed", "make", "read", "secret_of", "take", "welcome"]

SOURCE = PeerRank(Incarnation("source"))
ONE_RUN = np.array([[0, 0, 16]], np.uint64)
CONTENT = bytes(range(64))
TOKEN = bytes(16)
CHALLENGE, NONCE = b"c" * CHALLENGE_BYTES, b"n" * NONCE_BYTES


def make(incarnation: str, content: bytes = bytes(64), **settings: Any) -> TcpTransport:
    """A transport over a region with `content`."""
    return TcpTransport(Region.of(bytearray(content)), TransportSettings(incarnation=Incarnation(incarnation), **settings))


def read(target: TcpTransport, peer: PeerRank = SOURCE) -> Completion:
    """Read one short run and wait for its completion."""
    target.post(Batch(peer, Direction.READ, ONE_RUN))
    return complete(target)


def complete(target: TcpTransport) -> Completion:
    """The next completion."""
    # Not select(): tests that flood a port have descriptors beyond its 1024.
    waiting = select.poll()
    waiting.register(target.wakeup_fd, select.POLLIN)
    assert waiting.poll(20_000), "no completion came"
    return target.poll()[0]


def dial(endpoint: Endpoint) -> socket.socket:
    """A bare connection to the owner of the memory."""
    return socket.create_connection((str(endpoint.details["host"]), int(endpoint.details["port"])), timeout=20)


def secret_of(endpoint: Endpoint) -> Secret:
    """What a reader knows that was given the endpoint, without a cluster key."""
    return Secret(bytes.fromhex(str(endpoint.details["token"])), b"", str(endpoint.details.get("incarnation", "")))


def shake_hands(sock: socket.socket, endpoint: Endpoint) -> None:
    """Answer the owner's hello as a reader that was given the endpoint."""
    challenge = unpack_hello(take(sock, HELLO_BYTES))
    sock.sendall(secret_of(endpoint).handshake(challenge, NONCE))
    assert unpack_reply(take(sock, REPLY_BYTES)).status is Status.OK
    assert take(sock, PROOF_BYTES) == secret_of(endpoint).owner_proof(challenge, NONCE)


def endpoint_of(listener: socket.socket, region_bytes: int = 64) -> Endpoint:
    """The endpoint of an owner that is played by a socket."""
    host, port = listener.getsockname()[:2]
    return Endpoint("tcp", region_bytes, {"host": host, "port": port, "token": TOKEN.hex()})


def welcome(owner: socket.socket) -> None:
    """Let a reader in as the owner of `endpoint_of`."""
    owner.sendall(pack_hello(CHALLENGE))
    nonce = unpack_handshake(take(owner, HANDSHAKE_BYTES))
    owner.sendall(pack_reply(Status.OK, 0, PROOF_BYTES) + Secret(TOKEN, b"", "").owner_proof(CHALLENGE, nonce))


def take(sock: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes."""
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        assert part, "the connection was closed"
        data += part
    return data


def is_closed(sock: socket.socket) -> bool:
    """Waits until the other end has closed."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True
