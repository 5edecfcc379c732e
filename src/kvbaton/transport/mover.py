"""The thread that moves bytes for a transport: takes the ledger's commands, serves what is ready, ends with the ledger.

`Schedule` has whose turn it is, without threads or a clock: batches that wait for their event, and ready batches in fair turns
over the peers. `SliceMover` is the mover for copies that the processor makes, slice by slice.
"""

from __future__ import annotations

import abc
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvbaton.errors import KVBatonError
from kvbaton.transport.base import Ticket, TransportSettings
from kvbaton.transport.ledger import BatchJob, CancelJob, Ledger, PostJob, describe
from kvbaton.transport.runs import MAX_SLICE_RUNS, RunCursor

__all__ = ["IDLE_S", "Mover", "REVOKED", "Schedule", "SliceMover"]

IDLE_S = 60.0
"""How long a mover with nothing to do sleeps at most."""

_CHECK_MIN_S = 0.0002
_CHECK_MAX_S = 0.005

L = TypeVar("L", bound=Hashable)

REVOKED = "TransportError: the peer was revoked"
"""How jobs end whose peer was revoked."""

L_contra = TypeVar("L_contra", bound=Hashable, contravariant=True)


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


class Mover(abc.ABC, Generic[L]):
    """One thread, which runs until the ledger is shut. Only this thread acts on jobs, so that what it keeps needs no lock."""

    def __init__(self, name: str, ledger: Ledger[L], timeout_s: float) -> None:
        """Starts the thread: a subclass calls it last."""
        self._ledger = ledger
        self._schedule: Schedule[L] = Schedule(timeout_s)
        self._thread = threading.Thread(target=self._run, name=f"kvbaton-{name}-mover", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended, at most `timeout_s`; returns whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @abc.abstractmethod
    def _move(self) -> None:
        """Serve what is ready, or wait until there is something to do."""

    @abc.abstractmethod
    def _cancel(self, job: BatchJob[L]) -> None:
        """End a job as cancelled, unless it is over."""

    @abc.abstractmethod
    def _revoke(self, link: L) -> None:
        """Fail every job of a link, and release it."""

    def _stop(self) -> Collection[Ticket]:
        """Give back what the thread owns; returns the jobs whose memory is not quiet even then. Must not raise."""
        return ()

    def _run(self) -> None:
        failure = ""
        try:
            while not self._ledger.is_shut:
                self._take_commands()
                self._move()
        except Exception as error:  # noqa: BLE001 - the last resort: a caller must not wait for a mover that is dead
            failure = f"{describe(error)} (the mover ended)"
        moving = self._stop()
        self._ledger.shut(failure)  # a reason that was given before stays
        self._ledger.finish_all(but=moving)

    def _take_commands(self) -> None:
        for command in self._ledger.take_commands():
            if isinstance(command, PostJob):
                self._schedule.add(command.job, time.monotonic())
            elif isinstance(command, CancelJob):
                self._cancel(command.job)
            else:
                self._revoke(command.link)
        for job, error in self._schedule.check_events(time.monotonic()):
            self._ledger.finish(job, error)


class Reach(Protocol[L_contra]):
    """How bytes of a peer get into this side's region."""

    def copy(self, link: L_contra, cursor: RunCursor, most_bytes: int, most_runs: int) -> int:
        """Copy some of what follows the cursor, which is not at its end; returns how many bytes. Raises KVBatonError."""

    def confirm(self, link: L_contra) -> None:
        """Raise KVBatonError unless what was copied came from the peer that is meant; called after a batch's last byte."""

    def release(self, link: L_contra) -> None:
        """Release a revoked peer: nothing will be copied from it any more. Must not raise."""


class SliceMover(Mover[L]):
    """One thread that serves the ledger's jobs, a slice per turn; cancels and revokes take effect between two slices."""

    def __init__(
        self,
        name: str,
        ledger: Ledger[L],
        settings: TransportSettings,
        reach: Reach[L],
        slice_bytes: int | None = None,
        slice_runs: int = MAX_SLICE_RUNS,
    ) -> None:
        """`slice_bytes` in at most `slice_runs` runs are moved per turn; by default those of the settings."""
        self._slice_bytes = slice_bytes or settings.slice_bytes
        self._slice_runs = slice_runs
        self._reach = reach
        super().__init__(name, ledger, settings.timeout_s)

    def _move(self) -> None:
        job = self._schedule.next_turn()
        if job is not None:
            self._move_slice(job)
        else:
            self._ledger.work.wait(self._schedule.wait_s(time.monotonic()))

    def _cancel(self, job: BatchJob[L]) -> None:
        if self._schedule.discard(job):
            self._ledger.finish(job, "cancelled", cancelled=True)

    def _revoke(self, link: L) -> None:
        for job in self._schedule.discard_link(link, waiting=True):
            self._ledger.finish(job, REVOKED)
        self._reach.release(link)

    def _move_slice(self, job: BatchJob[L]) -> None:
        error = ""
        try:
            if job.cursor.remaining_bytes:
                count = self._reach.copy(job.link, job.cursor, self._slice_bytes, self._slice_runs)
                job.cursor.advance(count)
                job.moved_bytes += count
                if job.cursor.remaining_bytes:
                    return
                # After the last byte, not before the first: a peer that dies or withdraws during the copy must not count.
                self._reach.confirm(job.link)
        except (KVBatonError, OSError, ValueError) as problem:
            error = describe(problem)
        self._schedule.discard(job)
        self._ledger.finish(job, error)
