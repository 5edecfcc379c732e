"""Registers an instance with every router, keeps sending heartbeats, and sends a goodbye at the end.

`Announcer` has a small process do it (`announcer_child.py`). A thread cannot send while something else holds the interpreter:
a long call into native code, a huge collection of garbage, a model that is being compiled. Routers forget an instance after a
few seconds of silence, and a busy one is still alive. So a child process sends the heartbeats, and this process signals twice
a second that it is alive. Without a signal for `stall_limit_s` the child sends a goodbye, and registers again after the next
signal; so it does at once when this process signals that its engine hangs. When this process dies, however it dies, the child
sends a goodbye and ends. Rejected: a thread without the interpreter lock, which Python does not have; a fork, which would copy
an engine. `ThreadAnnouncer` does the same on a thread of this process: lighter, for tests and for what never stalls.
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
from typing import Self

import msgspec

import kvbaton
from kvbaton.config import KeyFile
from kvbaton.core.auth import ClusterKey, Seal
from kvbaton.discovery.advice import DEFAULT_ADVISE_AFTER_S, Adviser
from kvbaton.discovery.announcer_child import ALIVE, HUNG, AnnouncerTask
from kvbaton.discovery.heartbeats import Announcement, Heartbeats, RouterEvent
from kvbaton.discovery.messages import Registration, check_http_address
from kvbaton.errors import Bug, ConfigError
from kvbaton.wire.tls import cluster_tls

__all__ = ["DEFAULT_HEARTBEAT_S", "DEFAULT_STALL_LIMIT_S", "LONGEST_HEARTBEAT_S", "Announcer", "ThreadAnnouncer"]

_logger = logging.getLogger(__name__)

DEFAULT_HEARTBEAT_S = 1.5
"""Real routers forget an instance 4 to 5 s after its last message; at this interval one lost heartbeat is harmless."""

DEFAULT_STALL_LIMIT_S = 60.0
"""A process that shows no life for so long is no longer announced, although it exists."""

LONGEST_HEARTBEAT_S = 3.0
"""Above this interval one lost heartbeat would let a real router forget the instance."""

_LOOK_S = 0.25
_SIGN_S = 0.5
_STOP_S = 5.0
_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0


class _AnnouncerBase:
    """What both announcers have in common: the checks, the frames, and one thread between `start` and `stop`."""

    def __init__(
        self,
        registration: Registration,
        routers: Sequence[str],
        heartbeat_s: float = DEFAULT_HEARTBEAT_S,
        clock: Callable[[], float] = time.monotonic,
        is_used: Callable[[], bool] | None = None,
        *,
        advise_after_s: float = DEFAULT_ADVISE_AFTER_S,
        stall_limit_s: float = DEFAULT_STALL_LIMIT_S,
        cluster_key: ClusterKey | None = None,
        tls_dir: Path | None = None,
        is_hung: Callable[[], bool] = lambda: False,
    ) -> None:
        if not math.isfinite(stall_limit_s) or stall_limit_s <= _SIGN_S:
            raise ConfigError(f"stall_limit_s is {stall_limit_s}; it must be above {_SIGN_S} and finite")
        self._announcement = _announcement(registration, routers, heartbeat_s, cluster_key, tls_dir)
        self._adviser = Adviser(registration, is_used, advise_after_s)
        self._stall_limit_s = stall_limit_s
        self._is_hung = is_hung
        self._clock = clock
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to register; returns at once, whether or not a router is there. Do it when the engine is healthy."""
        if self._thread is None and self._announcement.routers:
            self._thread = threading.Thread(target=self._run, name="kvbaton-announcer", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Send a goodbye to every router that can be reached, and end. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(2 * _STOP_S)

    @property
    def is_alive(self) -> bool:
        """Whether heartbeats are being sent."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        """Send heartbeats until stopped, then a goodbye."""
        raise NotImplementedError


class ThreadAnnouncer(_AnnouncerBase):
    """Registers `registration` with every router from `start` on until `stop`, on a thread of this process."""

    def _run(self) -> None:
        clock = self._clock
        with Heartbeats(self._announcement, lambda event: self._adviser.on_event(event, clock()), clock()) as beats:
            while not self._stopping.is_set():
                if self._is_hung():
                    beats.send_goodbye(clock())
                    while self._is_hung() and not self._stopping.wait(_LOOK_S):
                        pass
                due = beats.turn(clock())
                self._adviser.advise(clock())
                self._stopping.wait(min(_LOOK_S, max(0.0, due - clock())))
            beats.send_goodbye(clock())


class Announcer(_AnnouncerBase):
    """Registers `registration` with every router from `start` on until `stop`, whatever this interpreter is busy with.

    `is_used` returns whether a request has ever come; while none has, advice is logged, because real routers do not answer
    instances that they refuse. While `is_hung` returns true the instance is not registered: no request gets through there.
    """

    pid: int | None = None
    """The process that beats; None before there is one."""
    _was_hung = False

    def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                self._run_child()
            except Exception:
                _logger.exception("discovery: the process that sends heartbeats failed")
            if time.monotonic() - began > _LONGEST_BACKOFF_S:
                backoff_s = _FIRST_BACKOFF_S
            if not self._stopping.is_set():
                _logger.warning("discovery: heartbeats have stopped; starting them again in %g s", backoff_s)
                self._stopping.wait(backoff_s)
                backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    def _run_child(self) -> None:
        """Start a child, signal it until it ends or we stop, and wait for its goodbye."""
        with _spawn() as child:
            self.pid = child.pid
            try:
                self._serve(child)
            finally:
                _end(child)

    def _serve(self, child: subprocess.Popen[bytes]) -> None:
        if child.stdin is None or child.stdout is None:
            raise OSError("it has no pipes")
        child.stdin.write(msgspec.json.encode(AnnouncerTask(self._announcement, self._stall_limit_s)) + b"\n")
        os.set_blocking(child.stdin.fileno(), False)
        os.set_blocking(child.stdout.fileno(), False)
        rest = b""
        while not self._stopping.is_set() and child.poll() is None:
            with contextlib.suppress(BlockingIOError):
                os.write(child.stdin.fileno(), self._sign())
            *lines, rest = (rest + (child.stdout.read() or b"")).split(b"\n")
            for line in lines:
                self._on_line(line)
            self._adviser.advise(self._clock())
            self._stopping.wait(_SIGN_S)

    def _sign(self) -> bytes:
        """The sign of life for the child; logged when it changes, because no router explains why requests stop."""
        is_hung = self._is_hung()
        if is_hung is not self._was_hung:
            self._was_hung = is_hung
            _logger.warning(
                "discovery: the engine %s", "hangs; routers are sent a goodbye" if is_hung else "goes on; registering"
            )
        return HUNG if is_hung else ALIVE

    def _on_line(self, line: bytes) -> None:
        """A line may be torn when the child could not wait for us."""
        with contextlib.suppress(msgspec.MsgspecError):
            self._adviser.on_event(msgspec.json.decode(line, type=RouterEvent), self._clock())


def _announcement(
    registration: Registration,
    routers: Sequence[str],
    heartbeat_s: float,
    cluster_key: ClusterKey | None,
    tls_dir: Path | None,
) -> Announcement:
    for router in routers:
        wrong = check_http_address(router)
        if wrong is not None:
            raise ConfigError(f"router address {router!r} {wrong}; give the router's discovery address as host:port")
    if not 0 < heartbeat_s <= LONGEST_HEARTBEAT_S:
        raise ConfigError(f"heartbeat_s is {heartbeat_s}; it must be above 0 and at most 3, routers forget silent instances")
    # What cannot be used is refused here rather than in the child: a key that is too short, certificates that have expired.
    Seal(cluster_key)
    cluster_tls(tls_dir)
    where = "" if tls_dir is None else str(tls_dir)
    # The child follows a file by itself.
    fixed, file = (None, str(cluster_key.path)) if isinstance(cluster_key, KeyFile) else (cluster_key, "")
    if fixed is not None and not isinstance(fixed, bytes):
        raise Bug(f"{cluster_key!r} cannot be followed by another process")
    return Announcement(registration, tuple(dict.fromkeys(routers)), heartbeat_s, fixed, where, file)


def _spawn() -> subprocess.Popen[bytes]:
    """The child with this very kvbaton, and nothing else of this process's import path."""
    path = os.pathsep.join(filter(None, (str(Path(kvbaton.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", "kvbaton.discovery.announcer_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, "PYTHONPATH": path},
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    """Closing its input makes the child send a goodbye and end."""
    with contextlib.suppress(OSError):
        if child.stdin is not None:
            child.stdin.close()
    try:
        child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(_STOP_S)
