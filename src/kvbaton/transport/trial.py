"""Whether a transport works on this machine: a second process hands out a region, this one reads it and looks at the bytes."""

from __future__ import annotations

import select
import subprocess
import sys
from dataclasses import dataclass

import msgspec
import numpy as np

from kvbaton.core.handoff import Incarnation
from kvbaton.errors import KVBatonError
from kvbaton.transport.base import Batch, Direction, Endpoint, PeerRank, Region, Transport, TransportSettings
from kvbaton.transport.choose import open_transport
from kvbaton.transport.shared_memory import SharedMemory

__all__ = ["KINDS", "Trial", "try_transport"]

KINDS = ("local, shared memory", "local, process_vm_readv", "tcp", "nixl", "mooncake", "mori")
"""What can be tried: a transport, and for `local` the kind of memory."""

_BYTES = 1 << 20
_PATIENCE_S = 60.0
_PEER = PeerRank(Incarnation("trial"))


@dataclass(frozen=True, slots=True)
class Trial:
    """How a trial went; `problem` says what is wrong and what to do about it, and is empty when the bytes were right."""

    kind: str
    problem: str = ""

    @property
    def works(self) -> bool:
        """Whether every byte came."""
        return not self.problem


def try_transport(kind: str) -> Trial:
    """Try one of `KINDS` between this process and another; never raises for what does not work."""
    try:
        target = _open(kind, fill=0)
    except KVBatonError as error:
        return Trial(kind, str(error))
    command = [sys.executable, "-m", "kvbaton.transport.trial", kind]
    source = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        return Trial(kind, _read_all(*target, source))
    except KVBatonError as error:
        return Trial(kind, str(error))
    finally:
        target[1].close()
        source.kill()
        source.communicate()


def _open(kind: str, fill: int) -> tuple[Region, Transport]:
    name, _, memory = kind.partition(", ")
    region = SharedMemory(_BYTES).region if memory == "shared memory" else Region.of(np.zeros(_BYTES, np.uint8))
    region.view[:] = bytes([fill]) * _BYTES
    return region, open_transport(name, region, TransportSettings(timeout_s=_PATIENCE_S / 2))


def _read_all(region: Region, transport: Transport, source: subprocess.Popen[bytes]) -> str:
    assert source.stdout is not None  # noqa: S101
    line = next((line for line in source.stdout if line.startswith(b"@")), b"")
    if not line:
        return "the other process could not open it, though this one could"
    transport.connect(_PEER, msgspec.json.decode(line[1:], type=Endpoint))
    transport.post(Batch(_PEER, Direction.READ, np.array([[0, 0, _BYTES]], np.uint64)))
    if not select.select([transport.wakeup_fd], [], [], _PATIENCE_S)[0]:
        return f"nothing came within {_PATIENCE_S:g} s"
    error = transport.poll()[0].error
    if error or bytes(region.view) == b"\1" * _BYTES:
        return error
    return "wrong bytes came; please report this"


def _main() -> None:
    _, transport = _open(sys.argv[1], fill=1)
    sys.stdout.buffer.write(b"\n@" + msgspec.json.encode(transport.endpoint()) + b"\n")
    sys.stdout.flush()
    sys.stdin.read()
    transport.close()


if __name__ == "__main__":
    _main()
