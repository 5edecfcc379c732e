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

from kvbaton.bench.wire.pages import content
from kvbaton.errors import ConfigError
from kvbaton.transport.base import Region, TransportSettings
from kvbaton.transport.choose import open_transport
from kvbaton.transport.shared_memory import SharedMemory

__all__ = ["main"]


def main() -> None:
    """Arguments: kind, region bytes, seed, and to be written to, a file that is handed over open and becomes the region.

    One line of JSON on stdout tells how the region is reached. Ends with 2 where the kind cannot run here; the benchmark's own
    side finds that out too, and says why.
    """
    kind, region_bytes, seed, *written = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *map(int, sys.argv[4:])
    raw = {
        "memcpy": _serve_nobody,
        "socket": _serve_socket,
        "raw nixl": _serve_nixl,
        "raw nixl, its thread": _serve_nixl,
        "raw mooncake": _serve_mooncake,
    }
    try:
        region = Region.of(mmap.mmap(written[0], region_bytes)) if written else _filled(kind, region_bytes, seed)
        serve = functools.partial(_serve_ours, takes_writes=bool(written))
        stop = raw.get(kind, serve)(kind, region)
    except (ConfigError, ImportError):
        sys.exit(2)
    sys.stdin.read()
    stop()


def _filled(kind: str, region_bytes: int, seed: int) -> Region:
    """Memory to be read, of the kind that is this subject's way."""
    region = SharedMemory(region_bytes).region if kind == "local" else Region.of(np.empty(region_bytes, np.uint8))
    np.frombuffer(region.view, np.uint8)[:] = content(seed, region_bytes)
    return region


def _tell(what: object) -> None:
    sys.stdout.buffer.write(b"\n@" + msgspec.json.encode(what) + b"\n")
    sys.stdout.flush()


def _serve_ours(kind: str, region: Region, *, takes_writes: bool) -> Callable[[], None]:
    transport = open_transport(kind.split(",")[0], region, TransportSettings(unfenced_writes=takes_writes))
    _tell(transport.endpoint())
    return transport.close


def _serve_nobody(_kind: str, _region: Region) -> Callable[[], None]:
    """The benchmark copies inside its own process."""
    return lambda: None


def _serve_socket(_kind: str, region: Region) -> Callable[[], None]:
    """Stream as many bytes from the start of the region as eight bytes ask for, again and again."""
    listener = socket.create_server(("127.0.0.1", 0))
    _tell({"port": listener.getsockname()[1]})

    def serve() -> None:
        sock, _ = listener.accept()
        while ask := sock.recv(8, socket.MSG_WAITALL):
            sock.sendall(region.view[: int.from_bytes(ask, "little")])

    threading.Thread(target=serve, daemon=True).start()
    return listener.close


def _serve_nixl(kind: str, region: Region) -> Callable[[], None]:
    api: Any = importlib.import_module("nixl._api")
    has_thread = kind.endswith("thread")
    agent = api.nixl_agent(f"{kind} {os.getpid()}", api.nixl_agent_config(enable_prog_thread=has_thread, backends=["UCX"]))
    agent.register_memory([(region.address, region.region_bytes, 0, "")], "DRAM")
    _tell({"metadata": agent.get_agent_metadata().hex(), "address": region.address})
    stopping = threading.Event()

    def serve() -> None:
        while not stopping.wait(0.001):
            agent.update_notifs()

    if not has_thread:
        threading.Thread(target=serve, daemon=True).start()

    def stop(_kept_alive: object = agent) -> None:
        stopping.set()

    return stop


def _serve_mooncake(_kind: str, region: Region) -> Callable[[], None]:
    engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
    engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    engine.register_memory(region.address, region.region_bytes)
    _tell({"engine": f"127.0.0.1:{engine.get_rpc_port()}", "address": region.address})

    def stop(_kept_alive: object = engine) -> None:
        return None

    return stop


if __name__ == "__main__":
    main()
