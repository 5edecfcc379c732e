"""A mover thread for copies that the processor makes: slice by slice, in fair turns over the peers."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

from kvbaton.errors import KVBatonError
from kvbaton.transport.base import TransportSettings
from kvbaton.transport.ledger import Cancel, Command, Job, Ledger, Post, describe
from kvbaton.transport.runs import MAX_SLICE_RUNS, RunCursor
from kvbaton.transport.schedule import Schedule

__all__ = ["Reach", "SliceMover"]

L = TypeVar("L", bound=Hashable)
L_contra = TypeVar("L_contra", bound=Hashable, contravariant=True)


class Reach(Protocol[L_contra]):
    """How bytes of a peer get into this side's region."""

    def copy(self, link: L_contra, cursor: RunCursor, most_bytes: int, most_runs: int) -> int:
        """Copy some of what follows the cursor, which is not at its end; tells how many bytes. Raises KVBatonError."""

    def confirm(self, link: L_contra) -> None:
        """Raise KVBatonError unless what was copied came from the peer that is meant; called after a batch's last byte."""

    def release(self, link: L_contra) -> None:
        """Let go of a revoked peer: nothing will be copied from it any more. Must not raise."""


class SliceMover(Generic[L]):
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
        """`slice_bytes` in at most `slice_runs` runs are moved per turn; by default what the settings say."""
        self._ledger = ledger
        self._slice_bytes = slice_bytes or settings.slice_bytes
        self._slice_runs = slice_runs
        self._reach = reach
        self._schedule: Schedule[L] = Schedule(settings.timeout_s)
        self._thread = threading.Thread(target=self._run, name=f"kvbaton-{name}-mover", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended, at most `timeout_s`; tells whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._ledger.is_shut:
                self._turn()
        except Exception as error:  # noqa: BLE001 - the last resort: nothing may hang on a dead mover
            self._ledger.shut(f"{describe(error)} (the mover ended)")
            self._ledger.finish_all()

    def _turn(self) -> None:
        for command in self._ledger.take_commands():
            self._obey(command)
        for failed, error in self._schedule.check_events(time.monotonic()):
            self._ledger.finish(failed, error)
        job = self._schedule.next_turn()
        if job is not None:
            self._move_slice(job)
        else:
            self._ledger.work.wait(self._schedule.wait_s(time.monotonic()))

    def _obey(self, command: Command[L]) -> None:
        if isinstance(command, Post):
            self._schedule.add(command.job, time.monotonic())
        elif isinstance(command, Cancel):
            if self._schedule.discard(command.job):
                self._ledger.finish(command.job, "cancelled", cancelled=True)
        else:
            for job in self._schedule.discard_link(command.link, waiting=True):
                self._ledger.finish(job, "TransportError: the peer was revoked")
            self._reach.release(command.link)

    def _move_slice(self, job: Job[L]) -> None:
        error = ""
        try:
            if job.cursor.remaining_bytes:
                count = self._reach.copy(job.link, job.cursor, self._slice_bytes, self._slice_runs)
                job.cursor.advance(count)
                job.moved_bytes += count
                if job.cursor.remaining_bytes:
                    return
                self._reach.confirm(job.link)
        except (KVBatonError, OSError, ValueError) as problem:
            error = describe(problem)
        self._schedule.discard(job)
        self._ledger.finish(job, error)
