"""A process with an engine of the drop-in, which obeys one JSON line at a time."""

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

import numpy as np

from gpu_memories import GPU, MAIN, STAND_IN, PlacedMemory, place, use_stand_in
from kvbaton.compat.mori.io import BackendType, IOEngine, IOEngineConfig, MemoryLocationType, RdmaBackendConfig

__all__ = ["MoriPeer", "mori_peer"]

_ANSWER_S = 60.0
_TESTS = Path(__file__).parents[2]


class MoriPeer:
    """Drives such a process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.engine_desc = bytes.fromhex(self.ask("engine"))

    def ask(self, command: str, **arguments: Any) -> Any:
        """One command, and its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], _ANSWER_S)[0]:
            raise TimeoutError(command)
        return json.loads(self.process.stdout.readline())

    def register(self, size: int, value: int = 0) -> bytes:
        """The packed descriptor of a new memory, all `value`."""
        return bytes.fromhex(self.ask("register", size=size, value=value))

    def content(self, number: int) -> bytes:
        """What the memory with this number holds, registered or not."""
        return bytes.fromhex(self.ask("content", number=number))


@contextlib.contextmanager
def mori_peer(key: str, port: int = 0, memory: str = MAIN, **environment: str) -> Iterator[MoriPeer]:
    """Start one with memories of a kind; it is killed at the end."""
    command = [sys.executable, str(Path(__file__)), key, str(port), memory]
    path = os.pathsep.join(filter(None, (str(_TESTS), os.environ.get("PYTHONPATH", ""))))
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables)
    try:
        yield MoriPeer(process)
    finally:
        process.kill()
        process.wait(10)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()


def _main(key: str, port: int, memory: str) -> None:
    if memory == STAND_IN:
        use_stand_in()
    label = (0, MemoryLocationType.GPU) if memory == GPU else (-1, MemoryLocationType.CPU)
    engine = IOEngine(key, IOEngineConfig("127.0.0.1", port))
    engine.create_backend(BackendType.RDMA, RdmaBackendConfig())
    memories: list[PlacedMemory] = []
    descriptors: list[Any] = []
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any = None
        match request["command"]:
            case "engine":
                answer = engine.get_engine_desc().pack().hex()
            case "register":
                memories.append(place(memory, np.full(request["size"], request["value"], np.uint8)))
                descriptors.append(engine.register_memory(memories[-1].address, memories[-1].nbytes, *label))
                answer = descriptors[-1].pack().hex()
            case "deregister":
                engine.deregister_memory(descriptors[request["number"]])
            case "fill":
                memories[request["number"]].fill(request["value"])
            case "content":
                answer = memories[request["number"]].array.tobytes().hex()
            case "notice":
                answer = engine.pop_inbound_transfer_status(request["key"], request["uid"]) is not None
            case "stats":
                answer = engine.stats()
        os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
