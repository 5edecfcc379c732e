"""The source of the benchmark of main memory as a process of its own: a region, and a plain socket that streams its bytes."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.core.handoff import Incarnation
from kvbaton.launch.ports import PortPicker
from kvbaton.transport.base import Endpoint, Region, TransportSettings
from kvbaton.transport.choose import open_transport

__all__ = ["SourceHere", "content", "main"]

_BIND_HOST = "127.0.0.1"


class SourceHere(msgspec.Struct, frozen=True):
    """What the source process says when it is ready."""

    endpoint: Endpoint
    port: int


def content(count: int) -> npt.NDArray[np.uint8]:
    """The bytes of the source: every word tells its place, and none is all zeros."""
    places = np.arange(count // 4, dtype=np.uint32)
    return ((places * np.uint32(2654435761)) | np.uint32(1)).view(np.uint8)


def main() -> None:
    """Serve one region of so many bytes over one transport, until standard input ends."""
    name, region_bytes, incarnation = sys.argv[1], int(sys.argv[2]), Incarnation(sys.argv[3])
    memory = content(region_bytes)
    transport = open_transport(name, Region.of(memory), TransportSettings(incarnation=incarnation))
    with socket.create_server((_BIND_HOST, PortPicker(_BIND_HOST).pick())) as server:
        threading.Thread(target=_stream, args=(server, memory), name="kvbaton-plain-socket", daemon=True).start()
        here = SourceHere(transport.endpoint(), server.getsockname()[1])
        sys.stdout.buffer.write(msgspec.json.encode(here) + b"\n")
        sys.stdout.flush()
        sys.stdin.read()
    transport.close()


def _stream(server: socket.socket, memory: npt.NDArray[np.uint8]) -> None:
    """Send the first so many bytes of `memory`, again for each eight bytes that ask for a number of them."""
    with contextlib.suppress(OSError):
        connection, _ = server.accept()
        with connection:
            while len(asked := connection.recv(8, socket.MSG_WAITALL)) == 8:
                connection.sendall(memory.data[: int.from_bytes(asked, "little")])


if __name__ == "__main__":
    main()
