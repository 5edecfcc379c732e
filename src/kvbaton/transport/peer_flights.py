"""What the mover starts and asks: slices over the lanes of each peer, and the engine that serves peers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from kvbaton.errors import QueueFull, TransportError
from kvbaton.transport.base import Direction, PeerRank, Runs, TransportSettings
from kvbaton.transport.lanes import Lane, LaneSlice, MarkCheck, PeerEngine, cut
from kvbaton.transport.marks import Marks

__all__ = ["LibraryPeer", "PeerFlights", "ServingEngine"]

_SLICES = 4
"""A library moves so many slices at once: each peer has threads of its own, and waits for no other."""

_OPENING_S = 1.0
"""How long `shut_down` waits for lanes that are being opened; one whose peer is stopped ends by itself later."""

_NO_RUNS = np.empty((0, 3), np.uint64)


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


class PeerFlights:
    """Used by the mover's thread, which `wake` wakes when a part has ended. A flight is what the lanes move of one slice.

    `stop_s` is how long a slice that is given up may take until the library, or the lane, ends it. `idle_s` is how often peers
    have to be served, where that needs this process. `may_add_lane` is asked before a peer gets a second lane and more.
    """

    def __init__(
        self,
        name: str,
        serving: ServingEngine,
        marks: Marks,
        settings: TransportSettings,
        wake: Callable[[], None],
        *,
        slice_runs: int,
        stop_s: float,
        idle_s: float = 60.0,
        reads_marks: bool = True,
        most_lanes: int = 1,
        shared_bytes: int = 0,
        may_add_lane: Callable[[], bool] = lambda: True,
    ) -> None:
        """A slice of `shared_bytes` and more is cut into parts for up to `most_lanes` lanes."""
        self.idle_s = idle_s
        self.slice_bytes = _SLICES * settings.slice_bytes
        self.slice_runs = slice_runs
        self.stop_s = stop_s
        self._wake = wake
        self._name = name
        self._serving: ServingEngine | None = serving
        self._marks = marks
        self._settings = settings
        self._reads_marks = reads_marks
        self._most_lanes = most_lanes
        self._shared_bytes = shared_bytes
        self._may_add_lane = may_add_lane
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
        is_shared = self._most_lanes > 1 and int(runs[:, 2].sum()) >= self._shared_bytes
        self._add_lanes(link, self._most_lanes if is_shared else 1)
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
        """Serve peers."""
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
        while len(link.lanes) < count and (not link.lanes or self._may_add_lane()):
            self._lanes = [lane for lane in self._lanes if not lane.is_over]
            if len(self._lanes) >= 2 * self._settings.max_peers * self._most_lanes:
                raise QueueFull(f"{len(self._lanes)} {self._name} sessions are open or ending (2 x max_peers); try again")
            lane = Lane(self._name, link.make_engine, self.slice_runs, self._settings.timeout_s, self._mark_of(link))
            self._lanes.append(lane)
            link.lanes.append(lane)

    def _mark_of(self, link: LibraryPeer) -> MarkCheck | None:
        if not self._reads_marks:
            return None
        slot = self._marks.take_slot()
        check = functools.partial(self._marks.check, slot, link.mark, link)
        return MarkCheck(self._marks.run_to(slot), check, functools.partial(self._marks.free_slot, slot))
