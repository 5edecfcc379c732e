"""Whether a transport works on this machine: a second process hands out a region, this one reads it and checks the bytes."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.core.handoff import Incarnation
from kvbaton.errors import ConfigError, KVBatonError
from kvbaton.transport.base import Batch, Direction, Endpoint, PeerRank, Region, Transport, TransportSettings
from kvbaton.transport.choose import open_entry
from kvbaton.transport.shared_memory import SharedMemory
from kvbaton.transport.source_process import SourceProcess
from kvbaton.transport.table import load, transport_entry, transport_names, variant_of

__all__ = ["Trial", "private_memory", "shared_memory", "try_all", "try_transport"]

_BYTES = 1 << 20
_TIMEOUT_S = 60.0
_SOURCE_COMMAND = (sys.executable, "-m", "kvbaton.transport.trial")
_PEER = PeerRank(Incarnation("trial"))

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Trial:
    """How a trial went; `problem` states what is wrong and what to do about it, and is empty when the bytes were right."""

    kind: str
    problem: str = ""
    is_enough: bool = False
    """Whether this transport needs nothing but kvbaton, so that a machine on which it works can serve."""

    @property
    def works(self) -> bool:
        """Whether every byte arrived."""
        return not self.problem


def try_all() -> Iterator[Trial]:
    """Try every variant of every transport in the table, one after another; one that cannot even be loaded is a problem too."""
    for name in transport_names():
        try:
            entry = transport_entry(name)
        except ConfigError as error:
            yield Trial(name, str(error))
        else:
            for variant in entry.variants:
                yield try_transport(variant.kind)


def try_transport(kind: str, *, timeout_s: float = _TIMEOUT_S, source_command: Sequence[str] = _SOURCE_COMMAND) -> Trial:
    """Try one variant between this process and another; never raises for what does not work.

    The other process has `timeout_s` to open its side, and the bytes as long to arrive. It is `source_command`, which is given
    the kind and the descriptor that its endpoint is to be written to.
    """
    is_enough = False
    try:
        is_enough = variant_of(kind)[0].stands_alone
        problem = _problem_of(kind, timeout_s, source_command)
    except KVBatonError as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001 - a library may raise anything, and then that is the answer
        problem = f"{type(error).__name__}: {error}"
    return Trial(kind, problem, is_enough)


def _problem_of(kind: str, timeout_s: float, command: Sequence[str]) -> str:
    memory, transport = _open(kind, 0, timeout_s)
    with contextlib.closing(transport), contextlib.closing(SourceProcess([*command, kind])) as source:
        problem = _read_all(memory, transport, source, timeout_s)
        transport.close()
        return problem


def _open(kind: str, fill: int, timeout_s: float) -> tuple[Any, Transport]:
    """Memory full of `fill`, and the transport over it."""
    entry, variant = variant_of(kind)
    region, memory = load(variant.memory)(np.full(_BYTES, fill, np.uint8))
    return memory, open_entry(entry, region, TransportSettings(timeout_s=timeout_s / 2, tls=variant.tls()))


def _read_all(memory: Any, transport: Transport, source: SourceProcess, timeout_s: float) -> str:
    transport.connect(_PEER, msgspec.json.decode(source.line(timeout_s), type=Endpoint))
    transport.post(Batch(_PEER, Direction.READ, np.array([[0, 0, _BYTES]], np.uint64)))
    if not select.select([transport.wakeup_fd], [], [], timeout_s)[0]:
        return f"no byte arrived within {timeout_s:g} s"
    error = transport.poll()[0].error
    if error or bool((np.asarray(memory) == 1).all()):
        return error
    return "wrong bytes arrived; please report this"


def _main() -> None:
    kind, answers = sys.argv[1], int(sys.argv[2])
    try:
        _, transport = _open(kind, 1, _TIMEOUT_S)
    except KVBatonError as error:
        sys.exit(str(error))
    os.write(answers, msgspec.json.encode(transport.endpoint()) + b"\n")
    sys.stdin.read()
    transport.close()


if __name__ == "__main__":
    _main()


def private_memory(content: Bytes) -> tuple[Region, Bytes]:
    """Memory of this process alone: `content` itself."""
    return Region.of(content), content


def shared_memory(content: Bytes) -> tuple[Region, Bytes]:
    """Memory that other processes can map."""
    memory = SharedMemory(len(content))
    memory.array[:] = content
    return memory.region, memory.array
