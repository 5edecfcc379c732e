"""Standard output for a command that must go on whatever becomes of it: closed, full, or held up by what reads it.

Threads that print only queue their text. One writer thread writes it, so that an output which takes no bytes holds up that
thread and no other. Lines that could not be written are counted and reported once: when writing works again, or at the end on
standard error. Bytes go to the descriptor itself. In the buffer of `sys.stdout` they would fail once more when the interpreter
ends, and change the exit code.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading

__all__ = ["SafeOutput", "flush_outputs"]

_QUEUED_PIECES = 1024
_FLUSH_S = 2.0
_REPORT_S = 1.0
_STDERR = 2
_TOO_SLOW = "standard output takes no more, or is too slow"


class SafeOutput(contextlib.AbstractContextManager["SafeOutput"]):
    """A text file for a `rich` console whose `write` never raises and never waits; leaving it writes what is queued.

    Without a descriptor (standard output was closed when the command was started) everything is lost.
    """

    def __init__(self, descriptor: int | None = None, report_descriptor: int = _STDERR) -> None:
        self._descriptor = _stdout_descriptor() if descriptor is None else descriptor
        self._report_descriptor = report_descriptor
        self.encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        self._queue: queue.Queue[str | None] = queue.Queue(_QUEUED_PIECES)
        self._lock = threading.Lock()
        self._lost = 0
        self._reason = ""
        self._is_closing = False
        self._writer = threading.Thread(target=self._run, name="output", daemon=True)
        self._writer.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def isatty(self) -> bool:
        """Whether a person watches: then colours are used."""
        try:
            return self._descriptor is not None and os.isatty(self._descriptor)
        except OSError:
            return False

    def write(self, text: str) -> int:
        """Queue a piece of text; it is lost, and counted, when too much is queued already."""
        try:
            self._queue.put_nowait(text)
        except queue.Full:
            self._lose(_TOO_SLOW)
        return len(text)

    def flush(self) -> None:
        """Nothing to do: the writer thread writes as soon as it can."""

    def close(self) -> None:
        """Write what is queued, as far as that goes within two seconds, and report what was lost on standard error."""
        self._is_closing = True
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._writer.join(_FLUSH_S)
        left = self._queue.qsize() if self._writer.is_alive() else 0
        if self._lost + left:
            reason = self._reason or _TOO_SLOW
            # In a thread of its own: standard error is often the same terminal, file or pipe.
            text = f"kvbaton: lines of output lost: {self._lost + left} ({reason})\n"
            report = threading.Thread(target=self._report, args=(text,), name="output-report", daemon=True)
            report.start()
            report.join(_REPORT_S)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            # All that is queued in one write: after each the interpreter may let the threads that print run on for 5 ms, and in
            # a burst of lines a write for each of them would fall behind until the queue is full.
            pieces = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    pieces.append(self._queue.get_nowait())
            is_last = None in pieces or (self._is_closing and self._queue.empty())
            self._write([piece for piece in pieces if piece is not None])

    def _write(self, pieces: list[str]) -> None:
        if not pieces:
            return
        with self._lock:
            lost, reason = self._lost, self._reason
        text = "".join(pieces)
        if lost:
            text = f"\nkvbaton: lines of output lost here: {lost} ({reason})\n{text}"
        try:
            self._write_all(text)
        except OSError as error:
            self._lose(error.strerror or str(error), len(pieces))
        else:
            with self._lock:
                self._lost -= lost

    def _write_all(self, text: str) -> None:
        if self._descriptor is None:
            raise OSError("standard output is closed")
        content = text.encode(self.encoding, errors="replace")
        while content:
            content = content[os.write(self._descriptor, content) :]

    def _report(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._report_descriptor, text.encode(errors="replace"))

    def _lose(self, reason: str, pieces: int = 1) -> None:
        with self._lock:
            self._lost += pieces
            self._reason = reason


def flush_outputs() -> bool:
    """Write what standard output and standard error still hold; false when standard output does not take it.

    What cannot be written is dropped here. The interpreter would try it again at its end, and exit with code 120.
    """
    written = []
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
            written.append(True)
        except (OSError, ValueError):
            written.append(False)
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
    return written[0]


def _stdout_descriptor() -> int | None:
    # Not simply 1: when standard output was closed at the start, 1 is the first file or socket that this process has opened.
    try:
        return None if sys.stdout is None else sys.stdout.fileno()
    except OSError:
        return None
