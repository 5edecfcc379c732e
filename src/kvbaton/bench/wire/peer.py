"""The other side of one subject of the wire benchmark, as a process of its own: hands its region out until stdin ends."""

from __future__ import annotations

import functools
import importlib
import mmap
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from kvbaton.bench.wire.pages import Bytes, content
from kvbaton.bench.wire.subjects import STREAM_ASK, WRITER, open_mori_engine, our_subjects
from kvbaton.compat.mori import io as mori
from kvbaton.errors import ConfigError
from kvbaton.transport.base import Endpoint, Region, Transport, TransportSettings
from kvbaton.transport.choose import open_entry
from kvbaton.transport.table import load

__all__ = ["main"]

_Served = tuple[object, Callable[[], None]]
"""How a region is reached, and what ends that."""


def main() -> None:
    """Arguments: kind, region bytes, seed, then the descriptor of a file that becomes the region, where it is to be written to.

    The last one is the descriptor for the line of JSON that describes how the region is reached.
    """
    kind, (region_bytes, seed, *written, line) = sys.argv[1], map(int, sys.argv[2:])
    raw = {
        "memcpy": _serve_none,
        "socket": _serve_socket,
        "raw nixl": _serve_nixl,
        "raw nixl, its thread": _serve_nixl,
        "raw mooncake": _serve_mooncake,
        "mori": _serve_mori,
    }
    try:
        memory = np.frombuffer(mmap.mmap(written[0], region_bytes), np.uint8) if written else content(seed, region_bytes)
        serve = functools.partial(_serve_ours, takes_writes=bool(written))
        reached, stop = raw.get(kind, serve)(kind, memory)
    except (ConfigError, ImportError) as error:
        sys.exit(str(error))
    os.write(line, msgspec.json.encode(reached) + b"\n")
    for writer in sys.stdin:
        if isinstance(stop, _TransportStop):
            stop.transport.connect(WRITER, msgspec.json.decode(writer, type=Endpoint))
        os.write(line, b"connected\n")
    stop()


@dataclass(frozen=True, slots=True)
class _TransportStop:
    """Ends one of our transports, which until then may be asked to connect the one that writes to it."""

    transport: Transport

    def __call__(self) -> None:
        self.transport.close()


def _serve_ours(kind: str, memory: Bytes, *, takes_writes: bool) -> _Served:
    entry, variant = our_subjects()[kind]
    # What is written lies in a file that the benchmark maps too, and must stay there to be checked.
    region = Region.of(memory) if takes_writes else load(variant.memory)(memory)[0]
    transport = open_entry(entry, region, TransportSettings(tls=variant.tls(), **entry.writing(takes_writes)))
    return transport.endpoint(), _TransportStop(transport)


def _serve_none(_kind: str, _memory: Bytes) -> _Served:
    """The benchmark copies inside its own process."""
    return None, lambda: None


def _serve_socket(_kind: str, memory: Bytes) -> _Served:
    """Stream what is asked for, again and again."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        sock, _ = listener.accept()
        while ask := sock.recv(STREAM_ASK.size, socket.MSG_WAITALL):
            at, count = STREAM_ASK.unpack(ask)
            sock.sendall(memory.data[at : at + count])

    threading.Thread(target=serve, daemon=True).start()
    return {"port": listener.getsockname()[1]}, listener.close


def _serve_nixl(kind: str, memory: Bytes) -> _Served:
    api: Any = importlib.import_module("nixl._api")
    has_thread = kind.endswith("thread")
    agent = api.nixl_agent(f"{kind} {os.getpid()}", api.nixl_agent_config(enable_prog_thread=has_thread, backends=["UCX"]))
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    stopping = threading.Event()

    def serve() -> None:
        while not stopping.wait(0.001):
            agent.update_notifs()

    if not has_thread:
        threading.Thread(target=serve, daemon=True).start()

    def stop(_kept_alive: object = agent) -> None:
        stopping.set()

    return {"metadata": agent.get_agent_metadata().hex(), "address": memory.ctypes.data}, stop


def _serve_mooncake(_kind: str, memory: Bytes) -> _Served:
    engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
    engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    engine.register_memory(memory.ctypes.data, memory.nbytes)

    def stop(_kept_alive: object = engine) -> None:
        return None

    return {"engine": f"127.0.0.1:{engine.get_rpc_port()}", "address": memory.ctypes.data}, stop


def _serve_mori(_kind: str, memory: Bytes) -> _Served:
    engine = open_mori_engine("peer")
    desc = engine.register_memory(memory.ctypes.data, memory.nbytes, -1, mori.MemoryLocationType.CPU)

    def stop(_kept_alive: object = engine) -> None:
        return None

    return {"engine": engine.get_engine_desc().pack().hex(), "memory": desc.pack().hex()}, stop


if __name__ == "__main__":
    main()
