"""The thread that moves bytes for a transport: takes the ledger's commands, serves what is ready, ends with the ledger."""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

from kvbaton.transport.base import Ticket
from kvbaton.transport.ledger import BatchJob, CancelJob, Ledger, PostJob, describe
from kvbaton.transport.schedule import Schedule

__all__ = ["REVOKED", "Mover"]

L = TypeVar("L", bound=Hashable)

REVOKED = "TransportError: the peer was revoked"
"""How jobs end whose peer was revoked."""


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
