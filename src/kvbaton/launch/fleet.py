"""A fleet: the child processes of one local set-up. Entering starts nothing; leaving stops everything that was started."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import http.client
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from kvbaton.errors import LocalError
from kvbaton.launch.first_error import FirstError
from kvbaton.wire.tls import cluster_tls

__all__ = ["Death", "Fleet", "FleetPart", "answers_ok", "core_share"]

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.1
_ANSWER_S = 2.0
_KILL_AFTER_S = 10.0
_TIDY_S = 3.0
_KEPT_LINES = 40
_LATE_LINES = 5
_LINES_AFTER_ERROR = 10
_LINE_CHARACTERS = 16384
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

KEPT_LOGS_VARIABLE = "KVBATON_KEPT_LOGS"
"""A directory in which the logs of all parts stay, each fleet's in one of its own."""


@functools.cache
def _direct(tls_dir: Path | None) -> urllib.request.OpenerDirector:
    """Asks this host itself, whatever proxy the environment names for the world outside."""
    tls = cluster_tls(tls_dir)
    handlers = [] if tls is None else [urllib.request.HTTPSHandler(context=tls.client)]
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), *handlers)


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
    tls_dir: Path | None = None
    """The certificates with which it is asked, where it encrypts."""
    listed: dict[str, str | int] = field(default_factory=dict)
    """What a router's list of instances has of it; for an instance that does not register by itself."""


@dataclass(frozen=True, slots=True)
class Death:
    """A part ended by itself."""

    name: str
    pid: int
    returncode: int
    last_lines: tuple[str, ...]
    first_error: tuple[str, ...] = ()
    """What it printed of its first error; the last lines of several processes only show what followed from that."""

    def __str__(self) -> str:
        if self.returncode < 0:
            how = f"was killed by signal {-self.returncode} ({signal.Signals(-self.returncode).name})"
        else:
            how = f"ended with exit code {self.returncode}"
        return f"{self.name} (pid {self.pid}) {how}"


class Fleet(contextlib.AbstractContextManager["Fleet"]):
    """Starts parts, detects when they are healthy or dead, and ends them all on exit. `on_line` gets each line they print."""

    def __init__(self, on_line: Callable[[str, str], None] | None = None) -> None:
        self._on_line = on_line
        self._running: list[_Running] = []
        self.log_directory = Path(tempfile.mkdtemp(prefix="kvbaton-", dir=os.environ.get(KEPT_LOGS_VARIABLE)))

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, part: FleetPart) -> None:
        """Start one process; it dies with this one, however this one ends."""
        with _signals_wait():
            self._running.append(self._launch(part))

    def restart(self, name: str) -> None:
        """Start a part that has ended once more, with the same command line and environment, hence with its ports and key."""
        self.end_leftovers(name)
        running = self._find(name)
        with _signals_wait():
            self._running[self._running.index(running)] = self._launch(running.part)

    def end_leftovers(self, name: str) -> None:
        """End the children that a part which has ended left behind: they may hold its ports and its memory."""
        running = self._find(name)
        if running.process.poll() is not None:
            self._end_session(running, time.monotonic() + _TIDY_S)

    def kill(self, name: str) -> None:
        """End a part at once; its death is found like any other."""
        self._find(name).process.kill()

    def is_healthy(self, name: str) -> bool:
        """Whether a part runs and answers on its health URL."""
        running = self._find(name)
        return running.process.poll() is None and answers_ok(running.part.health_url, running.part.tls_dir)

    def pid(self, name: str) -> int:
        """The process id of a part."""
        return self._find(name).process.pid

    def wait_healthy(self, timeout_s: float, on_healthy: Callable[[str], None] | None = None) -> None:
        """Wait until every part answers on its health URL.

        Raises LocalError when one dies or is late, with the first error that it printed and its last lines.
        """
        give_up_at = time.monotonic() + timeout_s
        waiting = list(self._running)
        while waiting:
            if (death := self.death()) is not None:
                raise LocalError(f"{death}; {_explained(death)}")
            for running in [running for running in waiting if answers_ok(running.part.health_url, running.part.tls_dir)]:
                waiting.remove(running)
                if on_healthy is not None:
                    on_healthy(running.part.name)
            if waiting and time.monotonic() > give_up_at:
                names = ", ".join(running.part.name for running in waiting)
                printed = "".join(f"\n  {each.part.name}: {line}" for each in waiting for line in each.shown_late())
                raise LocalError(f"not healthy after {timeout_s:g} s: {names}; their last lines:{printed or ' none'}")
            if waiting:
                time.sleep(_POLL_S)

    def death(self) -> Death | None:
        """The first part that has ended by itself, if any."""
        return next(iter(self.deaths()), None)

    def deaths(self) -> list[Death]:
        """Every part that has ended by itself and was not restarted."""
        return [death for running in self._running if (death := running.death()) is not None]

    def stop(self, kill_after_s: float = _KILL_AFTER_S) -> None:
        """End every part, politely first, and wait until they are gone; removes the logs. Their last output is not shown."""
        for running in self._running:
            running.is_ending = True
            if running.process.poll() is None:
                running.process.terminate()
        give_up_at = time.monotonic() + kill_after_s
        for running in self._running:
            try:
                running.process.wait(max(0.0, give_up_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait(_KILL_AFTER_S)
            self._end_session(running, give_up_at)
            running.reader.join(1.0)
        self._running.clear()
        if not os.environ.get(KEPT_LOGS_VARIABLE):
            shutil.rmtree(self.log_directory, ignore_errors=True)

    def _find(self, name: str) -> _Running:
        return next(running for running in self._running if running.part.name == name)

    def _launch(self, part: FleetPart) -> _Running:
        process = subprocess.Popen(
            list(part.command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **part.environment, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        return _Running(part, process, self.log_directory / f"{part.name}.log", self._on_line)

    def _end_session(self, running: _Running, give_up_at: float) -> None:
        # Once only: a part waits up to half a minute for its restart, and by then the kernel may have given the id of its
        # session to another process.
        if not running.is_session_ended:
            _end_session(running.process.pid, give_up_at)
            running.is_session_ended = True


class _Running:
    """One started process, and the thread that drains what it prints.

    The reader must outlive every error of where lines go: once it ends, the pipe fills, and the child blocks in its next print.
    """

    def __init__(
        self, part: FleetPart, process: subprocess.Popen[str], log_path: Path, on_line: Callable[[str, str], None] | None
    ) -> None:
        self.part = part
        self.process = process
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.first_error = FirstError()
        self._log = _PartLog(log_path)
        self._on_line = on_line
        self._death: Death | None = None
        self.is_ending = False
        self.is_session_ended = False
        self.reader = threading.Thread(target=self._read, name=f"log-{part.name}", daemon=True)
        self.reader.start()

    def death(self) -> Death | None:
        """How it ended, if it did. Found once: the reader may be held up by a helper that keeps the pipe open."""
        returncode = self.process.poll()
        if self._death is None and returncode is not None:
            self.reader.join(1.0)
            ended = self.part.name, self.process.pid, returncode
            self._death = Death(*ended, tuple(self.last_lines), self.first_error.lines())
        return self._death

    def shown_late(self) -> list[str]:
        """What it printed that may explain why it does not answer: its first error, and its last lines."""
        last = list(self.last_lines)[-_LATE_LINES:]
        return [*(line for line in self.first_error.lines() if line not in last), *last]

    def _read(self) -> None:
        if self.process.stdout is None:
            return
        with self.process.stdout, contextlib.closing(self._log):
            # A child that prints no line ends must not grow this process: a longer line is taken in pieces.
            while line := self.process.stdout.readline(_LINE_CHARACTERS):
                self._log.write(line)
                self._take(line.rstrip("\n"))

    def _take(self, line: str) -> None:
        self.last_lines.append(line)
        self.first_error.take(line)
        if self._on_line is None or self.is_ending:
            return
        try:
            self._on_line(self.part.name, line)
        except Exception as error:  # noqa: BLE001
            self._log.write(f"kvbaton: the line above was not handed on: {type(error).__name__}: {error}\n")


def _explained(death: Death) -> str:
    """What a part has printed about its end: its last lines, and before them its first error where that is not among them."""
    first, last = death.first_error, death.last_lines
    if set(first) <= set(last):
        return "its last lines:\n" + _indented(last)
    return f"its first error:\n{_indented(first)}\nand its last lines:\n{_indented(last[-_LINES_AFTER_ERROR:])}"


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)


class _PartLog:
    """The log file of a part. It counts the lines that could not be written, and states how many once writing works again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._lost = 0
        self._reason = ""
        with contextlib.suppress(OSError):
            self._file = self._open()

    def write(self, line: str) -> None:
        """Append a line; never raises because of the file."""
        if self._lost:
            line = f"\nkvbaton: lines lost here: {self._lost} ({self._reason})\n{line}"
        try:
            if self._file is None:
                self._file = self._open()
            content = line.encode(errors="replace")
            while content:
                content = content[self._file.write(content) :]
        except OSError as error:
            self._lost += 1
            self._reason = error.strerror or str(error)
        else:
            self._lost = 0

    def _open(self) -> FileIO:
        # Unbuffered: what a full disk refuses must not stay in a buffer and fail again at the end.
        return FileIO(self._path, "a")

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


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


def answers_ok(url: str, tls_dir: Path | None = None) -> bool:
    """Whether this URL answers with 200."""
    try:
        with _direct(tls_dir).open(url, timeout=_ANSWER_S) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException, ValueError):
        return False


_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """Runs in the child between fork and exec, where nothing may be loaded or locked any more."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
