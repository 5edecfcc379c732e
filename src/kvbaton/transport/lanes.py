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
import functools
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvbaton.errors import Bug, KVBatonError, PeerLost, QueueFull, TransportError
from kvbaton.transport.base import Direction, PeerRank, Region, Runs, TransportSettings
from kvbaton.transport.runs import RunCursor

__all__ = ["Lane", "LaneSlice", "LibraryPeer", "MARK_BYTES", "MarkCheck", "Marks", "PeerFlights", "ServingEngine", "cut"]

_BACK_OFF_S, _LONGEST_BACK_OFF_S = 0.001, 0.05
_JOIN_S = 0.005
_MANY_RUNS = 128
_SPINS, _FEW_SPINS = 200, 32
_BUSY_POLL_S = 0.000005
_NAP_S, _LONGEST_NAP_S = 0.00005, 0.002
_NAP_PER_WAIT = 1 / 32

MARK_BYTES = 8

_SLICES = 4
"""A library moves so many slices at once: each peer has threads of its own, and waits for no other."""

_OPENING_S = 1.0
"""How long `shut_down` waits for lanes that are being opened; one whose peer is stopped ends by itself later."""

_NO_RUNS = np.empty((0, 3), np.uint64)


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


# Marks: how one side notices that its peer has withdrawn its memory, or is another by now, where the library reports neither.
#
# Each side shows a random mark in memory of its own and clears it when it closes. A lane reads the mark after the last byte
# of a batch, and before it writes, into a slot that this lane alone has, and compares it with the one in the peer's endpoint.


class Marks:
    """This side's mark, and slots for the marks of peers, in one piece of memory. Safe to use from any thread.

    There are slots for twice as many peers as `max_peers`: a lane that is being ended keeps its slot until its engine is gone.
    """

    def __init__(self, max_peers: int, lanes: int = 1) -> None:
        self.mark = secrets.randbits(62) | 1
        size = MARK_BYTES * (1 + 2 * max_peers * lanes)
        self.region = Region.of(bytearray(self.mark.to_bytes(MARK_BYTES, "little").ljust(size, b"\0")))
        self._lock = threading.Lock()
        self._free = set(range(MARK_BYTES, size, MARK_BYTES))

    def take_slot(self) -> int:
        """The offset of a slot that is not in use. Raises TransportError when there is none."""
        with self._lock:
            if not self._free:
                raise TransportError("as many sessions are open, or ending, as may be (2 x max_peers); try again")
            return self._free.pop()

    def free_slot(self, slot: int) -> None:
        """Give a slot back."""
        with self._lock:
            self._free.add(slot)

    def run_to(self, slot: int) -> Runs:
        """The run that brings a peer's mark, which lies at the start of its memory, into `slot`."""
        return np.array([[0, slot, MARK_BYTES]], np.uint64)

    def check(self, slot: int, mark: int, peer: object) -> None:
        """Raise PeerLost unless `mark` came into `slot`."""
        found = int.from_bytes(self.region.view[slot : slot + MARK_BYTES], "little")
        if found != mark:
            raise PeerLost(f"{peer} has withdrawn its memory: its mark is {found:#x}, not {mark:#x}")

    def withdraw(self) -> None:
        """Clear this side's mark."""
        self.region.view[:MARK_BYTES] = bytes(MARK_BYTES)


class ServingEngine(Protocol):
    """The engine that hands out this side's memory."""

    def progress(self) -> None:
        """Serve peers, where that needs this process."""

    def close(self) -> None:
        """End it; afterwards no peer reads or writes here through it."""


class LibraryPeer:
    """A peer, the mark that it shows, and its lanes; there are none while there is no session."""

    def __init__(self, peer: PeerRank, mark: int, make_engine: Callable[[], PeerEngine]) -> None:
        self.peer = peer
        self.mark = mark
        self.make_engine = make_engine
        self.lanes: list[Lane] = []

    def __str__(self) -> str:
        return f"{self.peer.incarnation!r} rank {self.peer.rank}"


@dataclass(eq=False, repr=False)
class PeerFlights:
    """Used by the mover's thread, which `wake` wakes when a part has ended. A flight is what the lanes move of one slice.

    `stop_s` is how long a slice that is given up may take until the library, or the lane, ends it. `idle_s` is how often peers
    have to be served, where that needs this process. A slice of `shared_bytes` and more is cut into parts for up to
    `most_lanes` lanes; `may_add_lane` is asked before a peer gets a second one and more.
    """

    _name: str
    _serving: ServingEngine | None
    _marks: Marks
    _settings: TransportSettings
    _wake: Callable[[], None]
    slice_runs: int
    stop_s: float
    idle_s: float = 60.0
    reads_marks: bool = True
    most_lanes: int = 1
    shared_bytes: int = 0
    may_add_lane: Callable[[], bool] = lambda: True

    def __post_init__(self) -> None:
        self.slice_bytes = _SLICES * self._settings.slice_bytes
        self._lanes: list[Lane] = []

    def start(self, link: LibraryPeer, direction: Direction, runs: Runs, *, is_first: bool, is_last: bool) -> list[LaneSlice]:
        """Hand a slice to the peer's lanes, in parts where it is long; QueueFull when there are too many lanes just now.

        The first slice of a write is not begun before it is known that the peer is the one that is meant; the last slice of any
        batch is not done before it is known that the peer still hands its memory out.
        With the last slice of a batch every lane that has moved bytes since it last read the mark reads it again: a lane that
        has reached another process would not show in the mark that others read.
        """
        if not all(lane.is_open for lane in link.lanes):
            self.drop(link)
        is_shared = self.most_lanes > 1 and int(runs[:, 2].sum()) >= self.shared_bytes
        self._add_lanes(link, self.most_lanes if is_shared else 1)
        parts = cut(runs, len(link.lanes)) if is_shared else [runs]
        flight = []
        for number, lane in enumerate(link.lanes):
            if number >= len(parts) and not (is_last and lane.owes_mark):
                continue
            part = parts[number] if number < len(parts) else _NO_RUNS
            flight.append(LaneSlice(direction, part, self._wake, is_first=is_first, is_last=is_last))
            lane.move(flight[-1])
        return flight

    def is_done(self, flight: list[LaneSlice]) -> bool:
        """Whether every byte is where it belongs. Raises KVBatonError."""
        unfinished = [part for part in flight if not part.is_done()]
        return not unfinished

    def release(self, flight: list[LaneSlice]) -> bool:
        """Release a slice that is done, has failed or is given up; False while some of its bytes still move."""
        moving = [part for part in flight if not part.give_up()]
        return not moving

    def drop(self, link: LibraryPeer) -> None:
        """End the peer's lanes, each once it has moved to its end what it moves now; the next `start` makes new ones."""
        lanes, link.lanes = link.lanes, []
        for lane in lanes:
            lane.close()

    def progress(self) -> None:
        if self._serving is not None:
            self._serving.progress()

    def shut_down(self) -> None:
        """End every engine. Raises TransportError when bytes still move after `stop_s`."""
        for lane in self._lanes:
            lane.close()
        until = time.monotonic() + self.stop_s
        stuck = [lane for lane in self._lanes if not lane.wait_quiet(until - time.monotonic())]
        # A lane that is being opened moves nothing, but holds a thread and descriptors: most peers answer at once.
        until = time.monotonic() + _OPENING_S
        for lane in self._lanes:
            lane.join(until - time.monotonic())
        if self._serving is not None:
            self._serving.close()
            self._serving = None
        if stuck:
            raise TransportError(f"{self._name} does not release memory; end the process before that is used again")

    def _add_lanes(self, link: LibraryPeer, count: int) -> None:
        while len(link.lanes) < count and (not link.lanes or self.may_add_lane()):
            self._lanes = [lane for lane in self._lanes if not lane.is_over]
            if len(self._lanes) >= 2 * self._settings.max_peers * self.most_lanes:
                raise QueueFull(f"{len(self._lanes)} {self._name} sessions are open or ending (2 x max_peers); try again")
            lane = Lane(self._name, link.make_engine, self.slice_runs, self._settings.timeout_s, self._mark_of(link))
            self._lanes.append(lane)
            link.lanes.append(lane)

    def _mark_of(self, link: LibraryPeer) -> MarkCheck | None:
        if not self.reads_marks:
            return None
        slot = self._marks.take_slot()
        check = functools.partial(self._marks.check, slot, link.mark, link)
        return MarkCheck(self._marks.run_to(slot), check, functools.partial(self._marks.free_slot, slot))
