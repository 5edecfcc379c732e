"""A million frames that are wrong, or were sent before, leave an engine serving."""

from __future__ import annotations

import random
import secrets
import socket
import threading
from collections.abc import Callable

import numpy as np
import pytest
from mori_peer import MoriPeer, mori_peer

from kvbaton.compat.mori.io import BackendType, EngineDesc, IOEngine, IOEngineConfig, MemoryDesc, MemoryLocationType, StatusCode
from kvbaton.transport.exchange.base import MemoryHandle
from kvbaton.transport.exchange.wire import (
    ANSWER_BYTES,
    CALL_BYTES,
    CallKind,
    CallOutcome,
    MemoryCall,
    pack_call,
    unpack_answer,
)

_LIMIT_S = 30.0
_PER_CONNECTION = 4096


def _send(port: int, frames: bytes) -> None:
    """Send frames to the port, and drop the connection; what the peer thinks of them is its own matter."""
    with socket.create_connection(("127.0.0.1", port), timeout=_LIMIT_S) as sock:
        try:
            sock.sendall(frames)
        except OSError:
            return


def _admitted(engine: IOEngine, peer: MoriPeer) -> socket.socket:
    endpoint = EngineDesc.unpack(peer.engine_desc).endpoint
    assert endpoint is not None
    sock = engine.link(endpoint).sock
    sock.setblocking(True)
    sock.settimeout(_LIMIT_S)
    return sock


def _take(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        assert part
        data += part
    return data


def _frames(draw: random.Random, count: int, memory: MemoryDesc) -> bytes:
    """Calls of every kind whose fields are out of range, and noise of the same length."""
    made = []
    assert memory.handle is not None
    for number in range(count):
        kind = draw.choice(list(CallKind))
        runs = np.array([[draw.getrandbits(64), draw.getrandbits(64), draw.getrandbits(64)]], np.uint64)
        handle = memory.handle if draw.random() < 0.5 else MemoryHandle(draw.getrandbits(32), draw.getrandbits(64), 0)
        call = MemoryCall(kind, number + 1, draw.getrandbits(64), 0, 0, handle.slot, handle.stamp, 1, draw.getrandbits(64))
        gpu = draw.randbytes(draw.randrange(200)) if draw.random() < 0.1 else b""
        made.append(pack_call(call, runs, gpu) if draw.random() < 0.5 else draw.randbytes(CALL_BYTES))
    return b"".join(made)


@pytest.mark.sampled(1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("total", [20_000, pytest.param(1_000_000, marks=pytest.mark.e2e)], ids=["sample", "a million"])
def test_an_engine_serves_on_through_malformed_and_repeated_frames(total: int) -> None:
    draw = random.Random(7)
    with mori_peer("flooded") as peer:
        memory = MemoryDesc.unpack(peer.register(4096, 3))
        desc = EngineDesc.unpack(peer.engine_desc)
        recorded: list[bytes] = []
        answered: list[int] = []

        def unknown(frames: bytes) -> None:
            _send(desc.port, frames)

        def admitted(frames: bytes) -> None:
            engine = _engine(desc)
            sock = _admitted(engine, peer)
            try:
                sock.sendall(frames)
            except OSError:
                return

        def refused(frames: bytes) -> None:
            """Calls that are well-formed, for memories that do not exist: each is looked at and answered."""
            del frames
            engine = _engine(desc)  # a connection ends with its engine
            sock = _admitted(engine, peer)
            calls = [
                MemoryCall(CallKind.FETCH, number + 1, None, 0, 0, draw.getrandbits(32), draw.getrandbits(64), 1, 64)
                for number in range(_PER_CONNECTION)
            ]
            run = np.array([[0, 0, 64]], np.uint64)
            thread = threading.Thread(target=sock.sendall, args=(b"".join(pack_call(call, run) for call in calls),))
            thread.start()
            for call in calls:
                answer = unpack_answer(_take(sock, ANSWER_BYTES))
                assert (answer.number, answer.outcome) == (call.number, CallOutcome.RANGE)
                _take(sock, answer.payload_bytes)
            thread.join(_LIMIT_S)
            answered.append(len(calls))

        def repeated(frames: bytes) -> None:
            del frames
            _send(desc.port, recorded[0])

        recorded.append(_recorded_connection(desc))
        senders: list[Callable[[bytes], None]] = [unknown, admitted, refused, repeated]
        sent = 0
        while sent < total:
            frames = _frames(draw, _PER_CONNECTION, memory)
            threads = [threading.Thread(target=sender, args=(frames,)) for sender in senders]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(_LIMIT_S)
                assert not thread.is_alive()
            sent += _PER_CONNECTION * len(senders)
        assert sum(answered) * len(senders) == sent
        assert peer.content(0) == bytes([3]) * 4096
        _check_serving(peer, desc, memory)
        assert peer.ask("stats")["garbage_total"] > 0


def _engine(desc: EngineDesc) -> IOEngine:
    engine = IOEngine(f"sender-{secrets.token_hex(4)}", IOEngineConfig("127.0.0.1", 0))
    engine.create_backend(BackendType.RDMA)
    engine.register_remote_engine(desc)
    return engine


def _recorded_connection(desc: EngineDesc) -> bytes:
    """What an initiator sends to the engine, recorded on the way: handshake, introduction and a write that succeeds."""
    assert desc.endpoint is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        record: list[bytes] = []

        def relay() -> None:
            here, _ = listener.accept()
            there = socket.create_connection(("127.0.0.1", desc.port), timeout=_LIMIT_S)

            def back() -> None:
                while data := there.recv(65536):
                    here.sendall(data)

            threading.Thread(target=back, daemon=True).start()
            while data := here.recv(65536):
                record.append(data)
                there.sendall(data)
            there.shutdown(socket.SHUT_RDWR)

        thread = threading.Thread(target=relay)
        thread.start()
        details = {**desc.endpoint.details, "port": listener.getsockname()[1]}
        engine = _engine(desc)
        channel = engine.link(type(desc.endpoint)("exchange", 0, details))
        channel.fail("recorded")
        thread.join(_LIMIT_S)
    assert record
    return b"".join(record)


def _check_serving(peer: MoriPeer, desc: EngineDesc, memory: MemoryDesc) -> None:
    engine, mine = _engine(desc), np.full(4096, 9, np.uint8)
    own = engine.register_memory(mine.ctypes.data, 4096, -1, MemoryLocationType.CPU)
    status = engine.write(own, 0, memory, 0, 4096, 1)
    assert status.WaitFor(30_000) is StatusCode.SUCCESS
    assert peer.content(0) == bytes([9]) * 4096
