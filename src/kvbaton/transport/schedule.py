"""Whose turn it is: batches that wait for their event, and ready batches in fair turns over the peers. No threads, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvbaton.transport.base import Ticket
from kvbaton.transport.ledger import BatchJob, describe

__all__ = ["IDLE_S", "Schedule"]

L = TypeVar("L", bound=Hashable)

IDLE_S = 60.0
"""How long a mover with nothing to do sleeps at most."""

_CHECK_MIN_S = 0.0002
_CHECK_MAX_S = 0.005


@dataclass(frozen=True, slots=True, eq=False)
class _WaitingJob(Generic[L]):
    job: BatchJob[L]
    since: float


class Schedule(Generic[L]):
    """Jobs in order of posting per link, links in turns. Time is an argument; `timeout_s` limits the wait for an event."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waiting: dict[Ticket, _WaitingJob[L]] = {}
        self._ready: OrderedDict[L, OrderedDict[Ticket, BatchJob[L]]] = OrderedDict()
        self._next_check = 0.0

    def add(self, job: BatchJob[L], now: float) -> None:
        """Take `job` in: ready at once, or once its event has come."""
        if job.after is None:
            self._make_ready(job)
        else:
            self._waiting[job.ticket] = _WaitingJob(job, now)
            self._next_check = now

    def check_events(self, now: float) -> list[tuple[BatchJob[L], str]]:
        """Make jobs ready whose event has come; take out and return those whose event failed or is overdue, with the reason."""
        if not self._waiting or now < self._next_check:
            return []
        failed: list[tuple[BatchJob[L], str]] = []
        for waiting in list(self._waiting.values()):
            ready, error = self._ask(waiting, now)
            if ready or error:
                del self._waiting[waiting.job.ticket]
            if error:
                failed.append((waiting.job, error))
            elif ready:
                self._make_ready(waiting.job)
        if self._waiting:
            # The event of a layer that was just posted comes soon and is asked often; the older the newest, the more rarely.
            newest = next(reversed(self._waiting.values()))
            self._next_check = now + min(max((now - newest.since) / 8, _CHECK_MIN_S), _CHECK_MAX_S)
        return failed

    def links(self) -> list[L]:
        """Links with ready jobs."""
        return list(self._ready)

    def head(self, link: L) -> BatchJob[L] | None:
        """The first ready job of `link`."""
        jobs = self._ready.get(link)
        return next(iter(jobs.values())) if jobs else None

    def next_turn(self) -> BatchJob[L] | None:
        """The first ready job of the link whose turn it is; the turn then passes on."""
        if not self._ready:
            return None
        link = next(iter(self._ready))
        self._ready.move_to_end(link)
        return self.head(link)

    def discard(self, job: BatchJob[L]) -> bool:
        """Take `job` out, wherever it is; returns whether it was here."""
        jobs = self._ready.get(job.link, OrderedDict())
        found = self._waiting.pop(job.ticket, None) is not None or jobs.pop(job.ticket, None) is not None
        if not jobs:
            self._ready.pop(job.link, None)
        return found

    def discard_link(self, link: L, *, waiting: bool) -> list[BatchJob[L]]:
        """Take the ready jobs of `link` out and return them, and with `waiting` those that wait for their event too."""
        early = [entry.job for entry in self._waiting.values() if waiting and entry.job.link is link]
        for job in early:
            del self._waiting[job.ticket]
        return [*early, *self._ready.pop(link, OrderedDict()).values()]

    def wait_s(self, now: float) -> float:
        """How long the mover may sleep before `check_events` is due again."""
        return max(0.0, self._next_check - now) if self._waiting else IDLE_S

    def _make_ready(self, job: BatchJob[L]) -> None:
        self._ready.setdefault(job.link, OrderedDict())[job.ticket] = job

    def _ask(self, waiting: _WaitingJob[L], now: float) -> tuple[bool, str]:
        assert waiting.job.after is not None  # noqa: S101
        try:
            if waiting.job.after():
                return True, ""
        except Exception as error:  # noqa: BLE001 - the caller's event may raise anything; it becomes the completion
            return False, f"TransportError: the event that the batch waits for raised {describe(error)}"
        if now - waiting.since >= self._timeout_s:
            return False, f"TransportError: the event that the batch waits for did not come within {self._timeout_s:g} s"
        return False, ""
