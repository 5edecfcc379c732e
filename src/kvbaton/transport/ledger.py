"""The books of a transport: known peers, batches in flight, completions, and what its mover is asked to do.

Every thread may write into the books; the mover alone acts on them. What a caller requests (post, cancel, revoke) becomes a
command that the mover takes; what the mover finishes becomes a completion that `poll` hands out. Both are bounded by
`max_in_flight`, which counts a batch from `admit` until its completion was handed out. A full queue still takes one batch of a
peer that has none in it, so that a slow peer which fills it holds up no other.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvbaton.errors import Bug, KVBatonError, QueueFull, TransportError
from kvbaton.transport.base import (
    AfterEvent,
    Batch,
    Completion,
    Direction,
    Endpoint,
    PeerRank,
    Region,
    Runs,
    Ticket,
    TransportSettings,
)
from kvbaton.transport.runs import RunCursor, check_batch, load_loops
from kvbaton.transport.wakeup import Wakeup

__all__ = ["CancelJob", "MoverCommand", "BatchJob", "Ledger", "PostJob", "RevokeLink", "RunsCheck", "describe"]

L = TypeVar("L")


@dataclass(slots=True, eq=False)
class BatchJob(Generic[L]):
    """One batch in flight, as the mover sees it."""

    ticket: Ticket
    link: L
    cursor: RunCursor
    after: AfterEvent | None
    direction: Direction = Direction.READ
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PostJob(Generic[L]):
    """Start this job."""

    job: BatchJob[L]


@dataclass(frozen=True, slots=True, eq=False)
class CancelJob(Generic[L]):
    """Stop this job and finish it as cancelled."""

    job: BatchJob[L]


@dataclass(frozen=True, slots=True, eq=False)
class RevokeLink(Generic[L]):
    """Stop and fail every job of this link, and release it."""

    link: L


MoverCommand = PostJob[L] | CancelJob[L] | RevokeLink[L]

RunsCheck = Callable[[L, Runs], None]
"""Refuses runs of a link by raising RangeError."""


@dataclass(frozen=True, slots=True, eq=False)
class _KnownPeer(Generic[L]):
    endpoint: Endpoint
    link: L


class Ledger(Generic[L]):
    """Peers, jobs, commands and completions of one transport; `L` is what the mover keeps per peer."""

    def __init__(self, region: Region, settings: TransportSettings, check: RunsCheck[L] | None = None) -> None:
        """`check` may refuse more runs than the sizes of both regions do; it raises RangeError."""
        self._check = check
        self._loops = load_loops()
        self._region = region
        self._settings = settings
        self._lock = threading.Lock()
        self._peers: dict[PeerRank, _KnownPeer[L]] = {}
        self._jobs: dict[Ticket, BatchJob[L]] = {}
        self._peer_of: dict[Ticket, PeerRank] = {}
        self._count_of: Counter[PeerRank] = Counter()
        self._cancelling: set[Ticket] = set()
        self._commands: list[MoverCommand[L]] = []
        self._completions: list[Completion] = []
        self._last_ticket = 0
        self._shut_reason = ""
        self.work = Wakeup()
        self.done = Wakeup()

    @property
    def is_shut(self) -> bool:
        """Whether the mover shall end."""
        return bool(self._shut_reason)

    def endpoint_of(self, peer: PeerRank) -> Endpoint | None:
        """The endpoint under which `peer` is known, if it is."""
        with self._lock:
            known = self._peers.get(peer)
            return known.endpoint if known else None

    def link_of(self, peer: PeerRank) -> L | None:
        """What the mover keeps for `peer`, if it is known."""
        with self._lock:
            known = self._peers.get(peer)
            return known.link if known else None

    def links(self) -> list[L]:
        """What the mover keeps for the peers that are known now."""
        with self._lock:
            return [known.link for known in self._peers.values()]

    def check_room(self, peer: PeerRank) -> None:
        """Raise TransportError when `peer` is known already, the table is full, or the transport is closed."""
        with self._lock:
            self._refuse_peer(peer)

    def add_peer(self, peer: PeerRank, endpoint: Endpoint, link: L) -> None:
        """Make `peer` known. Raises TransportError as `check_room` does."""
        with self._lock:
            self._refuse_peer(peer)
            self._peers[peer] = _KnownPeer(endpoint, link)

    def admit(self, batch: Batch, after: AfterEvent | None) -> Ticket:
        """Check and number `batch`, and wake the mover. Raises RangeError or TransportError; then nothing was started."""
        with self._lock:
            checked = self._known(batch.peer)
        # Not under the lock: a batch of a million runs takes milliseconds to check, and the mover finishes others meanwhile.
        runs = check_batch(batch, self._region.region_bytes, checked.endpoint.region_bytes, self._loops)
        if self._check is not None:
            self._check(checked.link, runs)
        cursor = RunCursor(runs)
        with self._lock:
            known = self._known(batch.peer)
            if known is not checked:  # revoked and connected anew in between, maybe with a smaller region
                raise TransportError(f"peer {batch.peer.incarnation!r} was connected anew in the meantime; post again")
            if len(self._peer_of) >= self._settings.max_in_flight and self._count_of[batch.peer]:
                raise QueueFull(
                    f"queue full: {self._settings.max_in_flight} batches are in flight (max_in_flight); poll, then post again"
                )
            self._last_ticket += 1
            job = BatchJob(Ticket(self._last_ticket), known.link, cursor, after, batch.direction)
            self._jobs[job.ticket] = job
            self._peer_of[job.ticket] = batch.peer
            self._count_of[batch.peer] += 1
            self._command(PostJob(job))
        return job.ticket

    def ask_cancel(self, ticket: Ticket) -> None:
        """Have the mover stop the job, once; unknown and finished tickets are ignored."""
        with self._lock:
            job = self._jobs.get(ticket)
            if job is not None and ticket not in self._cancelling:  # callers repeat a cancel; the list must stay bounded
                self._cancelling.add(ticket)
                self._command(CancelJob(job))

    def remove_peer(self, peer: PeerRank) -> None:
        """Forget `peer` and have the mover end its jobs; unknown peers are ignored."""
        with self._lock:
            known = self._peers.pop(peer, None)
            if known is not None:
                self._command(RevokeLink(known.link))

    def take_commands(self) -> list[MoverCommand[L]]:
        """What the mover was asked since the last call, in order; `work` stays set once shut, so that no mover sleeps on."""
        with self._lock:
            commands, self._commands = self._commands, []
            # Under the lock: a command that is added after the list was taken must set the flag again to wake the mover.
            if not self._shut_reason:
                self.work.clear()
            return commands

    def is_in_flight(self, job: BatchJob[L]) -> bool:
        """Whether `job` has not been finished."""
        with self._lock:
            return job.ticket in self._jobs

    def finish(self, job: BatchJob[L], error: str = "", *, cancelled: bool = False) -> None:
        """End `job`; the mover calls it exactly once, when it no longer touches memory for it."""
        with self._lock:
            if self._jobs.pop(job.ticket, None) is None:
                raise Bug(f"ticket {job.ticket} was finished twice")
            self._complete(job, error, cancelled)

    def take_completions(self) -> list[Completion]:
        """What has finished since the last call."""
        with self._lock:
            completions, self._completions = self._completions, []
            for completion in completions:
                self._uncount(self._peer_of.pop(completion.ticket))
            self.done.clear()
            return completions

    def shut(self, reason: str) -> None:
        """Accept nothing more and have the mover end; the first reason stays."""
        with self._lock:
            self._shut_reason = self._shut_reason or reason
            self.work.set()

    def finish_all(self, but: Collection[Ticket] = ()) -> None:
        """End what is still in flight, except `but`, with the reason given to `shut`; called when no mover runs any more."""
        with self._lock:
            self._commands.clear()
            for ticket in [ticket for ticket in self._jobs if ticket not in but]:
                self._complete(self._jobs.pop(ticket), self._shut_reason, cancelled=False)

    def close(self) -> None:
        """Give the descriptors back."""
        self.work.close()
        self.done.close()

    def _uncount(self, peer: PeerRank) -> None:
        self._count_of[peer] -= 1
        if not self._count_of[peer]:
            del self._count_of[peer]

    def _known(self, peer: PeerRank) -> _KnownPeer[L]:
        self._refuse_when_shut()
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(
                f"peer {peer.incarnation!r} rank {peer.rank} is not connected (or was revoked); connect it first"
            )
        return known

    def _refuse_peer(self, peer: PeerRank) -> None:
        self._refuse_when_shut()
        if peer in self._peers:
            raise TransportError(f"peer {peer.incarnation!r} rank {peer.rank} is connected already; revoke it first")
        if len(self._peers) >= self._settings.max_peers:
            raise TransportError(f"{len(self._peers)} peers are known, the limit (max_peers); revoke those that are gone")

    def _refuse_when_shut(self) -> None:
        if self._shut_reason:
            raise TransportError(f"{self._shut_reason}; open a new transport")

    def _command(self, command: MoverCommand[L]) -> None:
        self._commands.append(command)
        self.work.set()

    def _complete(self, job: BatchJob[L], error: str, cancelled: bool) -> None:
        self._cancelling.discard(job.ticket)
        self._completions.append(Completion(job.ticket, job.moved_bytes, error, cancelled))
        self.done.set()


def describe(error: Exception) -> str:
    """An error as the text of a completion: its name and its message; a foreign one is called a bug."""
    if isinstance(error, KVBatonError):
        return f"{type(error).__name__}: {error}"
    return f"Bug: {type(error).__name__}: {error}"
