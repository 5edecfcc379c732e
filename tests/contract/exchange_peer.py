"""The other side of the exchange suite: a process with an exchange and memories, which obeys one JSON line at a time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvbaton.core.card import Endpoint
from kvbaton.transport.base import TransportSettings
from kvbaton.transport.exchange.base import MemoryHandle
from kvbaton.transport.table import load, transport_entry

__all__ = ["ExchangePeer", "exchange_peer"]

_ANSWER_S = 60.0


class ExchangePeer:
    """Drives such a process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pid = process.pid
        self.endpoint = msgspec.convert(self.ask("endpoint"), Endpoint)

    def ask(self, command: str, **arguments: Any) -> Any:
        """One command, and its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], _ANSWER_S)[0]:
            raise TimeoutError(command)
        return json.loads(self.process.stdout.readline())

    def register(self, size: int, value: int = 0) -> MemoryHandle:
        """A new memory of `size` bytes, all `value`."""
        return msgspec.convert(self.ask("register", size=size, value=value), MemoryHandle)

    def content(self, slot: int) -> bytes:
        """What the memory that was registered in `slot` holds now, withdrawn or not."""
        return bytes.fromhex(self.ask("content", slot=slot))


@contextlib.contextmanager
def exchange_peer(transport: str, port: int = 0) -> Iterator[ExchangePeer]:
    """Start one; it is killed at the end."""
    command = [sys.executable, str(Path(__file__)), transport, str(port)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield ExchangePeer(process)
    finally:
        process.kill()
        process.wait(10)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()


def _main(transport: str, port: int) -> None:
    exchange = load(transport_entry(transport).exchange)("peer", TransportSettings(port=port))
    memories: dict[int, Any] = {}
    handles: dict[int, MemoryHandle] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any = None
        match request["command"]:
            case "endpoint":
                answer = msgspec.to_builtins(exchange.endpoint())
            case "register":
                array = np.full(request["size"], request["value"], np.uint8)
                handle = exchange.register(array.ctypes.data, array.nbytes)
                memories[handle.slot], handles[handle.slot] = array, handle
                answer = msgspec.to_builtins(handle)
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
    _main(sys.argv[1], int(sys.argv[2]))
