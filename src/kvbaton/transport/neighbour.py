"""A process of this host, named for good by host, pid and start time: what an endpoint says of it, whether it lives."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvbaton.errors import PeerLost, TransportError
from kvbaton.transport.base import Endpoint
from kvbaton.transport.process_memory import host_id, start_ticks
from kvbaton.transport.queued import detail

__all__ = ["Neighbour"]


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
        if neighbour.pid <= 0:
            raise TransportError(f"{endpoint.transport} endpoint: pid {neighbour.pid} is not usable; fetch its card again")
        return neighbour

    def details(self) -> dict[str, str | int]:
        """What an endpoint says of this process; the inverse of `of`."""
        return {"host_id": self.host, "pid": self.pid, "start_ticks": self.ticks}

    def confirm(self) -> None:
        """Raise PeerLost unless this very process is alive."""
        ticks = start_ticks(self.pid)
        if ticks != self.ticks:
            raise PeerLost(f"process {self.pid} is another one now: it started at tick {ticks}, the peer at {self.ticks}")
