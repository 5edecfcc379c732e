"""A file descriptor that is readable exactly while something waits to be noticed."""

from __future__ import annotations

import os
import select
import threading

__all__ = ["Wakeup"]

_READ_BYTES = 64


class Wakeup:
    """A flag with a file descriptor: readable while set. Safe to use from any thread, also after `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)

    @property
    def fd(self) -> int:
        """The descriptor to wait on; -1 once closed."""
        return self._read_fd

    @property
    def write_fd(self) -> int:
        """For threads in C: one byte makes the descriptor readable. What learns of the reason calls `was_written`."""
        return self._write_fd

    def was_written(self) -> None:
        """A byte was written to `write_fd`: `clear` has to take it."""
        with self._lock:
            self._is_set = self._read_fd >= 0

    def set(self) -> None:
        """Make the descriptor readable."""
        # Without the lock: a `clear` that is under way may undo it, but its caller looks for the reason next, which is there.
        if self._is_set:
            return
        with self._lock:
            # One byte at most: a pipe that is written for every completion would fill up, and block the mover.
            if not self._is_set and self._write_fd >= 0:
                # The flag first: a thread that the byte wakes must find it.
                self._is_set = True
                os.write(self._write_fd, b"\0")

    def clear(self) -> None:
        """Make the descriptor unreadable again. Look for reasons afterwards: a `set` while this runs may have no effect."""
        if not self._is_set:
            return
        with self._lock:
            if self._is_set and self._read_fd >= 0:
                try:  # not `suppress`, which takes as long as the read: this is on the way of every completion
                    while len(os.read(self._read_fd, _READ_BYTES)) == _READ_BYTES:
                        pass
                except BlockingIOError:  # a byte of `write_fd` may be taken before `was_written` is called
                    pass
                self._is_set = False

    def wait(self, timeout_s: float) -> None:
        """Wait until set, at most `timeout_s`."""
        poller = select.poll()
        poller.register(self._read_fd, select.POLLIN)
        poller.poll(max(0.0, timeout_s) * 1000)

    def close(self) -> None:
        """Give the descriptors back. Idempotent."""
        with self._lock:
            fds, self._read_fd, self._write_fd = (self._read_fd, self._write_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)
