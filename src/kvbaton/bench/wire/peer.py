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
from typing import Any

import msgspec
import numpy as np

from kvbaton.bench.wire.pages import Bytes, content
from kvbaton.bench.wire.subjects import our_subjects
from kvbaton.errors import ConfigError
from kvbaton.transport.base import Region, TransportSettings
from kvbaton.transport.choose import open_entry
from kvbaton.transport.entry import load

__all__ = ["main"]


def main() -> None:
    """Arguments: kind, region bytes, seed, and to be written to, a file that is handed over open and becomes the region.

    One line of JSON on stdout describes how the region is reached. Ends with 2 where the kind cannot run here; the benchmark's
    own side finds that out too, and reports why.
    """
    kind, region_bytes, seed, *written = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *map(int, sys.argv[4:])
    raw = {
        "memcpy": _serve_none,
        "socket": _serve_socket,
        "raw nixl": _serve_nixl,
        "raw nixl, its thread": _serve_nixl,
        "raw mooncake": _serve_mooncake,
    }
    try:
        memory = np.frombuffer(mmap.mmap(written[0], region_bytes), np.uint8) if written else content(seed, region_bytes)
        serve = functools.partial(_serve_ours, takes_writes=bool(written))
        stop = raw.get(kind, serve)(kind, memory)
    except (ConfigError, ImportError):
        sys.exit(2)
    sys.stdin.read()
    stop()


def _describe(reached: object) -> None:
    sys.stdout.buffer.write(b"\n@" + msgspec.json.encode(reached) + b"\n")
    sys.stdout.flush()


def _serve_ours(kind: str, memory: Bytes, *, takes_writes: bool) -> Callable[[], None]:
    entry, variant = our_subjects()[kind]
    # What is written lies in a file that the benchmark maps too, and must stay there to be checked.
    region = Region.of(memory) if takes_writes else load(variant.memory)(memory)[0]
    transport = open_entry(entry, region, TransportSettings(unfenced_writes=takes_writes))
    _describe(transport.endpoint())
    return transport.close


def _serve_none(_kind: str, _memory: Bytes) -> Callable[[], None]:
    """The benchmark copies inside its own process."""
    return lambda: None


def _serve_socket(_kind: str, memory: Bytes) -> Callable[[], None]:
    """Stream as many bytes from the start of the region as eight bytes ask for, again and again."""
    listener = socket.create_server(("127.0.0.1", 0))
    _describe({"port": listener.getsockname()[1]})

    def serve() -> None:
        sock, _ = listener.accept()
        while ask := sock.recv(8, socket.MSG_WAITALL):
            sock.sendall(memory.data[: int.from_bytes(ask, "little")])

    threading.Thread(target=serve, daemon=True).start()
    return listener.close


def _serve_nixl(kind: str, memory: Bytes) -> Callable[[], None]:
    api: Any = importlib.import_module("nixl._api")
    has_thread = kind.endswith("thread")
    agent = api.nixl_agent(f"{kind} {os.getpid()}", api.nixl_agent_config(enable_prog_thread=has_thread, backends=["UCX"]))
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    _describe({"metadata": agent.get_agent_metadata().hex(), "address": memory.ctypes.data})
    stopping = threading.Event()

    def serve() -> None:
        while not stopping.wait(0.001):
            agent.update_notifs()

    if not has_thread:
        threading.Thread(target=serve, daemon=True).start()

    def stop(_kept_alive: object = agent) -> None:
        stopping.set()

    return stop


def _serve_mooncake(_kind: str, memory: Bytes) -> Callable[[], None]:
    engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
    engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    engine.register_memory(memory.ctypes.data, memory.nbytes)
    _describe({"engine": f"127.0.0.1:{engine.get_rpc_port()}", "address": memory.ctypes.data})

    def stop(_kept_alive: object = engine) -> None:
        return None

    return stop


if __name__ == "__main__":
    main()
