"""The other side of the exchange suite: a process with an exchange and memories, which obeys one JSON line at a time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from forked_peers import PeerProcess, start_peer
from kvbaton.core.card import Endpoint
from kvbaton.transport.base import Direction, TransportSettings
from kvbaton.transport.exchange.base import MemoryHandle, TransferRequest
from kvbaton.transport.shared_memory import SharedMemory
from kvbaton.transport.table import load, transport_entry

__all__ = ["ExchangePeer", "exchange_peer", "main"]

_ANSWER_S = 60.0
_END_S = 10.0


class ExchangePeer:
    """Drives such a process."""

    def __init__(self, process: PeerProcess) -> None:
        self.process = process
        self.pid = process.pid
        self.endpoint = msgspec.convert(self.ask("endpoint"), Endpoint)

    def ask(self, command: str, **arguments: Any) -> Any:
        """One command, and its answer."""
        self.process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], _ANSWER_S)[0]:
            raise TimeoutError(command)
        return json.loads(self.process.stdout.readline())

    def register(self, size: int, value: int = 0, *, is_shared: bool = False) -> MemoryHandle:
        """A new memory of `size` bytes, all `value`."""
        return msgspec.convert(self.ask("register", size=size, value=value, is_shared=is_shared), MemoryHandle)

    def content(self, slot: int) -> bytes:
        """What the memory that was registered in `slot` holds now, withdrawn or not."""
        return bytes.fromhex(self.ask("content", slot=slot))


@contextlib.contextmanager
def exchange_peer(transport: str, port: int = 0, host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> Iterator[ExchangePeer]:
    """Start one, with `prefix` before its command line; it is killed at the end."""
    process = start_peer(Path(__file__), [transport, str(port), host], prefix=prefix)
    try:
        yield ExchangePeer(process)
    finally:
        process.close(_END_S)


def main() -> None:
    """Obey the lines on stdin until it ends."""
    transport, port, host = sys.argv[1:]
    exchange = load(transport_entry(transport).exchange)("peer", TransportSettings(host=host, port=int(port)))
    memories: dict[int, Any] = {}
    handles: dict[int, MemoryHandle] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any = None
        match request["command"]:
            case "endpoint":
                answer = msgspec.to_builtins(exchange.endpoint())
            case "register":
                array = SharedMemory(request["size"]).array if request["is_shared"] else np.empty(request["size"], np.uint8)
                array[:] = request["value"]
                handle = exchange.register(array.ctypes.data, array.nbytes)
                memories[handle.slot], handles[handle.slot] = array, handle
                answer = msgspec.to_builtins(handle)
            case "write":
                to, runs = msgspec.convert(request["to"], MemoryHandle), np.array(request["runs"], np.uint64)
                link = exchange.connect(msgspec.convert(request["endpoint"], Endpoint))
                transfer = link.post(TransferRequest(Direction.WRITE, handles[request["slot"]], to, runs))
                answer = transfer.error if transfer.wait(_ANSWER_S) else "not over"
            case "withdraw":
                exchange.withdraw(handles[request["slot"]])
            case "fill":
                memories[request["slot"]][:] = request["value"]
            case "content":
                answer = memories[request["slot"]].tobytes().hex()
            case "notice":
                answer = exchange.has_notice(request["initiator"], request["tag"])
            case "stats":
                answer = dict(exchange.stats())
            case "check":
                exchange.check()
        os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
