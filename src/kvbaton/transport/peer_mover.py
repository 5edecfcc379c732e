"""One peer behind a library whose calls wait: an engine and a thread of its own.

Libraries such as Mooncake and MoRI have no call that stops a transfer, and a batch that has failed may leave some of its runs
on their way. Ending the engine stops them here. That is why every peer has one, and why a failure is told only when the engine
is gone: then this side's memory is quiet. A peer that stands still keeps its own thread waiting and nobody else.
"""

from __future__ import annotations

import enum
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvbaton.errors import Bug, KVBatonError, PeerLost, QueueFull
from kvbaton.transport.base import Direction, Runs

__all__ = ["Look", "MarkCheck", "PeerEngine", "PeerMover", "PeerSlice"]

Look = Callable[[], None]
"""Looks at the mark that was read last; raises PeerLost."""

_BACK_OFF_S = 0.001
_LONGEST_BACK_OFF_S = 0.05
_LOOK_S = 0.005


class PeerEngine(Protocol):
    """A library's engine for one peer; for one thread. All but `close` wait, and raise KVBatonError."""

    is_bound: bool
    """Whether it reaches the process that it was opened to, and never another that has taken its place."""

    def open(self) -> None:
        """Get to know the peer. Moves nothing."""

    def move(self, direction: Direction, runs: Runs) -> None:
        """Move `runs` to their last byte; QueueFull when the library takes fewer at a time."""

    def read_mark(self, runs: Runs, look: Look) -> None:
        """Read the peer's mark, and look at it; over every session that has moved bytes since, or has moved none yet."""

    def close(self) -> None:
        """End it; afterwards nothing moves here."""


@dataclass(frozen=True, slots=True, eq=False)
class MarkCheck:
    """How the peer's mark is read (`runs`) and looked at (`look` raises PeerLost), and whether before a slice or after it.

    Before a slice it is not looked at again where the engine is bound to a peer that has shown its mark; in the middle of a
    write only where the engine had to be opened anew.
    """

    runs: Runs
    look: Look
    before: bool
    after: bool


class _State(enum.Enum):
    WAITING = enum.auto()
    MOVING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class PeerSlice:
    """One slice and how far it is; `wake` is called when it has ended. Safe to use from any thread."""

    def __init__(self, direction: Direction, runs: Runs, wake: Callable[[], None], mark: MarkCheck | None = None) -> None:
        self.direction = direction
        self.runs = runs
        self.mark = mark
        self._wake = wake
        self._lock = threading.Lock()
        self._state = _State.WAITING
        self._error: KVBatonError | None = None

    def begin(self) -> bool:
        """Say that bytes move from now on; False when nobody wants them any more."""
        with self._lock:
            if self._state is _State.WAITING:
                self._state = _State.MOVING
            return self._state is _State.MOVING

    def end(self, error: KVBatonError | None = None) -> None:
        """Say that nothing moves any more; the first word counts."""
        with self._lock:
            if self._state in (_State.WAITING, _State.MOVING):
                self._state, self._error = _State.FAILED if error else _State.DONE, error
        self._wake()

    def give_up(self) -> bool:
        """Make sure that nothing moves, now or later; False while bytes are on their way."""
        with self._lock:
            if self._state is _State.WAITING:
                self._state, self._error = _State.FAILED, PeerLost("given up")
            return self._state is not _State.MOVING

    def is_done(self) -> bool:
        """Whether every byte is where it belongs. Raises KVBatonError when that will not be."""
        with self._lock:
            if self._error is not None:
                raise _bare(self._error)
            return self._state is _State.DONE


class PeerMover:
    """Moves one slice after another until the first failure or `close`; at most `most_runs` at a time, fewer if need be.

    `timeout_s` limits how long a library whose queue is full is asked again.
    """

    def __init__(self, name: str, make_engine: Callable[[], PeerEngine], most_runs: int, timeout_s: float) -> None:
        self._make_engine = make_engine
        self._most_runs = most_runs
        self._timeout_s = timeout_s
        self._engine: PeerEngine | None = None
        self._slices: queue.SimpleQueue[PeerSlice | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended: KVBatonError | None = None
        self._is_opening = False
        self._is_met = False
        self._thread = threading.Thread(target=self._run, name=f"kvbaton-{name}-peer", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether it takes slices."""
        return not self._ended

    def move(self, piece: PeerSlice) -> None:
        """Take another one."""
        with self._lock:
            if self._ended:
                piece.end(self._ended)
            else:
                self._slices.put(piece)

    def close(self) -> None:
        """Begin nothing more; what moves is moved to its end."""
        self._end(PeerLost("the session was ended"))
        self._slices.put(None)

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait, once closed, until nothing moves and the engine is gone; True too while it only waits for a peer to answer."""
        until = time.monotonic() + timeout_s
        while self._thread.is_alive() and not self._is_opening:
            if time.monotonic() >= until:
                return False
            self._thread.join(_LOOK_S)
        return True

    @property
    def is_over(self) -> bool:
        """Whether its thread has ended."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (current := self._slices.get()) is not None:
                self._serve(current)
            self._close_engine()
        except Exception as error:  # noqa: BLE001 - the last resort: nothing may hang on a dead thread
            self._end(_bare(error))
        while not self._slices.empty():
            left = self._slices.get()
            if left is not None:
                left.end(self._ended)

    def _end(self, why: KVBatonError) -> None:
        with self._lock:
            self._ended = self._ended or why

    def _serve(self, piece: PeerSlice) -> None:
        try:
            self._opened()
            with self._lock:
                self._refuse_when_ended()
                if not piece.begin():
                    return
            if piece.mark is not None and piece.mark.before and not self._is_met:
                self._check(piece.mark)
            self._move(piece)
            if piece.mark is not None and piece.mark.after:
                self._check(piece.mark)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told and raised
            problem = _bare(error)
            error.__traceback__ = error.__cause__ = error.__context__ = None  # frames hold what keeps an engine alive
            try:
                self._close_engine()
            finally:
                piece.end(problem)
            raise problem from None
        piece.end()

    def _refuse_when_ended(self) -> None:
        if self._ended is not None:
            raise _bare(self._ended)

    def _check(self, mark: MarkCheck) -> None:
        engine = self._opened()
        engine.read_mark(mark.runs, mark.look)
        self._is_met = engine.is_bound

    def _move(self, piece: PeerSlice) -> None:
        """Move all of it. A full queue ends the engine, so that nothing is moved twice; a new one is given half as many.

        What is written goes on only when the new engine has shown that it reaches the same peer.
        """
        at, back_off_s, until = 0, _BACK_OFF_S, time.monotonic() + self._timeout_s
        while at < len(piece.runs):
            part = piece.runs[at : at + self._most_runs]
            try:
                if self._engine is None and piece.direction is Direction.WRITE and piece.mark is not None:
                    self._check(piece.mark)
                self._opened().move(piece.direction, part)
            except QueueFull as error:
                if time.monotonic() >= until:
                    raise PeerLost(f"{error}; no progress within {self._timeout_s:g} s") from error
                self._close_engine()
                self._most_runs = max(1, len(part) // 2)
                time.sleep(back_off_s)
                back_off_s = min(2 * back_off_s, _LONGEST_BACK_OFF_S)
            else:
                at += len(part)
                back_off_s, until = _BACK_OFF_S, time.monotonic() + self._timeout_s

    def _opened(self) -> PeerEngine:
        """The engine, opened if need be. Nobody waits for that, so it is not used when this was closed in the meantime."""
        if self._engine is None:
            self._is_opening = True
            try:
                self._engine = self._make_engine()
                self._engine.open()
            except BaseException:
                self._is_opening = False
                raise
            with self._lock:
                self._is_opening = False
                self._refuse_when_ended()
        return self._engine

    def _close_engine(self) -> None:
        self._is_met = False
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def _bare(error: Exception) -> KVBatonError:
    """An error without its history, under its own name where it is one of ours; a foreign one is called a bug."""
    if isinstance(error, KVBatonError):
        return type(error)(str(error))
    return Bug(f"{type(error).__name__}: {error}")
