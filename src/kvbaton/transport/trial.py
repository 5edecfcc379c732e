"""Whether a transport works on this machine: a second process hands out a region, this one reads it and looks at the bytes."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from kvbaton.core.handoff import Incarnation
from kvbaton.errors import ConfigError, KVBatonError, PeerLost
from kvbaton.transport.base import Batch, Direction, Endpoint, PeerRank, Region, Transport, TransportSettings
from kvbaton.transport.choose import open_transport
from kvbaton.transport.cuda import DeviceRegion
from kvbaton.transport.shared_memory import SharedMemory

__all__ = ["KINDS", "Trial", "try_transport"]

KINDS = ("local, shared memory", "local, process_vm_readv", "tcp", "cuda", "nixl", "mooncake", "mori")
"""What can be tried: a transport, and for `local` the kind of memory."""

_BYTES = 1 << 20
_PATIENCE_S = 60.0
_KILL_S = 10.0
_SOURCE_COMMAND = (sys.executable, "-m", "kvbaton.transport.trial")
_LAST_WORDS_BYTES = 2048
_LAST_WORDS_LINES = 3
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

    @property
    def transport(self) -> str:
        """The name that users choose it by."""
        return self.kind.partition(",")[0]


def try_transport(kind: str, *, patience_s: float = _PATIENCE_S, source_command: Sequence[str] = _SOURCE_COMMAND) -> Trial:
    """Try one of `KINDS` between this process and another; never raises for what does not work.

    The other process has `patience_s` to open its side, and the bytes as long to come. It is `source_command`, which is given
    the kind and the descriptor that its endpoint is to be written to.
    """
    try:
        return Trial(kind, _problem_of(kind, patience_s, source_command))
    except KVBatonError as error:
        return Trial(kind, str(error))
    except Exception as error:  # noqa: BLE001 - a library may raise anything, and then that is the answer
        return Trial(kind, f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True, eq=False)
class _Memory:
    """Memory to try a transport with, and how to look at it."""

    region: Region
    content: Callable[[], bytes]


class _Source:
    """The other process, killed in the end. What it says to people is kept, for the case that it fails."""

    def __init__(self, kind: str, command: Sequence[str]) -> None:
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._answers, answer = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, kind, str(answer)],
                stdin=subprocess.PIPE,
                stdout=self._words,
                stderr=subprocess.STDOUT,
                pass_fds=[answer],
            )
        except OSError:
            self._forget()
            raise
        finally:
            os.close(answer)

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        assert self._process.stdin is not None  # noqa: S101
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)
        self._forget()

    def endpoint(self, patience_s: float) -> Endpoint:
        """What the process says of its region. Raises PeerLost when it dies before, or says nothing within `patience_s`."""
        give_up_at, line = time.monotonic() + patience_s, b""
        while not line.endswith(b"\n"):
            if not select.select([self._answers], [], [], max(0.0, give_up_at - time.monotonic()))[0]:
                raise PeerLost(f"the other process did not open it within {patience_s:g} s{self._last_words()}")
            part = os.read(self._answers, 1 << 16)
            if not part:
                raise PeerLost(f"the other process could not open it, though this one could{self._last_words()}")
            line += part
        return msgspec.json.decode(line, type=Endpoint)

    def _last_words(self) -> str:
        size = self._words.seek(0, os.SEEK_END)
        self._words.seek(max(0, size - _LAST_WORDS_BYTES))
        lines = [line.strip() for line in self._words.read().decode(errors="replace").splitlines() if line.strip()]
        return "; its last words: " + " / ".join(lines[-_LAST_WORDS_LINES:]) if lines else ", and said nothing"

    def _forget(self) -> None:
        os.close(self._answers)
        self._words.close()


def _problem_of(kind: str, patience_s: float, command: Sequence[str]) -> str:
    memory, transport = _open(kind, 0, patience_s)
    with contextlib.closing(transport), _Source(kind, command) as source:
        problem = _read_all(memory, transport, source, patience_s)
        transport.close()
        return problem


def _open(kind: str, fill: int, patience_s: float) -> tuple[_Memory, Transport]:
    name, _, which = kind.partition(", ")
    memory = _gpu_memory(fill) if name == "cuda" else _main_memory(fill, is_shared=which == "shared memory")
    return memory, open_transport(name, memory.region, TransportSettings(timeout_s=patience_s / 2))


def _main_memory(fill: int, *, is_shared: bool) -> _Memory:
    region = SharedMemory(_BYTES).region if is_shared else Region.of(np.zeros(_BYTES, np.uint8))
    region.view[:] = bytes([fill]) * _BYTES
    return _Memory(region, lambda: bytes(region.view))


def _gpu_memory(fill: int) -> _Memory:
    try:
        import torch
    except ImportError as error:
        raise ConfigError(f"transport cuda needs torch and Triton ({error}); pip install 'kvbaton[cuda]'") from error
    if not torch.cuda.is_available():
        raise ConfigError("transport cuda needs an NVIDIA GPU, and torch sees none here; see nvidia-smi")
    tensor: Any = torch.full((_BYTES,), fill, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    return _Memory(DeviceRegion.of_tensors(tensor), lambda: bytes(tensor.cpu().numpy()))


def _read_all(memory: _Memory, transport: Transport, source: _Source, patience_s: float) -> str:
    transport.connect(_PEER, source.endpoint(patience_s))
    transport.post(Batch(_PEER, Direction.READ, np.array([[0, 0, _BYTES]], np.uint64)))
    if not select.select([transport.wakeup_fd], [], [], patience_s)[0]:
        return f"nothing came within {patience_s:g} s"
    error = transport.poll()[0].error
    if error or memory.content() == b"\1" * _BYTES:
        return error
    return "wrong bytes came; please report this"


def _main() -> None:
    kind, answers = sys.argv[1], int(sys.argv[2])
    try:
        _, transport = _open(kind, 1, _PATIENCE_S)
    except KVBatonError as error:
        sys.exit(str(error))
    os.write(answers, msgspec.json.encode(transport.endpoint()) + b"\n")
    sys.stdin.read()
    transport.close()


if __name__ == "__main__":
    _main()
