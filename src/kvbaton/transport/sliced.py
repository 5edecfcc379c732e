"""A mover thread for copies that the processor makes: slice by slice, in fair turns over the peers."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Protocol, TypeVar

from kvbaton.errors import KVBatonError
from kvbaton.transport.base import TransportSettings
from kvbaton.transport.ledger import BatchJob, Ledger, describe
from kvbaton.transport.mover import REVOKED, Mover
from kvbaton.transport.runs import MAX_SLICE_RUNS, RunCursor

__all__ = ["Reach", "SliceMover"]

L = TypeVar("L", bound=Hashable)
L_contra = TypeVar("L_contra", bound=Hashable, contravariant=True)


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
