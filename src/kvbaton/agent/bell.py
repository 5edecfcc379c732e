"""The bell that wakes the agents' thread: at once, or within half a millisecond for what need not leave alone.

An engine reports spans while it computes. Rung at once, the first of a burst wakes the agents' thread in the middle of a step:
it takes the interpreter's lock from the engine whenever that gives it up for a moment, sends one span in a frame of its own,
and is behind when the last one comes, which is what the target waits for. So spans ring with a delay, in which a burst is
complete, and which is much shorter than a layer that takes its time; the end of a prefill rings at once.

What rings later is a timer of the system. What rings at once is a counter of it, because to set a timer takes four times as
long, in a virtual machine above all. Both calls keep the interpreter's lock: an engine that calls its agents goes on.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Sequence

from kvbaton.errors import ConfigError

__all__ = ["SOON_S", "TimerBell"]

SOON_S = 0.0005
"""How long after `set_soon` it rings at the latest."""

_NEVER, _SOON, _NOW = 0, 1, 2
_Spec = ctypes.c_long * 4
"""`struct itimerspec`: the interval and the time, each in seconds and nanoseconds."""

_OFF = _Spec(0, 0, 0, 0)


class TimerBell:
    """Two file descriptors, one of which is readable while it rings. Safe to use from any thread, also after `close`.

    Raises ConfigError where the system gives no timer.
    """

    def __init__(self) -> None:
        system = ctypes.PyDLL(None, use_errno=True)
        self._settime, self._write, self._read = system.timerfd_settime, system.eventfd_write, system.eventfd_read
        self._settime.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        self._write.argtypes = [ctypes.c_int, ctypes.c_uint64]
        self._read.argtypes = [ctypes.c_int, ctypes.c_void_p]
        self._lock = threading.Lock()
        self._state = _NEVER
        self._has_timer = False
        self._count = ctypes.c_uint64()
        self._soon = _Spec(0, 0, 0, int(SOON_S * 1e9))
        self._fds = [int(system.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))]
        self._fds.append(int(system.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)))
        if min(self._fds) < 0:
            reason = os.strerror(ctypes.get_errno())
            self.close()
            raise ConfigError(f"no timer for the agents' thread: {reason}; raise `ulimit -n`")

    @property
    def fds(self) -> Sequence[int]:
        """The descriptors to wait on; none once closed."""
        return self._fds

    def set(self) -> None:
        """Ring now."""
        # Without the lock: a `clear` that is under way may undo what is set, but its caller looks for the reason next.
        if self._state == _NOW:
            return
        with self._lock:
            if self._state != _NOW and self._fds:
                self._state = _NOW
                self._write(self._fds[1], 1)

    def set_soon(self) -> None:
        """Ring within `SOON_S`."""
        if self._state != _NEVER:
            return
        with self._lock:
            if self._state == _NEVER and self._fds:
                self._state, self._has_timer = _SOON, True
                self._settime(self._fds[0], 0, self._soon, None)

    def clear(self) -> None:
        """Ring no longer. Look for reasons afterwards: a `set` while this runs may have no effect."""
        if self._state == _NEVER:
            return
        with self._lock:
            if not self._fds:
                return
            if self._state == _NOW:
                self._read(self._fds[1], ctypes.byref(self._count))
            if self._has_timer:
                self._has_timer = False
                self._settime(self._fds[0], 0, _OFF, None)
            self._state = _NEVER

    def close(self) -> None:
        """Give the descriptors back. Idempotent."""
        with self._lock:
            fds, self._fds = self._fds, []
        for fd in fds:
            if fd >= 0:
                os.close(fd)
