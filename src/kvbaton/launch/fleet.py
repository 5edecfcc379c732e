"""A fleet: the child processes of one local set-up. Entering starts nothing; leaving stops everything that was started."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from kvbaton.errors import LocalError

__all__ = ["Death", "Fleet", "FleetPart", "answers_ok", "core_share"]

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.1
_ANSWER_S = 2.0
_KILL_AFTER_S = 10.0
_TIDY_S = 3.0
_KEPT_LINES = 40
_LATE_LINES = 5
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks this host itself, whatever proxy the environment names for the world outside."""


@dataclass(frozen=True, slots=True)
class FleetPart:
    """One process to start: its name, its command line, and the URL that answers 200 when it is healthy."""

    name: str
    command: Sequence[str]
    health_url: str
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    """May hold secrets."""
    base_url: str = ""
    """Where clients reach it."""
    control_address: str = ""
    """Where other instances reach it, as a `ControlAddress`; for an instance that hands caches over."""
    handoffs_address: str = ""
    """Where it reports its hand-offs, if it does."""


@dataclass(frozen=True, slots=True)
class Death:
    """A part ended by itself."""

    name: str
    pid: int
    returncode: int
    last_lines: tuple[str, ...]

    def __str__(self) -> str:
        if self.returncode < 0:
            how = f"was killed by signal {-self.returncode} ({signal.Signals(-self.returncode).name})"
        else:
            how = f"ended with exit code {self.returncode}"
        return f"{self.name} (pid {self.pid}) {how}"


class Fleet:
    """Starts parts, detects when they are healthy or dead, and ends them all on exit. `on_line` gets each line they print."""

    def __init__(self, on_line: Callable[[str, str], None] | None = None) -> None:
        self._on_line = on_line
        self._running: list[_Running] = []
        self.log_directory = Path(tempfile.mkdtemp(prefix="kvbaton-"))

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self, part: FleetPart) -> None:
        """Start one process; it dies with this one, however this one ends."""
        environment = {**os.environ, **part.environment, "PYTHONUNBUFFERED": "1"}
        with _signals_wait():
            process = subprocess.Popen(
                list(part.command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
            self._running.append(_Running(part, process, self.log_directory / f"{part.name}.log", self._on_line))

    def pid(self, name: str) -> int:
        """The process id of a part."""
        return next(running.process.pid for running in self._running if running.part.name == name)

    def wait_healthy(self, timeout_s: float, on_healthy: Callable[[str], None] | None = None) -> None:
        """Wait until every part answers on its health URL; raises LocalError with its last lines when one dies or is late."""
        give_up_at = time.monotonic() + timeout_s
        waiting = list(self._running)
        while waiting:
            if (death := self.death()) is not None:
                raise LocalError(f"{death}; its last lines:\n" + "\n".join(f"  {line}" for line in death.last_lines))
            for running in [running for running in waiting if answers_ok(running.part.health_url)]:
                waiting.remove(running)
                if on_healthy is not None:
                    on_healthy(running.part.name)
            if waiting and time.monotonic() > give_up_at:
                names = ", ".join(running.part.name for running in waiting)
                printed = "".join(
                    f"\n  {each.part.name}: {line}" for each in waiting for line in list(each.last_lines)[-_LATE_LINES:]
                )
                raise LocalError(f"not healthy after {timeout_s:g} s: {names}; their last lines:{printed or ' none'}")
            if waiting:
                time.sleep(_POLL_S)

    def death(self) -> Death | None:
        """The first part that has ended by itself, if any."""
        for running in self._running:
            returncode = running.process.poll()
            if returncode is not None:
                running.reader.join(1.0)
                return Death(running.part.name, running.process.pid, returncode, tuple(running.last_lines))
        return None

    def stop(self) -> None:
        """End every part, politely first, and wait until they are gone; removes the logs. Their last output is not shown."""
        for running in self._running:
            running.is_ending = True
            if running.process.poll() is None:
                running.process.terminate()
        give_up_at = time.monotonic() + _KILL_AFTER_S
        for running in self._running:
            try:
                running.process.wait(max(0.0, give_up_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait(_KILL_AFTER_S)
            _end_session(running.process.pid, give_up_at)
            running.reader.join(1.0)
        self._running.clear()
        for path in self.log_directory.glob("*.log"):
            path.unlink(missing_ok=True)
        if self.log_directory.exists():
            self.log_directory.rmdir()


class _Running:
    def __init__(
        self, part: FleetPart, process: subprocess.Popen[str], log_path: Path, on_line: Callable[[str, str], None] | None
    ) -> None:
        self.part = part
        self.process = process
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._log_path = log_path
        self._on_line = on_line
        self.is_ending = False
        self.reader = threading.Thread(target=self._read, name=f"log-{part.name}", daemon=True)
        self.reader.start()

    def _read(self) -> None:
        if self.process.stdout is None:
            return
        with self.process.stdout, self._log_path.open("a") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                self.last_lines.append(line.rstrip("\n"))
                if self._on_line is not None and not self.is_ending:
                    self._on_line(self.part.name, line.rstrip("\n"))


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Let signals that end this process wait until the body is done: what they raise in the hooks of a fork is lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = {number: signal.signal(number, lambda number, _frame: received.append(number)) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    for each in received:
        signal.raise_signal(each)


def _end_session(leader: int, give_up_at: float) -> None:
    """End what a part has left behind; its children share the session that was made for it, and get a moment to tidy up."""
    give_up_at = min(give_up_at, time.monotonic() + _TIDY_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < give_up_at:
            os.killpg(leader, 0)
            time.sleep(_POLL_S)
        os.killpg(leader, signal.SIGKILL)


def core_share(engines: int) -> dict[str, str]:
    """Environment that gives each of `engines` processes its share of the cores; more threads than cores are far slower."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // max(1, engines)))
    return {"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def answers_ok(url: str) -> bool:
    """Whether this URL answers with 200."""
    try:
        with _DIRECT.open(url, timeout=_ANSWER_S) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException, ValueError):
        return False


_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """Runs in the child between fork and exec, where nothing may be loaded or locked any more."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
