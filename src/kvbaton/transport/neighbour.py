"""A process of this host, named for good by host, pid and start time: how an endpoint names it, and whether it lives."""

from __future__ import annotations

import os
import select
from dataclasses import dataclass

from kvbaton.errors import PeerLost, TransportError
from kvbaton.transport.base import Endpoint
from kvbaton.transport.process_memory import host_id, start_ticks
from kvbaton.transport.queued import detail

__all__ = ["Neighbour", "NeighbourWatch"]


@dataclass(frozen=True, slots=True)
class Neighbour:
    """One process of one host; a recycled pid has another start time."""

    host: str
    pid: int
    ticks: int

    @classmethod
    def here(cls) -> Neighbour:
        """This process."""
        return cls(host_id(), os.getpid(), start_ticks(os.getpid()))

    @classmethod
    def of(cls, endpoint: Endpoint) -> Neighbour:
        """The process that an endpoint names; raises TransportError, naming the field, when it names none."""
        neighbour = cls(detail(endpoint, "host_id", str), detail(endpoint, "pid", int), detail(endpoint, "start_ticks", int))
        if not 0 < neighbour.pid < 1 << 31:
            raise TransportError(f"{endpoint.transport} endpoint: pid {neighbour.pid} is not usable; fetch its card again")
        return neighbour

    def details(self) -> dict[str, str | int]:
        """How an endpoint names this process; the inverse of `of`."""
        return {"host_id": self.host, "pid": self.pid, "start_ticks": self.ticks}

    def confirm(self) -> None:
        """Raise PeerLost unless this very process is alive."""
        ticks = start_ticks(self.pid)
        if ticks != self.ticks:
            raise PeerLost(f"process {self.pid} is another one now: it started at tick {ticks}, the peer at {self.ticks}")


class NeighbourWatch:
    """Checks whether a process still lives, a hundred times cheaper than `Neighbour.confirm`: through a descriptor of it.

    Raises PeerLost when it does not live now. Where the system has no such descriptors, it confirms each time.
    """

    def __init__(self, neighbour: Neighbour) -> None:
        self._neighbour = neighbour
        self._poll = select.poll()
        try:
            self._fd = os.pidfd_open(neighbour.pid)
        except OSError:
            self._fd = -1
        else:
            self._poll.register(self._fd, select.POLLIN)
        # After the descriptor is open: before, the pid could still become another process's.
        try:
            neighbour.confirm()
        except PeerLost:
            self.close()
            raise

    def check(self) -> None:
        """Raise PeerLost unless this very process is alive."""
        if self._fd < 0:
            self._neighbour.confirm()
        elif self._poll.poll(0):
            raise PeerLost(f"process {self._neighbour.pid} is gone")

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
