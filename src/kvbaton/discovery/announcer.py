"""The instance's voice: registers with every router, keeps sending heartbeats, and says goodbye.

`Announcer` has a small process do it (`beating.py`). An interpreter may stand still for longer than routers are patient: a
long call into native code that keeps the lock, a busy machine, a collection of garbage. A thread of the same interpreter,
or a socket library's, cannot speak then; another process can. It ends, with a goodbye, when this one does, however that
happens. `ThreadAnnouncer` does the same on a thread of this process: lighter, and for tests.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import msgspec

from kvbaton.discovery.beating import Beats
from kvbaton.discovery.messages import Registration, TransferMode, check_http_address, encode_registration
from kvbaton.errors import ConfigError

__all__ = ["Announcer", "DEFAULT_HEARTBEAT_S", "ThreadAnnouncer"]

_logger = logging.getLogger(__name__)

DEFAULT_HEARTBEAT_S = 1.5
"""Real routers forget an instance 4 to 5 s after its last message; at this interval one lost heartbeat is harmless."""

_SIGN_S = 1.0
_STALL_S = 60.0
_ADVICE_S = 60.0
_RESTART_S = 1.0
_JOIN_S = 5.0


class _Voice:
    """What both announcers have in common: the checks, the frames, and one thread between `start` and `stop`."""

    def __init__(
        self,
        registration: Registration,
        routers: Sequence[str],
        heartbeat_s: float = DEFAULT_HEARTBEAT_S,
        clock: Callable[[], float] = time.monotonic,
        is_used: Callable[[], bool] | None = None,
    ) -> None:
        for router in routers:
            wrong = check_http_address(router)
            if wrong is not None:
                raise ConfigError(f"router address {router!r} {wrong}; give the router's discovery address as host:port")
        if not 0 < heartbeat_s <= 3:
            raise ConfigError(
                f"heartbeat_s is {heartbeat_s}; it must be above 0 and at most 3, routers forget silent instances"
            )
        self._hello = encode_registration(msgspec.structs.replace(registration, bye=False))
        self._goodbye = encode_registration(msgspec.structs.replace(registration, bye=True))
        self._mode = registration.transfer_mode
        self._name = f"{registration.type.word} instance {registration.http_address}"
        self._routers = tuple(routers)
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._is_used = is_used
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to register; returns at once, whether or not a router is there. Do it when the engine is healthy."""
        if self._thread is None and self._routers:
            self._thread = threading.Thread(target=self._run, name="kvbaton-announcer", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Say goodbye to every router that can be reached, and end. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    @property
    def is_alive(self) -> bool:
        """Whether heartbeats are being sent."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _run(self) -> None:
        raise NotImplementedError


class ThreadAnnouncer(_Voice):
    """Registers `registration` with every router from `start` on until `stop`, on a thread of this process."""

    def _run(self) -> None:
        beats = Beats(self._name, self._routers, self._hello, self._goodbye, self._heartbeat_s, self._clock)
        try:
            while not self._stopping.is_set():
                self._stopping.wait(beats.beat())
            beats.say_goodbye()
        finally:
            beats.close()


class Announcer(_Voice):
    """Registers `registration` with every router from `start` on until `stop`, from a process of its own.

    `is_used` tells whether a request has come; when none has for long, advice is logged: routers do not answer, so an
    instance that they ignore cannot know.
    """

    def _run(self) -> None:
        advice_at = self._clock() + _ADVICE_S
        while not self._stopping.is_set():
            process = self._begin()
            try:
                while process.poll() is None and not self._stopping.is_set():
                    if not self._give_sign(process):
                        break
                    advice_at = self._advise(advice_at)
                    self._stopping.wait(_SIGN_S)
            finally:
                _end(process)
            if not self._stopping.is_set():
                _logger.warning("discovery: the process that sends heartbeats ended; starting another")
                self._stopping.wait(_RESTART_S)

    def _begin(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-m", "kvbaton.discovery.beating"], stdin=subprocess.PIPE)
        orders = {
            "name": self._name,
            "routers": self._routers,
            "hello": self._hello.hex(),
            "goodbye": self._goodbye.hex(),
            "heartbeat_s": self._heartbeat_s,
            "stall_s": _STALL_S,
        }
        assert process.stdin is not None  # noqa: S101
        with contextlib.suppress(OSError):
            process.stdin.write(json.dumps(orders).encode() + b"\n")
            process.stdin.flush()
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def _give_sign(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.stdin is not None  # noqa: S101
        try:
            os.write(process.stdin.fileno(), b".")
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def _advise(self, advice_at: float) -> float:
        if self._is_used is None or self._clock() < advice_at:
            return advice_at
        if not self._is_used():
            _logger.warning(
                "discovery: %s has been registered for %.0f s as %s, and no request has come. Routers do not say so when they"
                " refuse an instance: look at /instances of a kvbaton router. A vllm-router keeps the transfer mode of the"
                " first instance that it saw; if that is not %s, restart the router, or this instance with --mode %s",
                self._name,
                _ADVICE_S,
                self._mode,
                self._mode,
                next(mode.mode for mode in TransferMode if mode is not self._mode),
            )
        return float("inf")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Closing its input tells it to say goodbye; it is given a moment for that."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    try:
        process.wait(_JOIN_S - 1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
