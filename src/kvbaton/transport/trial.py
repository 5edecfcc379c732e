"""Whether a transport works on this machine: a second process hands out a region, this one reads it and checks the bytes."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from kvbaton.core.handoff import Incarnation
from kvbaton.errors import ConfigError, KVBatonError, PeerLost
from kvbaton.transport.base import Batch, Direction, Endpoint, PeerRank, Transport, TransportSettings
from kvbaton.transport.choose import open_entry
from kvbaton.transport.entry import load
from kvbaton.transport.table import transport_entry, transport_names, variant_of

__all__ = ["Trial", "try_all", "try_transport"]

_BYTES = 1 << 20
_TIMEOUT_S = 60.0
_KILL_S = 10.0
_SOURCE_COMMAND = (sys.executable, "-m", "kvbaton.transport.trial")
_LAST_OUTPUT_BYTES = 2048
_LAST_OUTPUT_LINES = 3
_PEER = PeerRank(Incarnation("trial"))


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


class _SourceProcess:
    """The other process, killed in the end. Its output is kept, to be shown when it fails."""

    def __init__(self, kind: str, command: Sequence[str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._answers, answer = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, kind, str(answer)],
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[answer],
            )
        except OSError:
            self._close()
            raise
        finally:
            os.close(answer)

    def __enter__(self) -> _SourceProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        assert self._process.stdin is not None  # noqa: S101
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)
        self._close()

    def endpoint(self, timeout_s: float) -> Endpoint:
        """The endpoint that the process sends. Raises PeerLost when it ends first, or sends none within `timeout_s`."""
        deadline, line = time.monotonic() + timeout_s, b""
        while not line.endswith(b"\n"):
            if not select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise PeerLost(f"the other process did not open it within {timeout_s:g} s{self._last_output()}")
            part = os.read(self._answers, 1 << 16)
            if not part:
                raise PeerLost(f"the other process could not open it, though this one could{self._last_output()}")
            line += part
        return msgspec.json.decode(line, type=Endpoint)

    def _last_output(self) -> str:
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _LAST_OUTPUT_BYTES))
        lines = [line.strip() for line in self._output.read().decode(errors="replace").splitlines() if line.strip()]
        return "; its last output: " + " / ".join(lines[-_LAST_OUTPUT_LINES:]) if lines else ", and printed nothing"

    def _close(self) -> None:
        os.close(self._answers)
        self._output.close()


def _problem_of(kind: str, timeout_s: float, command: Sequence[str]) -> str:
    memory, transport = _open(kind, 0, timeout_s)
    with contextlib.closing(transport), _SourceProcess(kind, command) as source:
        problem = _read_all(memory, transport, source, timeout_s)
        transport.close()
        return problem


def _open(kind: str, fill: int, timeout_s: float) -> tuple[Any, Transport]:
    """Memory full of `fill`, and the transport over it."""
    entry, variant = variant_of(kind)
    region, memory = load(variant.memory)(np.full(_BYTES, fill, np.uint8))
    return memory, open_entry(entry, region, TransportSettings(timeout_s=timeout_s / 2))


def _read_all(memory: Any, transport: Transport, source: _SourceProcess, timeout_s: float) -> str:
    transport.connect(_PEER, source.endpoint(timeout_s))
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
