"""The half that our own transports share: the contract's methods on top of the books, with a mover that does the copies.

The books (`Ledger`) have the known peers, the batches in flight, the completions, and what the mover is asked to do. Every
thread may write into them; the mover alone acts on them. What a caller requests (post, cancel, revoke) becomes a command that
the mover takes; what the mover finishes becomes a completion that `poll` hands out. Both are bounded by `max_in_flight`, which
counts a batch from `admit` until its completion was handed out. A full queue still takes one batch of a peer that has none in
it, so that a slow peer which fills it holds up no other.

The mover is one thread: it takes the ledger's commands, serves what is ready, and ends with the ledger. `Schedule` has whose
turn it is, without threads or a clock: batches that wait for their event, and ready batches in fair turns over the peers.
`SliceMover` is the mover for copies that the processor makes, slice by slice.
"""

from __future__ import annotations

import abc
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvbaton.errors import Bug, KVBatonError, QueueFull, TransportError
from kvbaton.transport.base import (
    BATCH_BYTES,
    AfterEvent,
    Batch,
    Completion,
    Direction,
    Endpoint,
    LateWrites,
    PagesMoved,
    PeerRank,
    Region,
    Runs,
    Ticket,
    TransportSettings,
)
from kvbaton.transport.checks import check_batch
from kvbaton.transport.runs import MAX_SLICE_RUNS, Pages, RunCursor, StripTable, load_loops
from kvbaton.transport.wakeup import Wakeup

__all__ = [
    "BatchJob",
    "CancelJob",
    "IDLE_S",
    "Ledger",
    "Mover",
    "PostJob",
    "QueuedTransport",
    "REVOKED",
    "RevokeLink",
    "Schedule",
    "SliceMover",
    "Starter",
    "bytes_detail",
    "check_endpoint",
    "describe",
    "detail",
]

IDLE_S = 60.0
"""How long a mover with nothing to do sleeps at most."""

_CHECK_MIN_S = 0.0002
_CHECK_MAX_S = 0.005

_TAKES_WRITES = "takes_writes"
"""The detail of an endpoint that lets peers write to its region."""

REVOKED = "TransportError: the peer was revoked"
"""How jobs end whose peer was revoked."""

L_contra = TypeVar("L_contra", bound=Hashable, contravariant=True)

L = TypeVar("L", bound=Hashable)
T = TypeVar("T", int, str)


@dataclass(slots=True, eq=False)
class BatchJob(Generic[L]):
    """One batch in flight, as the mover sees it."""

    ticket: Ticket
    link: L
    cursor: RunCursor
    after: AfterEvent | None
    direction: Direction = Direction.READ
    epoch: int = 0
    notice: bytes = b""
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

RunsCheck = Callable[[L, Runs | StripTable], Runs | StripTable]
"""Refuses runs of a link by raising RangeError; returns them as the mover takes them."""


class Starter(Protocol[L_contra]):
    """Moves one batch at a time without the mover."""

    def begin(self, link: L_contra, batch: Batch, wakeup_fd: int) -> int:
        """Check a batch and begin to move it; `wakeup_fd` gets a byte at the end. How many bytes it has; 0: not begun."""

    def has_ended(self) -> bool:
        """Whether what was begun is moved; then it touches no memory any more, and the byte was written."""

    def is_near(self) -> bool:
        """Whether `wakeup_fd` got a byte because the end is near."""

    def linger(self) -> bool:
        """Then wait for the end, at most 0.1 ms; whether it came meanwhile. If so, it has no byte of its own."""

    def wait_end(self) -> None:
        """Wait until it is; not called under a lock of the caller: a GPU may take long."""

    def confirm(self, link: L_contra) -> None:
        """Raise KVBatonError unless what was copied came from the peer that is meant; called after a batch's last byte."""


MoveNow = Callable[[L, Batch], int]
"""Checks and moves a small batch of a link; the bytes, 0 if it moved nothing."""

MovePages = Callable[[L, Pages], tuple[int, int]]
"""Plans, checks and moves a few pages of a link; the bytes and runs, 0 and 0 if it moved nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class _KnownPeer(Generic[L]):
    endpoint: Endpoint
    link: L


@dataclass(slots=True, eq=False)
class _BegunBatch(Generic[L]):
    ticket: Ticket
    link: L
    wire_bytes: int
    error: str = ""
    """With which it ends, whatever it moved: its peer was revoked, or the transport closed."""


class Ledger(Generic[L]):
    """Peers, jobs, commands and completions of one transport; `L` is what the mover keeps per peer."""

    def __init__(
        self,
        region: Region,
        settings: TransportSettings,
        check: RunsCheck[L] | None = None,
        starter: Starter[L] | None = None,
    ) -> None:
        """`check` may refuse more runs than the sizes of both regions do; it raises RangeError.

        `move_now` and `begin_now` have a starter.
        """
        self._check = check
        self._starter = starter
        self._begun: _BegunBatch[L] | None = None
        self._moved: list[tuple[Ticket, L, int]] = []
        """What callers have moved themselves, and how many bytes; it completes once the peer of each is confirmed."""
        self._is_rung = False
        self._loops = load_loops()
        self._region = region
        self._settings = settings
        self._lock = threading.Lock()
        self._peers: dict[PeerRank, _KnownPeer[L]] = {}
        self._jobs: dict[Ticket, BatchJob[L]] = {}
        self._peer_of: dict[Ticket, PeerRank] = {}
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
        sizes = self._region.region_bytes, checked.endpoint.region_bytes
        runs = check_batch(batch, *sizes, self._loops)
        if self._check is not None:
            runs = self._check(checked.link, runs)
        cursor = RunCursor(runs, self._loops)
        with self._lock:
            known = self._known(batch.peer)
            if known is not checked:  # revoked and connected anew in between, maybe with a smaller region
                raise TransportError(f"peer {batch.peer.incarnation!r} was connected anew in the meantime; post again")
            if len(self._peer_of) >= self._settings.max_in_flight and batch.peer in self._peer_of.values():
                raise QueueFull(
                    f"queue full: {self._settings.max_in_flight} batches are in flight (max_in_flight); poll, then post again"
                )
            self._confirm_moved()  # what was posted before is to complete before
            job = BatchJob(self._number(batch.peer), known.link, cursor, after, batch.direction, batch.epoch, batch.notice)
            self._jobs[job.ticket] = job
            self._command(PostJob(job))
        return job.ticket

    def move_now(self, batch: Batch, move: MoveNow[L]) -> Ticket | None:
        """Have the caller move a small batch itself; None where it has to be admitted. Raises TransportError.

        Only while the mover has nothing to do: a batch overtakes no other. Under the lock, so that no revoke or close comes in
        between; `move` must therefore be quick, and touch nothing here. Whether the peer was there until the last byte is asked
        when completions are taken: once for all batches of a turn.
        """
        with self._lock:
            link = None if self._check is not None else self._free_link(batch.peer)
            moved_bytes = move(link, batch) if link is not None else 0
            return None if link is None or not moved_bytes else self._note_moved(batch.peer, link, moved_bytes)

    def move_pages(self, peer: PeerRank, pages: Pages, move: MovePages[L]) -> PagesMoved | None:
        """The same for a few pages that are planned in the same call."""
        with self._lock:
            link = None if self._check is not None else self._free_link(peer)
            if link is None:
                return None
            moved_bytes, runs = move(link, pages)
            return PagesMoved(self._note_moved(peer, link, moved_bytes), runs) if moved_bytes else None

    def begin_now(self, batch: Batch) -> Ticket | None:
        """Have the starter move a batch; None where it has to be admitted. Raises TransportError or RangeError.

        Only while nothing else moves, as with `move_now`. It is in no queue of the mover, so it is not cancelled; `poll` looks
        whether it has ended, and what revokes its peer or closes the transport waits for that.
        """
        with self._lock:
            link = self._free_link(batch.peer)
            if link is None or self._starter is None:
                return None
            self._confirm_moved()  # what was posted before is to complete before
            wire_bytes = self._starter.begin(link, batch, self.done.write_fd)
            if not wire_bytes:
                return None
            self._begun = _BegunBatch(self._number(batch.peer), link, wire_bytes)
            return self._begun.ticket

    def stop_begun(self, link: L, error: str) -> None:
        """Wait until what was begun for `link`, if anything, moves no more; it ends with this error."""
        with self._lock:
            begun = self._begun if self._begun is not None and self._begun.link is link else None
            if begun is not None:
                begun.error = error
        self._wait_begun(begun)

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
            self._confirm_moved()  # while the link can still be asked
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

    def finish(self, job: BatchJob[L], error: str = "", *, cancelled: bool = False, may_land: bool = False) -> None:
        """End `job`; the mover calls it exactly once, when it no longer touches this side's memory for it."""
        with self._lock:
            if self._jobs.pop(job.ticket, None) is None:
                raise Bug(f"ticket {job.ticket} was finished twice")
            self._look_at_begun()  # it was posted before, and is to complete before
            self._complete(job, error, cancelled, may_land)

    def take_completions(self) -> list[Completion]:
        """What has finished since the last call."""
        if not self._completions and not self._moved and self._begun is None and not self._is_rung:
            return []  # what is added now sets `done` afterwards, so that the caller comes again
        with self._lock:
            self._is_rung = False
            # Cleared first: a byte of the starter that is taken here belongs to a batch that is then seen to have ended.
            self.done.clear()
            self._confirm_moved()
            self._linger()
            self._look_at_begun()
            self.done.clear()
            completions, self._completions = self._completions, []
            for completion in completions:
                del self._peer_of[completion.ticket]
            return completions

    def ring(self) -> None:
        """Have the caller of `take_completions` woken once, although nothing has finished."""
        with self._lock:  # with the flag: one that is set when `done` was just cleared would leave it set for ever
            self._is_rung = True
            self.done.set()

    def shut(self, reason: str) -> None:
        """Accept nothing more and have the mover end; the first reason stays."""
        with self._lock:
            self._confirm_moved()  # while links can still be asked
            self._shut_reason = self._shut_reason or reason
            self.work.set()

    def finish_all(self, but: Collection[Ticket] = ()) -> None:
        """End what is still in flight, except `but`, with the reason given to `shut`; called when no mover runs any more."""
        with self._lock:
            self._commands.clear()
            begun = self._begun
            if begun is not None:
                begun.error = begun.error or self._shut_reason
        self._wait_begun(begun)
        with self._lock:
            for ticket in [ticket for ticket in self._jobs if ticket not in but]:
                job = self._jobs.pop(ticket)
                # Of a mover that has ended nothing more is known: what it had sent of a write may land.
                self._complete(job, self._shut_reason, cancelled=False, may_land=job.direction is Direction.WRITE)

    def close(self) -> None:
        """Give the descriptors back."""
        self.work.close()
        self.done.close()

    def _free_link(self, peer: PeerRank) -> L | None:
        """What is kept for `peer`, while nothing moves and there is room for one more batch. Raises TransportError."""
        self._look_at_begun()
        if self._begun is not None or self._jobs or self._commands:
            return None
        known = self._known(peer)
        return known.link if len(self._peer_of) < self._settings.max_in_flight else None

    def _number(self, peer: PeerRank) -> Ticket:
        self._last_ticket += 1
        ticket = Ticket(self._last_ticket)
        self._peer_of[ticket] = peer
        return ticket

    def _note_moved(self, peer: PeerRank, link: L, moved_bytes: int) -> Ticket:
        ticket = self._number(peer)
        self._moved.append((ticket, link, moved_bytes))
        self.done.set()
        return ticket

    def _confirm_moved(self) -> None:
        """Complete what callers have moved themselves; each peer is asked once."""
        if self._moved:
            moved, self._moved = self._moved, []
            errors = {link: self._confirmed(link) for link in {link for _, link, _ in moved}}
            self._completions += [Completion(ticket, moved_bytes, errors[link]) for ticket, link, moved_bytes in moved]

    def _linger(self) -> None:
        """Where the end of what was begun is near, wait a moment for it."""
        begun, starter = self._begun, self._starter
        if begun is None or starter is None or not starter.is_near():
            return
        # The early byte is taken first. If that of the end is taken with it, the next look sees the end.
        self.done.was_written()
        self.done.clear()
        if starter.linger():
            self._complete_begun(begun)

    def _look_at_begun(self) -> None:
        """Complete what was begun, if it has ended."""
        begun, starter = self._begun, self._starter
        if begun is None or starter is None or not starter.has_ended():
            return
        self.done.was_written()
        self._complete_begun(begun)

    def _complete_begun(self, begun: _BegunBatch[L]) -> None:
        begun.error = begun.error or self._confirmed(begun.link)
        self._begun = None
        self._completions.append(Completion(begun.ticket, begun.wire_bytes, begun.error))

    def _confirmed(self, link: L) -> str:
        """Why what was moved for a link does not count; empty when it does.

        Asked after the last byte, not before the first: a peer that dies or withdraws during the copy must not count.
        """
        try:
            if self._starter is not None:
                self._starter.confirm(link)
        except Exception as problem:  # noqa: BLE001 - a batch that is not completed would keep its blocks for ever
            return describe(problem)
        return ""

    def _wait_begun(self, begun: _BegunBatch[L] | None) -> None:
        """Wait until a batch has ended; not under the lock, which `poll` and `post` need."""
        while begun is not None and self._starter is not None:
            self._starter.wait_end()
            with self._lock:
                self._look_at_begun()
                if self._begun is not begun:
                    return

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

    def _complete(self, job: BatchJob[L], error: str, cancelled: bool, may_land: bool) -> None:
        self._cancelling.discard(job.ticket)
        self._completions.append(Completion(job.ticket, job.moved_bytes, error, cancelled, may_land))
        self.done.set()


def describe(error: Exception) -> str:
    """An error as the text of a completion: its name and its message; a foreign one is called a bug."""
    if isinstance(error, KVBatonError):
        return f"{type(error).__name__}: {error}"
    return f"Bug: {type(error).__name__}: {error}"


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

    def ready(self, link: L) -> Iterator[BatchJob[L]]:
        """The ready jobs of `link`, in order; nothing may be taken out or in between two of them."""
        return iter(self._ready.get(link, OrderedDict()).values())

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
        self._ledger.stop_begun(link, REVOKED)
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


class QueuedTransport(abc.ABC, Generic[L]):
    """A transport whose mover fills this side's memory by reading; no peer ever writes there, unless a subclass allows it."""

    name: str
    late_writes = LateWrites.IMPOSSIBLE
    directions = frozenset({Direction.READ})
    batch_bytes = BATCH_BYTES
    _alternative = "the side that holds the target has to read"
    """What to do instead of a batch whose direction is not accepted."""
    _write_setting = ""
    """The setting that adds writes to `directions`."""

    def __init__(self, region: Region, settings: TransportSettings, ledger: Ledger[L], mover: Mover[L]) -> None:
        self._region = region
        self._settings = settings
        self._ledger = ledger
        self._mover = mover
        self._connecting = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False

    @property
    def wakeup_fd(self) -> int:
        return self._ledger.done.fd

    def endpoint(self) -> Endpoint:
        details = {"incarnation": self._settings.incarnation or "", **self._details()}
        if Direction.WRITE in self.directions:
            details[_TAKES_WRITES] = 1
        return Endpoint(self.name, self._region.region_bytes, details)

    def connect(self, peer: PeerRank, endpoint: Endpoint) -> None:
        """Make `peer` known; the same endpoint again changes nothing. Raises TransportError when it is out of reach."""
        with self._connecting:
            if self._ledger.endpoint_of(peer) != endpoint:
                self._check(peer, endpoint)
                self._ledger.check_room(peer)
                link = self._link(peer, endpoint)
                try:  # `close` may come in between: then the link belongs to no mover
                    self._ledger.add_peer(peer, endpoint, link)
                except TransportError:
                    self._unlink(link)
                    raise

    def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
        if batch.direction not in self.directions:
            raise TransportError(f"{self.name} does not {batch.direction}; {self._alternative}")
        if batch.direction is Direction.WRITE:
            endpoint = self._ledger.endpoint_of(batch.peer)
            if endpoint is not None and not endpoint.details.get(_TAKES_WRITES):
                option = self._write_setting.replace("_", "-")
                raise TransportError(
                    f"peer {batch.peer.incarnation!r} rank {batch.peer.rank} does not take writes: set {self._write_setting} "
                    f"(--{option}) there too, or let it read"
                )
        return self._ledger.admit(batch, after)

    def poll(self) -> list[Completion]:
        return self._ledger.take_completions()

    def cancel(self, ticket: Ticket) -> None:
        self._ledger.ask_cancel(ticket)

    def revoke(self, peer: PeerRank) -> None:
        self._ledger.remove_peer(peer)

    def close(self) -> None:
        """Stop the mover, complete what is in flight with an error, and give everything back. Idempotent.

        Raises TransportError when the mover does not end in time; its memory must then not be reused.
        """
        with self._closing:
            if self._closed:
                return
            # The order counts: the mover must be quiet before memory is given back, and before a completion calls it quiet.
            self._ledger.shut("TransportError: the transport is closed")
            if not self._mover.join(self._closing_s):
                raise TransportError(f"the {self.name} mover did not end within {self._closing_s:g} s; close again")
            self._release()
            self._ledger.finish_all()
            self._ledger.close()
            self._closed = True

    @property
    def _closing_s(self) -> float:
        """How long the mover may take to end."""
        return self._settings.timeout_s

    def _check(self, peer: PeerRank, endpoint: Endpoint) -> None:
        check_endpoint(self.name, endpoint)
        incarnation = endpoint.details.get("incarnation", "")
        if incarnation and incarnation != peer.incarnation:
            raise TransportError(
                f"endpoint belongs to incarnation {incarnation!r}, not to {peer.incarnation!r}; fetch its card again"
            )
        if _TAKES_WRITES in endpoint.details:
            detail(endpoint, _TAKES_WRITES, int)

    @abc.abstractmethod
    def _details(self) -> dict[str, str | int]:
        """What a peer needs beside the size of the region."""

    @abc.abstractmethod
    def _link(self, peer: PeerRank, endpoint: Endpoint) -> L:
        """What the mover keeps for `peer`; raises TransportError when it cannot be reached from here."""

    def _unlink(self, link: L) -> None:
        """Release a link that no mover ever saw."""

    def _release(self) -> None:
        """Give back what the subclass owns, once the mover has ended."""


def check_endpoint(name: str, endpoint: Endpoint) -> None:
    """Raise TransportError unless `endpoint` is one of the transport called `name`, with a region of a possible size."""
    if endpoint.transport != name:
        raise TransportError(f"endpoint transport is {endpoint.transport!r}; this transport is {name!r}")
    if not 0 < endpoint.region_bytes < 1 << 63:
        raise TransportError(f"endpoint region_bytes is {endpoint.region_bytes}; it must be above 0 and below 2^63")


def detail(endpoint: Endpoint, field: str, kind: type[T]) -> T:
    """One field of an endpoint's details; raises TransportError, naming it, when it is missing or of another type."""
    value = endpoint.details.get(field)
    if type(value) is not kind:
        raise TransportError(f"{endpoint.transport} endpoint: {field} is {value!r}; it must be of type {kind.__name__}")
    return value


def bytes_detail(endpoint: Endpoint, field: str) -> bytes:
    """One field of an endpoint's details that has bytes as hexadecimal digits; raises TransportError, naming it."""
    try:
        return bytes.fromhex(detail(endpoint, field, str))
    except ValueError as error:
        raise TransportError(f"{endpoint.transport} endpoint: {field} is not usable ({error}); fetch its card again") from error
