"""The thread that reads from tcp peers: it feeds ready batches to their links and takes what the sockets bring.

Everything in it is non-blocking; a peer that connects slowly, stalls or dies has a deadline of its own and delays no other.
A further connection to a peer that fails before it is open (the peer has no room for it, this process no descriptor) costs
nothing but itself: it rests for `timeout_s`. One that fails once it was open costs the peer's jobs.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable

from kvbaton.errors import PeerError
from kvbaton.transport.base import Region, TransportSettings
from kvbaton.transport.ledger import BatchJob, Ledger
from kvbaton.transport.mover import REVOKED, Mover
from kvbaton.transport.schedule import IDLE_S
from kvbaton.transport.tcp.link import LinkState, ReadAnswer, TcpLink, TcpPeer
from kvbaton.transport.tcp.wire import MAX_PIECES

__all__ = ["TcpMover"]

_log = logging.getLogger("kvbaton.transport")

_ATTEMPTS = 3
"""How often a link connects before a peer that closes it during the handshake counts as lost."""


class TcpMover(Mover[TcpPeer]):
    """Owns the links' sockets while its thread runs; ends once the ledger is shut, and then closes them."""

    def __init__(self, ledger: Ledger[TcpPeer], region: Region, settings: TransportSettings) -> None:
        self._region = region
        self._slice_bytes = settings.slice_bytes
        self._timeout_s = settings.timeout_s
        self._open: set[TcpLink] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(ledger.work.fd, selectors.EVENT_READ)
        super().__init__("tcp", ledger, settings.timeout_s)

    def _stop(self) -> tuple[()]:
        for link in list(self._open):
            self._shut_link(link)
        self._selector.close()
        return ()

    def _move(self) -> None:
        for peer in self._schedule.links():
            self._feed(peer)
        for key, events in self._selector.select(self._wait_s(time.monotonic())):
            if key.data in self._open:  # not when one before it has failed their peer
                self._drive(key.data, events)
        self._expire(time.monotonic())

    def _cancel(self, job: BatchJob[TcpPeer]) -> None:
        if self._ledger.is_in_flight(job):
            self._end(job, "cancelled", cancelled=True)

    def _revoke(self, link: TcpPeer) -> None:
        self._fail_peer(link, REVOKED, waiting=True)

    def _feed(self, peer: TcpPeer) -> None:
        """Ask for as much of the peer's ready jobs as its windows take; connect first where needed."""
        while (job := self._schedule.head(peer)) is not None:
            if not job.cursor.remaining_bytes:
                self._schedule.discard(job)
                self._ledger.finish(job)
                continue
            link = peer.link_for_more(time.monotonic())
            if link is None:
                break
            if link.state is LinkState.CLOSED:
                self._attempt(link, self._open_link)
            else:
                self._ask(link, job)
        for link in peer.links:
            if link.has_to_write and link.state is not LinkState.CONNECTING:
                self._attempt(link, TcpLink.send)
            self._watch(link)

    def _ask(self, link: TcpLink, job: BatchJob[TcpPeer]) -> None:
        runs = job.cursor.peek(self._slice_bytes, MAX_PIECES)
        link.ask(job, runs, self._region)
        job.cursor.advance(int(runs[:, 2].sum()))
        if not job.cursor.remaining_bytes:
            self._schedule.discard(job)

    def _open_link(self, link: TcpLink) -> None:
        self._selector.register(link.open(), selectors.EVENT_WRITE, link)
        self._open.add(link)

    def _drive(self, link: TcpLink, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._attempt(link, TcpLink.send)
        if events & selectors.EVENT_READ and link in self._open:
            self._attempt(link, self._receive)
        link.deadline = None
        self._watch(link)

    def _receive(self, link: TcpLink) -> None:
        for answer in link.receive():
            self._on_answer(answer)

    def _on_answer(self, answer: ReadAnswer) -> None:
        job = answer.job
        if not self._ledger.is_in_flight(job):
            return
        job.moved_bytes += answer.moved_bytes
        if answer.error:
            self._end(job, answer.error)
        elif job.moved_bytes == job.cursor.total_bytes:
            self._ledger.finish(job)

    def _end(self, job: BatchJob[TcpPeer], error: str, *, cancelled: bool = False) -> None:
        """Finish a job before its last byte; what still arrives for it will be dropped."""
        self._schedule.discard(job)
        job.link.forget(job)
        self._ledger.finish(job, error, cancelled=cancelled)

    def _attempt(self, link: TcpLink, step: Callable[[TcpLink], None]) -> None:
        """Do `step`; a peer that is lost, or sends garbage, costs its own jobs only."""
        try:
            step(link)
        except BlockingIOError:
            return
        except PeerError as error:
            self._fail_link(link, f"{type(error).__name__}: {link}: {error}")
        except OSError as error:
            if not self._opens_again(link):
                self._fail_link(link, f"PeerLost: {link}: {error}")

    def _opens_again(self, link: TcpLink) -> bool:
        """Whether a link that the peer closed during the handshake may connect once more: its place may have gone to another.

        The jobs stay in the schedule, and the next turn opens the link.
        """
        if link.state not in (LinkState.HELLO, LinkState.HANDSHAKE) or link.attempts >= _ATTEMPTS:
            return False
        self._shut_link(link)
        return True

    def _fail_link(self, link: TcpLink, error: str) -> None:
        """Close a link that is lost: alone where it was not open yet and the peer has another that is, else all of its peer."""
        assert link.owner is not None  # noqa: S101
        if link.state is LinkState.OPEN or not link.owner.has_other_open(link):
            self._fail_peer(link.owner, error)
            return
        _log.warning("one connection fewer for %g s: %s", self._timeout_s, error)
        self._shut_link(link)
        link.rests_until = time.monotonic() + self._timeout_s

    def _fail_peer(self, peer: TcpPeer, error: str, *, waiting: bool = False) -> None:
        """Close the connections and fail the jobs that used them; the next ready job connects anew."""
        jobs = {job.ticket: job for job in self._schedule.discard_link(peer, waiting=waiting)}
        for link in peer.links:
            jobs.update((job.ticket, job) for job in self._shut_link(link))
        for job in jobs.values():
            self._ledger.finish(job, error)

    def _shut_link(self, link: TcpLink) -> list[BatchJob[TcpPeer]]:
        if link in self._open and link.sock is not None:
            self._selector.unregister(link.sock)
        self._open.discard(link)
        return link.close()

    def _watch(self, link: TcpLink) -> None:
        """Set what the selector waits for, and start the deadline of a link that the peer has to move."""
        if link not in self._open or link.sock is None:
            return
        reading = 0 if link.state is LinkState.CONNECTING else selectors.EVENT_READ
        events = reading | (selectors.EVENT_WRITE if link.has_to_write else 0)
        if self._selector.get_key(link.sock).events != events:
            self._selector.modify(link.sock, events, link)
        if not link.is_busy:
            link.deadline = None
        elif link.deadline is None:
            link.deadline = time.monotonic() + self._timeout_s

    def _wait_s(self, now: float) -> float:
        deadlines = [link.deadline for link in self._open if link.deadline is not None]
        return max(0.0, min(self._schedule.wait_s(now), min(deadlines, default=now + IDLE_S) - now))

    def _expire(self, now: float) -> None:
        """Fail links without progress; one that is in a reply is not woken for a few bytes, so take what has come first."""
        # SO_RCVLOWAT keeps the selector quiet below a mebibyte, so a slow link looks like a dead one until it is read.
        for link in [link for link in self._open if link.deadline is not None and link.deadline <= now]:
            if link in self._open and self._takes_some(link):
                link.deadline = None
                self._watch(link)
            elif link in self._open:
                self._fail_link(link, f"PeerLost: {link}: {_lack_within(self._timeout_s, link.state)}")

    def _takes_some(self, link: TcpLink) -> bool:
        """Take what has come; returns whether anything has."""
        before = link.received_bytes
        if link.state is not LinkState.CONNECTING:
            self._attempt(link, self._receive)
        return link.received_bytes > before


def _lack_within(timeout_s: float, state: LinkState) -> str:
    if state is LinkState.CONNECTING:
        return f"no connection within {timeout_s:g} s"
    hint = " (no hello: the process is stopped, or has no descriptor left)" if state is LinkState.HELLO else ""
    return f"no progress within {timeout_s:g} s{hint}"
