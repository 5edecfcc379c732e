"""Ranks in processes of their own, as production runs them: `RemoteRanks`, `RankLoop` and `Channel`, on a virtual socket.

What is simulated is what lies between and around these three: how long a frame is under way, that a process stands still or
dies with frames in flight, and when a loop gets its turn. Frames arrive whole; that a channel may be full is not simulated.
"""

from __future__ import annotations

import math
import select
import struct
from collections.abc import Callable
from typing import Any

from kvbaton.agent.channel import Channel, ChannelClosed, ChannelStuck
from kvbaton.agent.rank import RankAgent
from kvbaton.agent.rank_orders import RankReport
from kvbaton.agent.rank_sets import RankLoop
from kvbaton.errors import KVBatonError
from kvbaton.sim.world import SimProcess, World

__all__ = ["RankProcess", "SimSocket", "channel_on", "socket_pair"]

_WORK_S = 1e-4
_HEADER = struct.Struct("<Q")


class SimSocket:
    """One end of a virtual socket pair, without a descriptor of the system: what it would wait for is known here."""

    def __init__(self, world: World, process: SimProcess, lag_s: float) -> None:
        self._world = world
        self.process = process
        self._lag_s = lag_s
        self._other: SimSocket | None = None
        self._unsent = bytearray()
        self._arrived = bytearray()
        self._is_over = False
        self._arrives_at = 0.0
        self.on_arrival: Callable[[], None] = lambda: None

    def connect(self, other: SimSocket) -> None:
        """Make the two ends of a pair known to each other."""
        self._other = other

    def setblocking(self, is_blocking: bool) -> None:
        """It never blocks."""
        del is_blocking

    def fileno(self) -> int:
        """A number that no other end has; the system does not know it."""
        return id(self)

    @property
    def is_readable(self) -> bool:
        """Whether something has arrived, or the other end is closed."""
        return bool(self._arrived) or self._is_over

    def send(self, data: memoryview) -> int:
        """Take everything; a frame is under way when it is whole."""
        if self._other is None or self._is_over:
            raise BrokenPipeError("the other end is closed")
        self._unsent += data
        while len(self._unsent) >= _HEADER.size:
            end = _HEADER.size + _HEADER.unpack_from(self._unsent)[0]
            if len(self._unsent) < end:
                break
            self._deliver(self._other, bytes(self._unsent[:end]))
            del self._unsent[:end]
        return len(data)

    def recv_into(self, view: memoryview) -> int:
        if not self._arrived:
            if self._is_over:
                return 0
            raise BlockingIOError
        count = min(len(view), len(self._arrived))
        view[:count] = self._arrived[:count]
        del self._arrived[:count]
        return count

    def close(self) -> None:
        """Close this end, or have the system close it because its process is dead: the other end notices in a while."""
        other, self._other = self._other, None
        if other is not None:
            self._deliver(other, b"")

    def hold(self, until: float) -> None:
        """Let what is sent from now on arrive then, at the earliest."""
        self._arrives_at = max(self._arrives_at, until)

    def _deliver(self, other: SimSocket, frame: bytes) -> None:
        """Let a frame, or the end, arrive in order; what a dead process has sent arrives all the same."""
        self._arrives_at = max(self._arrives_at, self._world.now + self._world.random.uniform(0.0, self._lag_s))
        self._world.at(self._arrives_at, other.process, lambda: other._arrive(frame))

    def _arrive(self, frame: bytes) -> None:
        self._arrived += frame
        self._is_over = self._is_over or not frame
        self.on_arrival()


def socket_pair(world: World, one: SimProcess, other: SimProcess, lag_s: float) -> tuple[SimSocket, SimSocket]:
    """Two ends, one for each process."""
    ends = SimSocket(world, one, lag_s), SimSocket(world, other, lag_s)
    ends[0].connect(ends[1])
    ends[1].connect(ends[0])
    return ends


class _SimChannel(Channel):
    """The channel of production; it asks its virtual socket, and not the system, whether something has arrived."""

    _socket: Any

    def _wait_ready(self, events: int, timeout_s: float) -> int:
        del timeout_s
        return events & select.POLLIN if self._socket.is_readable else 0


def channel_on(end: SimSocket, peer: str) -> Channel:
    """The channel of production on one end."""
    connected: Any = end
    return _SimChannel(connected, peer)


class RankProcess(RankLoop):
    """The loop of production in a process that can stand still and die; it has a turn when something has come or is due."""

    def __init__(
        self, world: World, end: SimSocket, agent: RankAgent, reports: list[RankReport], fail: Callable[[Exception], None]
    ) -> None:
        # Not that of the loop: it makes a thread, an agent on the real clock, and a memory of bytes.
        self._channel = channel_on(end, "the coordinator")
        self._reports = reports
        self.agent = agent
        self.errors_total = 0
        self.process = end.process
        self._world = world
        self._fail = fail
        self._end = end
        self.paused_until = 0.0
        self._wakes_at = math.inf
        self._is_waiting = False
        end.on_arrival = self.wake

    def wake(self) -> None:
        """An order has arrived, the coordinator is gone, or the transport has completed something."""
        if self._world.now < self.paused_until:
            if not self._is_waiting:
                self._is_waiting = True
                self._world.at(self.paused_until, self.process, self._go_on)
            return
        try:
            self._turn()
        except (ChannelClosed, ChannelStuck):
            self.die()
        else:
            self._arm()

    def hold_reports(self, until: float) -> None:
        """Let the rank go on, and its reports be under way until then."""
        self._end.hold(until)

    def die(self) -> None:
        """Be gone at once, with whatever was in flight; the coordinator notices that its channel is closed."""
        self.process.is_alive = False
        self.process.died_at = self._world.now
        self._end.close()

    def _go_on(self) -> None:
        self._is_waiting = False
        self.wake()

    def _guarded(self, work: Callable[[], None]) -> None:
        super()._guarded(lambda: self._noted(work))

    def _noted(self, work: Callable[[], None]) -> None:
        """An error that has a name fails no other hand-off; any other one is a mistake, although a loop survives it."""
        try:
            work()
        except KVBatonError:
            raise
        except Exception as error:
            self._fail(error)
            raise

    def _arm(self) -> None:
        deadline = self.agent.next_deadline()
        when = math.inf if deadline is None else max(self._world.now + 1e-6, self.process.clock.world(deadline))
        when = min(when, self._world.now + _WORK_S) if self.agent.has_work else when
        if when < self._wakes_at:
            self._wakes_at = when
            self._world.at(when, self.process, self._on_alarm)

    def _on_alarm(self) -> None:
        self._wakes_at = math.inf
        self.wake()
