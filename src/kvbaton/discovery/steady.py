"""An announcer that survives a stalled interpreter: heartbeats leave from a small process of their own.

A thread cannot send while something else holds the interpreter: a long call into native code, a huge collection of garbage,
a model that is being compiled. Routers forget an instance after a few seconds of silence, and a busy one is still alive. So a
child process (`steady_child.py`) beats, and this side shows it twice a second that it lives. When it has not for
`stall_limit_s`, the child says goodbye, and registers again once there is life; when this process dies, however it dies, the
child says goodbye and ends. Rejected: a thread without the interpreter lock, which Python does not have; a fork, which would
copy an engine.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

import kvbaton
from kvbaton.discovery.advice import DEFAULT_ADVISE_AFTER_S, Adviser
from kvbaton.discovery.announcer import DEFAULT_HEARTBEAT_S, make_errand
from kvbaton.discovery.heartbeats import News
from kvbaton.discovery.messages import Registration
from kvbaton.discovery.steady_child import Order
from kvbaton.errors import ConfigError

__all__ = ["DEFAULT_STALL_LIMIT_S", "SteadyAnnouncer"]

_logger = logging.getLogger(__name__)

DEFAULT_STALL_LIMIT_S = 30.0
"""A process that shows no life for so long is no longer announced, although it exists."""

_LOOK_S = 0.5
_STOP_S = 5.0
_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0


class SteadyAnnouncer:
    """Registers `registration` with every router from `start` on, until `stop`, whatever this interpreter is busy with.

    Start it when the engine is healthy: a registration means "send me requests". `has_requests` tells whether any has come.
    """

    def __init__(
        self,
        registration: Registration,
        routers: Sequence[str],
        heartbeat_s: float = DEFAULT_HEARTBEAT_S,
        *,
        stall_limit_s: float = DEFAULT_STALL_LIMIT_S,
        has_requests: Callable[[], bool] | None = None,
        advise_after_s: float = DEFAULT_ADVISE_AFTER_S,
        cluster_key: bytes | None = None,
    ) -> None:
        if not math.isfinite(stall_limit_s) or stall_limit_s <= _LOOK_S:
            raise ConfigError(f"stall_limit_s is {stall_limit_s}; it must be above {_LOOK_S} and finite")
        self._errand = make_errand(registration, routers, heartbeat_s, cluster_key)
        self._stall_limit_s = stall_limit_s
        self._adviser = Adviser(registration, has_requests, advise_after_s)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to register; returns at once, whether or not a router is there."""
        if self._thread is None and self._errand.routers:
            self._thread = threading.Thread(target=self._run, name="kvbaton-announcer", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Say goodbye to every router that can be reached, and end thread and process. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(2 * _STOP_S)

    @property
    def is_alive(self) -> bool:
        """Whether heartbeats are being sent."""
        child = self._child
        return child is not None and child.poll() is None

    @property
    def pid(self) -> int | None:
        """The process that beats, while there is one."""
        child = self._child
        return None if child is None else child.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                self._mind_a_child()
            except Exception:
                _logger.exception("discovery: the process that sends heartbeats failed")
            if time.monotonic() - began > _LONGEST_BACKOFF_S:
                backoff_s = _FIRST_BACKOFF_S
            if not self._stopping.is_set():
                _logger.warning("discovery: heartbeats have stopped; starting them again in %g s", backoff_s)
                self._stopping.wait(backoff_s)
                backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    def _mind_a_child(self) -> None:
        """Start a child, show it that we live until it ends or we stop, and wait for its goodbye."""
        with _spawn() as child:
            self._child = child
            try:
                self._talk_to(child)
            finally:
                _end(child)

    def _talk_to(self, child: subprocess.Popen[bytes]) -> None:
        if child.stdin is None or child.stdout is None:
            raise OSError("it has no pipes")
        child.stdin.write(msgspec.json.encode(Order(self._errand, self._stall_limit_s)) + b"\n")
        os.set_blocking(child.stdin.fileno(), False)
        os.set_blocking(child.stdout.fileno(), False)
        lines = bytearray()
        while not self._stopping.is_set() and child.poll() is None:
            with contextlib.suppress(BlockingIOError):
                os.write(child.stdin.fileno(), b".")
            lines += child.stdout.read() or b""
            *whole, rest = lines.split(b"\n")
            lines = bytearray(rest)
            for line in whole:
                self._hear(line)
            self._adviser.advise(time.monotonic())
            self._stopping.wait(_LOOK_S)

    def _hear(self, line: bytes) -> None:
        """A line may be torn when the child could not wait for us."""
        with contextlib.suppress(msgspec.MsgspecError):
            self._adviser.hear(msgspec.json.decode(line, type=News), time.monotonic())


def _spawn() -> subprocess.Popen[bytes]:
    """The child with this very kvbaton, and nothing else of this process's import path."""
    path = os.pathsep.join(filter(None, (str(Path(kvbaton.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", "kvbaton.discovery.steady_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, "PYTHONPATH": path},
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    """Closing its input tells the child to say goodbye and end."""
    with contextlib.suppress(OSError):
        if child.stdin is not None:
            child.stdin.close()
    try:
        child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(_STOP_S)
