"""Lanes: the threads that drive a library's transfers, each with an engine of its own to one peer.

Theory of operation. The libraries behind `nixl`, `mooncake` and `mori` start a transfer and then have to be asked whether it
has ended; NIXL and MoRI return at once from both calls, and a lane uses them as they are: `start`, then `is_done` again and
again, more rarely while nothing moves. Mooncake's asynchronous call reports the first run of a batch only, so its `start`
waits.

Why a thread per lane, and not one thread that asks all transfers in turn:

- Between processes of one host UCX copies in the thread that asks. One thread would copy for all peers, one after another, and
  use one core. Two lanes on two threads move 1.3 to 1.7 times what NIXL moves with one agent on two cores.
- To open a session, all three libraries may wait for the peer. A peer that is stopped must hold up no other.

Why an engine per lane: none of the libraries has a call that stops a transfer, and a batch that has failed may leave some of
its runs on their way. Ending the engine stops them here. Hence a failure is reported only when the engine is gone: this side's
memory is quiet then. Nor may two threads use one of NIXL's agents at once.

Why a mark slot per lane: two lanes read the peer's mark at the same time. In one slot, the right mark that one of them read
could hide the wrong one of the other, which has reached another process.
"""

from __future__ import annotations

import enum
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvbaton.errors import Bug, KVBatonError, PeerLost, QueueFull
from kvbaton.transport.base import Direction, Runs
from kvbaton.transport.runs import RunCursor

__all__ = ["Lane", "LaneSlice", "MarkCheck", "PeerEngine", "cut"]

_BACK_OFF_S, _LONGEST_BACK_OFF_S = 0.001, 0.05
_JOIN_S = 0.005
_MANY_RUNS = 128
_SPINS, _FEW_SPINS = 200, 32
_BUSY_POLL_S = 0.000005
_NAP_S, _LONGEST_NAP_S = 0.00005, 0.002
_NAP_PER_WAIT = 1 / 32


class PeerEngine(Protocol):
    """A library's engine for one peer, with one transfer at a time; used by one thread. All but `close` raise KVBatonError."""

    is_bound: bool
    """Whether it reaches the process that it was opened to, and never another that has taken its place."""

    def open(self) -> None:
        """Open a session with the peer; may wait for the peer. Moves nothing."""

    def start(self, direction: Direction, runs: Runs) -> None:
        """Begin to move `runs`."""

    def start_mark(self, runs: Runs) -> None:
        """Begin to read the peer's mark; `runs` are the same each time."""

    def is_done(self) -> bool:
        """Whether the last byte of what was started has arrived, after a step of progress.

        Raises QueueFull when the library does not take so many runs at a time; what it took may still be moving.
        """

    def close(self) -> None:
        """End it; afterwards nothing moves here."""


@dataclass(frozen=True, slots=True, eq=False)
class MarkCheck:
    """How a lane reads the peer's mark (`runs`), compares it (`check` raises PeerLost), and frees its slot in the end."""

    runs: Runs
    check: Callable[[], None]
    free: Callable[[], None]


class _State(enum.Enum):
    WAITING = enum.auto()
    MOVING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class LaneSlice:
    """What one lane moves of a slice, and its state; `wake` is called when it has ended. Safe to use from any thread.

    `is_first` and `is_last`: whether it belongs to the first or the last slice of a batch.
    """

    def __init__(
        self, direction: Direction, runs: Runs, wake: Callable[[], None], *, is_first: bool = False, is_last: bool = False
    ) -> None:
        self.direction = direction
        self.runs = runs
        self.is_first = is_first
        self.is_last = is_last
        self._wake = wake
        self._lock = threading.Lock()
        self._state = _State.WAITING
        self._error: KVBatonError | None = None

    def begin(self) -> bool:
        """Note that bytes move from now on; False when it was given up before."""
        with self._lock:
            if self._state is _State.WAITING:
                self._state = _State.MOVING
            return self._state is _State.MOVING

    def end(self, error: KVBatonError | None = None) -> None:
        """Note that nothing moves any more; only the first call has an effect."""
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


class Lane:
    """Moves one slice after another until the first failure or `close`; at most `most_runs` at a time, fewer if need be.

    `timeout_s` limits how long a transfer may take, and how long a library whose queue is full is asked again.
    """

    def __init__(
        self, name: str, make_engine: Callable[[], PeerEngine], most_runs: int, timeout_s: float, mark: MarkCheck | None = None
    ) -> None:
        self.owes_mark = False
        """Whether the slices that were given to it so far leave the mark to be read; for the thread that gives it slices."""
        self._name = name
        self._make_engine = make_engine
        self._most_runs = most_runs
        self._timeout_s = timeout_s
        self._mark = mark
        self._engine: PeerEngine | None = None
        self._slices: queue.SimpleQueue[LaneSlice | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended: KVBatonError | None = None
        self._is_opening = False
        self._is_proven = False
        self._thread = threading.Thread(target=self._run, name=f"kvbaton-{name}-lane", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether it takes slices."""
        return not self._ended

    @property
    def is_over(self) -> bool:
        """Whether its thread has ended."""
        return not self._thread.is_alive()

    def move(self, piece: LaneSlice) -> None:
        """Take another one."""
        with self._lock:
            if self._ended:
                piece.end(self._ended)
            else:
                self._slices.put(piece)
                self.owes_mark = not piece.is_last

    def close(self) -> None:
        """Begin nothing more; what moves is moved to its end."""
        self._end(PeerLost("the session was ended"))
        self._slices.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait, once closed, until its thread has ended, at most `timeout_s`."""
        self._thread.join(max(0.0, timeout_s))

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait, once closed, until nothing moves and the engine is gone; True too while it only waits for a peer to answer."""
        until = time.monotonic() + timeout_s
        while self._thread.is_alive() and not self._is_opening:
            if time.monotonic() >= until:
                return False
            self._thread.join(_JOIN_S)
        return True

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
        if self._mark is not None:
            self._mark.free()

    def _end(self, why: KVBatonError) -> None:
        with self._lock:
            self._ended = self._ended or why

    def _serve(self, piece: LaneSlice) -> None:
        try:
            engine = self._opened()
            with self._lock:
                # Under the lock, so that a `close` in between either sees the slice begin or keeps it from beginning.
                self._refuse_when_ended()
                if not piece.begin():
                    return
            if piece.direction is Direction.WRITE and not self._is_proven and (piece.is_first or engine.is_bound):
                self._read_mark()
            self._move(piece)
            if piece.is_last:
                self._read_mark()
        except Exception as error:  # noqa: BLE001 - a library may raise anything; it becomes the end of the slice
            problem = _bare(error)
            error.__traceback__ = error.__cause__ = error.__context__ = None  # frames hold what keeps an engine alive
            try:
                self._close_engine()
            finally:
                piece.end(problem)
            raise problem from None
        piece.end()

    def _move(self, piece: LaneSlice) -> None:
        """Move all of it. A full queue ends the engine, so that nothing is moved twice; a new one is given half as many.

        A write goes on only when the new engine has shown that it reaches the same peer.
        """
        at, back_off_s, until = 0, _BACK_OFF_S, time.monotonic() + self._timeout_s
        while at < len(piece.runs):
            part = piece.runs[at : at + self._most_runs]
            try:
                if self._engine is None and piece.direction is Direction.WRITE:
                    self._read_mark()
                self._opened().start(piece.direction, part)
                self._wait()
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

    def _read_mark(self) -> None:
        """Read the peer's mark, where the library can, and compare it."""
        if self._mark is None:
            return
        engine = self._opened()
        engine.start_mark(self._mark.runs)
        self._wait()
        self._mark.check()
        self._is_proven = engine.is_bound

    def _wait(self) -> None:
        """Ask until the transfer has ended: all the time while asking moves bytes, and ever more rarely while nothing moves.

        Asking that takes long is how a copy by this thread shows. A nap is at most a small part of the time that was waited so
        far: an end is noticed soon after it, and a peer that is stopped costs no core.
        """
        engine = self._opened()
        began = asked_since = time.monotonic()
        asked, nap_s, spins = 0, _NAP_S, _SPINS
        while not engine.is_done():
            asked += 1
            if asked < spins:
                continue
            now = time.monotonic()
            if now - began >= self._timeout_s:
                raise PeerLost(f"{self._name}: no progress within {self._timeout_s:g} s")
            if now - asked_since > asked * _BUSY_POLL_S:
                nap_s, spins = _NAP_S, _SPINS
            else:
                nap_s, spins = min(2 * nap_s, _LONGEST_NAP_S, max(_NAP_S, (now - began) * _NAP_PER_WAIT)), _FEW_SPINS
            time.sleep(nap_s)
            asked, asked_since = 0, time.monotonic()

    def _opened(self) -> PeerEngine:
        """The engine, opened if need be. `wait_quiet` does not wait for that, so it is not used when closed in the meantime."""
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

    def _refuse_when_ended(self) -> None:
        if self._ended is not None:
            raise _bare(self._ended)

    def _close_engine(self) -> None:
        self._is_proven = False
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def cut(runs: Runs, count: int) -> list[Runs]:
    """`runs` in at most `count` parts of about as many bytes: between runs where there are many, else within them."""
    if len(runs) >= _MANY_RUNS * count:
        ends = np.cumsum(runs[:, 2], dtype=np.int64)
        places = np.searchsorted(ends, [int(ends[-1]) * part // count for part in range(1, count)], side="right")
        return [part for part in np.split(runs, places) if len(part)]
    cursor = RunCursor(runs)
    share = -(-cursor.total_bytes // count)
    parts = []
    while cursor.remaining_bytes:
        part = cursor.peek(share, len(runs) + 1)
        cursor.advance(int(part[:, 2].sum()))
        parts.append(part)
    return parts


def _bare(error: Exception) -> KVBatonError:
    """An error without its history, under its own name where it is one of ours; a foreign one is called a bug."""
    if isinstance(error, KVBatonError):
        return type(error)(str(error))
    return Bug(f"{type(error).__name__}: {error}")
