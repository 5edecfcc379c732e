"""What the wire benchmark measures: our transports, and what a user would pick instead. Each moves one batch at a time."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np

from kvbaton.bench.wire.pages import Bytes, content, stream_places
from kvbaton.compat.mori import io as mori
from kvbaton.core.card import Endpoint
from kvbaton.core.handoff import Incarnation
from kvbaton.errors import ConfigError, PeerLost
from kvbaton.transport.base import Batch, Direction, PeerRank, Runs, TransportSettings
from kvbaton.transport.choose import open_entry
from kvbaton.transport.runs import compile_c
from kvbaton.transport.source_process import SourceProcess
from kvbaton.transport.table import TransportEntry, TransportVariant, load, transport_entries

__all__ = [
    "RAW",
    "STREAM_ASK",
    "PeerProcess",
    "RawPeer",
    "SingleBlocks",
    "WRITER",
    "WireSubject",
    "all_subjects",
    "beside_of",
    "can_write",
    "open_mori_engine",
    "open_subject",
    "our_subjects",
]

_END_S = 10.0
_TIMEOUT_S = 120.0
_OWN_SEED = 77
_MOONCAKE_RUNS = 1024


_COPY_LOOP = """
#include <stdint.h>
#include <string.h>
void copy_runs(char *target, const char *source, const uint64_t *runs, long count) {
    for (long i = 0; i < count; i++) memcpy(target + runs[3 * i + 1], source + runs[3 * i], runs[3 * i + 2]);
}
"""


STREAM_ASK = struct.Struct("<QQ")
"""What the plain socket is asked for: where in the region, and how many bytes."""

WRITER = PeerRank(Incarnation("writer"))
"""The side that writes, as its peers know it."""


class PeerProcess:
    """The other side of a subject, in a process of its own: what is read from, or written to.

    `content` is what it has to be read; `memory` is what it has to be written to, which this process maps too.
    """

    def __init__(self, kind: str, region_bytes: int, seed: int, direction: Direction) -> None:
        command = [sys.executable, "-m", "kvbaton.bench.wire.peer", kind, str(region_bytes), str(seed)]
        reads = direction is Direction.READ
        if kind in our_subjects():
            our_subjects()[kind][1].tls()  # made here, where they are needed, so that both processes have the same
        self.content = content(seed, region_bytes) if reads else np.empty(0, np.uint8)
        self.memory = np.empty(0, np.uint8)
        files: tuple[int, ...] = () if reads else (os.memfd_create("kvbaton-wire-peer"),)
        try:
            for fd in files:
                os.ftruncate(fd, region_bytes)
                self.memory = np.frombuffer(mmap.mmap(fd, region_bytes), np.uint8)
            self._process = SourceProcess([*command, *map(str, files)], _END_S, files)
        finally:
            for fd in files:
                os.close(fd)
        self.pid = self._process.pid
        self.close = self._process.close

    def connect(self, writer: Endpoint) -> None:
        """Have it connect the side that writes to it. Raises ConfigError when it ended first."""
        try:
            self._process.ask(msgspec.json.encode(writer).decode(), _TIMEOUT_S)
        except PeerLost as error:
            raise ConfigError(str(error)) from error

    def description(self) -> bytes:
        """The line in which it describes how it is reached. Raises ConfigError when it ended first."""
        try:
            return self._process.line(_TIMEOUT_S)
        except PeerLost as error:
            raise ConfigError(str(error)) from error


class WireSubject(Protocol):
    """One method to move runs between `memory` here and that of peers; `move` returns when every byte is where it belongs."""

    memory: Bytes

    def move(self, batches: list[Runs]) -> float:
        """Move one batch from, or to, each peer; returns the seconds for which posting them held the caller."""

    def close(self) -> None:
        """Give everything back."""


class _Ours:
    """One of our transports, over the memory of its variant."""

    def __init__(self, name: str, region_bytes: int, peers: list[PeerProcess], direction: Direction) -> None:
        entry, variant = our_subjects()[name]
        region, self.memory = load(variant.memory)(np.zeros(region_bytes, np.uint8))
        self._direction = direction
        writes = direction is Direction.WRITE
        incarnation = WRITER.incarnation if writes else None
        settings = TransportSettings(incarnation=incarnation, tls=variant.tls(), **entry.writing(writes))
        self._transport = open_entry(entry, region, settings)
        self._peers = [PeerRank(Incarnation(f"peer{number}")) for number in range(len(peers))]
        for peer, process in zip(self._peers, peers, strict=True):
            self._transport.connect(peer, msgspec.json.decode(process.description(), type=Endpoint))
            if writes:
                process.connect(self._transport.endpoint())

    def move(self, batches: list[Runs]) -> float:
        started = time.perf_counter()
        waiting = {
            self._transport.post(Batch(peer, self._direction, runs)) for peer, runs in zip(self._peers, batches, strict=True)
        }
        posted = time.perf_counter() - started
        while waiting:
            if not select.select([self._transport.wakeup_fd], [], [], _TIMEOUT_S)[0]:
                raise ConfigError(f"{self._transport.name}: no completion within {_TIMEOUT_S:g} s")
            for completion in self._transport.poll():
                if completion.error:
                    raise ConfigError(f"{self._transport.name}: {completion.error}")
                waiting.discard(completion.ticket)
        return posted

    def close(self) -> None:
        self._transport.close()


class _Memcpy:
    """A C loop of `memcpy` in one process."""

    def __init__(self, _name: str, region_bytes: int, peers: list[PeerProcess], _direction: Direction) -> None:
        self.memory = np.empty(region_bytes, np.uint8)
        self._sources = [peer.content for peer in peers]
        self._loop = self._compile()

    def _compile(self) -> Any:
        with tempfile.TemporaryDirectory(prefix="kvbaton-wire-") as folder:
            code, library = Path(folder) / "loop.c", Path(folder) / "loop.so"
            code.write_text(_COPY_LOOP)
            try:
                compile_c([code], library, "-O2", "-shared", "-fPIC")
            except (OSError, subprocess.SubprocessError) as error:
                raise ConfigError(f"the memcpy loop does not compile ({error}); install a C compiler (cc)") from error
            loop = ctypes.CDLL(str(library)).copy_runs
        loop.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
        loop.restype = None
        return loop

    def move(self, batches: list[Runs]) -> float:
        for source, runs in zip(self._sources, batches, strict=True):
            self._loop(self.memory.ctypes.data, source.ctypes.data, runs.ctypes.data, len(runs))
        return 0.0

    def close(self) -> None:
        pass


class _Socket:
    """Streams as many bytes, from one buffer into one buffer: what a socket can do at most. Its bytes are not scattered."""

    def __init__(self, _name: str, region_bytes: int, peers: list[PeerProcess], _direction: Direction) -> None:
        self.memory = np.empty(region_bytes, np.uint8)
        ports = [msgspec.json.decode(peer.description(), type=dict[str, int])["port"] for peer in peers]
        self._socks = [socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) for port in ports]

    def move(self, batches: list[Runs]) -> float:
        for sock, runs in zip(self._socks, batches, strict=True):
            source, at = stream_places(runs)
            requested = int(runs[:, 2].sum())
            sock.sendall(STREAM_ASK.pack(source, requested))
            end = at + requested
            while at < end:
                count = sock.recv_into(self.memory.data[at:end])
                if not count:
                    raise ConfigError("the source of the plain socket has ended; its errors are above")
                at += count
        return 0.0

    def close(self) -> None:
        for sock in self._socks:
            sock.close()


class _RawNixl:
    """NIXL as its own examples use it: a list of descriptors per batch, posted and polled by the caller."""

    def __init__(self, name: str, region_bytes: int, peers: list[PeerProcess], direction: Direction) -> None:
        try:
            api: Any = importlib.import_module("nixl._api")
        except ImportError as error:
            raise ConfigError(f"{name} needs the package nixl ({error}): pip install torch, then nixl") from error
        self.memory = np.empty(region_bytes, np.uint8)
        self._reads = direction is Direction.READ
        config = api.nixl_agent_config(enable_prog_thread=name.endswith("thread"), backends=["UCX"])
        self._agent = api.nixl_agent("here " + name, config)
        self._agent.register_memory([(self.memory.ctypes.data, region_bytes, 0, "")], "DRAM")
        self._peers: list[tuple[str, int]] = []
        for peer in peers:
            described = msgspec.json.decode(peer.description(), type=dict[str, str | int])
            self._peers.append(
                (self._agent.add_remote_agent(bytes.fromhex(str(described["metadata"]))), int(described["address"]))
            )

    def move(self, batches: list[Runs]) -> float:
        started = time.perf_counter()
        handles = [self._post(peer, address, runs) for (peer, address), runs in zip(self._peers, batches, strict=True)]
        posted = time.perf_counter() - started
        for handle in handles:
            while (state := self._agent.check_xfer_state(handle)) == "PROC":
                pass
            self._agent.release_xfer_handle(handle)
            if state != "DONE":
                raise ConfigError(f"raw NIXL: {state}")
        return posted

    def _post(self, peer: str, address: int, runs: Runs) -> Any:
        sides = []
        own = 1 if self._reads else 0
        for column, start in ((own, int(self.memory.ctypes.data)), (1 - own, address)):
            side = np.zeros((len(runs), 3), np.uint64)
            side[:, 0], side[:, 1] = runs[:, column] + np.uint64(start), runs[:, 2]
            sides.append(self._agent.get_xfer_descs(side, "DRAM"))
        handle = self._agent.initialize_xfer("READ" if self._reads else "WRITE", *sides, peer)
        self._agent.transfer(handle)
        return handle

    def close(self) -> None:
        del self._agent


class _RawMooncake:
    """Mooncake as its own documentation uses it: one call per batch that waits, of as many blocks as its queue takes."""

    def __init__(self, _name: str, region_bytes: int, peers: list[PeerProcess], direction: Direction) -> None:
        try:
            api: Any = importlib.import_module("mooncake.engine")
        except (ImportError, OSError) as error:
            raise ConfigError(f"raw mooncake needs the package mooncake-transfer-engine ({error})") from error
        self.memory = np.empty(region_bytes, np.uint8)
        self._reads = direction is Direction.READ
        self._engine = api.TransferEngine()
        self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        self._engine.register_memory(self.memory.ctypes.data, region_bytes)
        described = [msgspec.json.decode(peer.description(), type=dict[str, str | int]) for peer in peers]
        self._peers = [(str(each["engine"]), int(each["address"])) for each in described]

    def move(self, batches: list[Runs]) -> float:
        for (peer, address), runs in zip(self._peers, batches, strict=True):
            offsets = runs if self._reads else runs[:, (1, 0, 2)]
            places = offsets + np.array([address, self.memory.ctypes.data, 0], np.uint64)
            move = self._engine.batch_transfer_sync_read if self._reads else self._engine.batch_transfer_sync_write
            for first in range(0, len(places), _MOONCAKE_RUNS):
                there, here, sizes = places[first : first + _MOONCAKE_RUNS].T.tolist()
                if move(peer, here, there, sizes):
                    raise ConfigError("raw mooncake: a transfer failed")
        return 0.0

    def close(self) -> None:
        del self._engine


class _MoriIo:
    """The drop-in for MoRI as its users call it: a session, and offsets and sizes per batch."""

    def __init__(self, _name: str, region_bytes: int, peers: list[PeerProcess], direction: Direction) -> None:
        self.memory = np.zeros(region_bytes, np.uint8)
        self._reads = direction is Direction.READ
        self._engine = open_mori_engine("bench")
        own = self._engine.register_memory(self.memory.ctypes.data, region_bytes, -1, mori.MemoryLocationType.CPU)
        self._sessions: list[mori.IOEngineSession] = []
        for peer in peers:
            described = msgspec.json.decode(peer.description(), type=dict[str, str])
            self._engine.register_remote_engine(mori.EngineDesc.unpack(bytes.fromhex(described["engine"])))
            session = self._engine.create_session(own, mori.MemoryDesc.unpack(bytes.fromhex(described["memory"])))
            if session is None:
                raise ConfigError("mori: no session with the peer")
            self._sessions.append(session)

    def move(self, batches: list[Runs]) -> float:
        started = time.perf_counter()
        statuses = []
        for session, runs in zip(self._sessions, batches, strict=True):
            sources, targets, sizes = runs.T  # raw NIXL is given arrays as well
            uid = session.allocate_transfer_uid()
            if self._reads:
                statuses.append(session.batch_read(targets, sources, sizes, uid))
            else:
                statuses.append(session.batch_write(sources, targets, sizes, uid))
        posted = time.perf_counter() - started
        if (code := self._engine.wait_all(statuses, round(_TIMEOUT_S * 1000))) is not mori.StatusCode.SUCCESS:
            raise ConfigError(f"mori: {code}: {'; '.join(status.Message() for status in statuses)}")
        return posted

    def move_one(self, block_bytes: int) -> None:
        session = self._sessions[0]
        move = session.read if self._reads else session.write
        status = move(0, 0, block_bytes, session.allocate_transfer_uid())
        if status.WaitFor(round(_TIMEOUT_S * 1000)) is not mori.StatusCode.SUCCESS:
            raise ConfigError(f"mori: {status.Message()}")

    def close(self) -> None:
        self._sessions.clear()
        del self._engine


def open_mori_engine(key: str) -> mori.IOEngine:
    """An engine of the drop-in on loopback, without notices, as the connectors of vLLM and SGLang have it."""
    engine = mori.IOEngine(f"{key}-{os.getpid()}", mori.IOEngineConfig("127.0.0.1", 0))
    engine.create_backend(mori.BackendType.RDMA, mori.RdmaBackendConfig(enable_notification=False))
    return engine


@runtime_checkable
class SingleBlocks(Protocol):
    """A subject whose users also move blocks one at a time."""

    def move_one(self, block_bytes: int) -> None:
        """Move one block from or to the first peer, and wait until it is there. Raises ConfigError."""


OpenRaw = Callable[[str, int, list[PeerProcess], Direction], WireSubject]


@dataclass(frozen=True, slots=True)
class RawPeer:
    """What a user would pick instead of a transport of ours; `opener` opens this side of it.

    beside:    the subject that it is compared with, if it is ours under another interface
    spins:     keeps a core of each end busy, whatever else is measured, and is therefore measured by itself
    is_stream: moves bytes in order, not blocks to their places
    """

    opener: OpenRaw
    can_write: bool = False
    beside: str = ""
    spins: bool = False
    is_stream: bool = False


RAW: dict[str, RawPeer] = {
    "memcpy": RawPeer(_Memcpy),
    "socket": RawPeer(_Socket, is_stream=True),
    "raw nixl": RawPeer(_RawNixl, can_write=True),
    "raw nixl, its thread": RawPeer(_RawNixl, can_write=True, spins=True),
    "raw mooncake": RawPeer(_RawMooncake, can_write=True),
    "mori": RawPeer(_MoriIo, can_write=True, beside="local, process_vm_readv"),
}
"""The peers of the benchmark, by name."""


def our_subjects() -> dict[str, tuple[TransportEntry, TransportVariant]]:
    """Our transports by the names that they have here, as the table of transports lists them."""
    return {each.subject: (entry, each) for entry in transport_entries() for each in entry.variants if each.subject}


def all_subjects() -> tuple[str, ...]:
    """Everything that can be measured: ours, then the peers."""
    return (*our_subjects(), *RAW)


def beside_of(name: str) -> str:
    """What a subject of ours is compared with; empty for the peers themselves."""
    return RAW[name].beside if name in RAW else our_subjects()[name][1].beside


def can_write(name: str) -> bool:
    """Whether a subject writes into another process. With the others the owner of the target memory copies."""
    return RAW[name].can_write if name in RAW else our_subjects()[name][0].can_write


def open_subject(name: str, region_bytes: int, peers: list[PeerProcess], direction: Direction) -> WireSubject:
    """Open this side of a subject; what is to be written is filled in. Raises ConfigError when it cannot run here."""
    opener: OpenRaw = RAW[name].opener if name in RAW else _Ours
    subject = opener(name, region_bytes, peers, direction)
    if direction is Direction.WRITE:
        subject.memory[:] = content(_OWN_SEED, region_bytes)
    return subject
