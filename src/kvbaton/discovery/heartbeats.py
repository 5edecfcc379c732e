"""Heartbeats to any number of routers: sends what is due and reports what a router answers. One thread owns the sockets.

Each router has its own socket, and a send never waits: a router that is away holds up no other, and nothing stale queues up
for it (`dealers.py`). Real routers never answer; kvbaton's does, when a registration asks for it. With a cluster key it sends a
challenge first: a nonce for the connection, which belongs under the seal of all that follows.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import zmq

from kvbaton.config import KeyFile
from kvbaton.core.auth import NONCE_BYTES, ClusterKey, Seal
from kvbaton.discovery.dealers import MAX_ANSWERS, Dealer, TlsDealer, ZmqDealer
from kvbaton.discovery.messages import Freshness, Registration, encode_registration

__all__ = ["AnswerKind", "Announcement", "Heartbeats", "RouterEvent", "RouterEventKind"]

_RETRY_S = 0.1
_COMPLAIN_AFTER_S = 5.0
_EAGER_S = 1.0
_EAGER_LOOK_S = 0.02


class Announcement(msgspec.Struct, frozen=True):
    """What is sent to which routers, and how often; with a key, or a file of keys, sealed; with certificates, encrypted."""

    registration: Registration
    routers: tuple[str, ...]
    heartbeat_s: float
    cluster_key: bytes | None = None
    tls_dir: str = ""
    cluster_key_file: str = ""

    def __repr__(self) -> str:
        return f"Announcement({self.registration.http_address} to {', '.join(self.routers)})"

    def key(self) -> ClusterKey | None:
        """What the messages are sealed with. Raises ConfigError for a file that cannot be used."""
        return KeyFile(Path(self.cluster_key_file)) if self.cluster_key_file else self.cluster_key


class AnswerKind(enum.StrEnum):
    """What a router may answer to a registration."""

    WELCOME = "welcome"
    REFUSED = "refused"
    CHALLENGE = "challenge"


class RouterEventKind(enum.StrEnum):
    """What has changed between us and a router."""

    REACHED = "reached"
    AWAY = "away"
    WELCOME = "welcome"
    REFUSED = "refused"


class RouterEvent(msgspec.Struct, frozen=True):
    """A change at one router; `detail` is a reason as text, or empty."""

    router: str
    kind: RouterEventKind
    detail: str = ""


class _RouterAnswer(msgspec.Struct, frozen=True):
    """What kvbaton's router answers to a registration that requests an answer, or that must prove its key first."""

    type: AnswerKind
    reason: str = ""
    nonce: bytes = b""


class _Link:
    """One router: its socket, when the next message is due, and its last answer."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], router: str, announcement: Announcement, seal: Seal, now: float
    ) -> None:
        self.router = router
        self._registration = announcement.registration
        self._seal = seal
        self.due = now
        self.sent_at = now
        self._asked_at = -_RETRY_S
        self._nonce = b""
        self._count = 0
        self.away_since: float | None = now
        self.complained = False
        self.answer: _RouterAnswer | None = None
        self._dealer: Dealer = (
            TlsDealer(router, Path(announcement.tls_dir)) if announcement.tls_dir else ZmqDealer(context, router)
        )

    def send(self, *, bye: bool = False) -> bool:
        """Register, send a heartbeat, or report that the instance leaves; False when the router cannot be reached now."""
        message = msgspec.structs.replace(self._registration, answer=not bye, bye=bye)
        return self._dealer.send(encode_registration(message, self._seal, self._next_stamp()))

    def refusal(self) -> str:
        """Why the connection itself was refused; empty when it was not."""
        return self._dealer.refusal()

    def _next_stamp(self) -> bytes:
        """The nonce of the connection and the next count: the router takes each once."""
        self._count += 1
        return Freshness.stamp(self._nonce, self._count) if self._nonce else b""

    def read_answer(self, now: float) -> _RouterAnswer | None:
        """The latest answer, when it differs from the one before. What is no answer is skipped."""
        latest = self.answer
        for _ in range(MAX_ANSWERS):
            received = self._dealer.receive()
            if received is None:
                break
            try:
                answer = msgspec.msgpack.decode(received, type=_RouterAnswer)
            except msgspec.MsgspecError:
                continue
            if answer.type is AnswerKind.CHALLENGE:
                self._prove(answer.nonce, now)
            else:
                latest = answer
        if latest == self.answer:
            return None
        self.answer = latest
        return latest

    def _prove(self, nonce: bytes, now: float) -> None:
        """Send it again with the nonce, at once, but not as often as a hostile router likes to ask."""
        self._nonce = nonce[:NONCE_BYTES]
        if now - self._asked_at >= _RETRY_S:
            self._asked_at = self.due = now

    def next_look(self, now: float) -> float:
        """When to look at it again: soon while a router that may send a challenge has not answered, else when a beat is due."""
        is_eager = self._seal.is_keyed and self.answer is None and now - self.sent_at < _EAGER_S
        return min(self.due, now + _EAGER_LOOK_S) if is_eager else self.due

    def close(self) -> None:
        """Flush what was sent within the linger time, and close."""
        self._dealer.close()


class Heartbeats(AbstractContextManager["Heartbeats"]):
    """Sends the hello of `announcement` to each of its routers whenever it is due; `report` receives what changes."""

    def __init__(self, announcement: Announcement, report: Callable[[RouterEvent], None], now: float) -> None:
        self._announcement = announcement
        self._report = report
        seal = Seal(announcement.key())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._links = [_Link(self._context, router, announcement, seal, now) for router in announcement.routers]

    def __exit__(self, *_: object) -> None:
        for link in self._links:
            link.close()
        self._context.term()

    def turn(self, now: float) -> float:
        """Send what is due and read what was answered; when the next message will be due."""
        for link in self._links:
            if now >= link.due:
                self._beat(link, now)
            answer = link.read_answer(now)
            if refusal := link.refusal():
                self._report(RouterEvent(link.router, RouterEventKind.REFUSED, refusal))
            if answer is not None:
                self._report(RouterEvent(link.router, RouterEventKind(answer.type), answer.reason))
        return min(link.next_look(now) for link in self._links)

    def send_goodbye(self, now: float) -> None:
        """Send every router that can be reached a goodbye; the next turn after this registers anew."""
        for link in self._links:
            link.send(bye=True)
            link.due, link.away_since, link.answer = now, now, None

    def _beat(self, link: _Link, now: float) -> None:
        if link.send():
            link.due = now + self._announcement.heartbeat_s
            if link.away_since is not None:
                link.sent_at = now
                self._report(RouterEvent(link.router, RouterEventKind.REACHED))
            link.away_since, link.complained = None, False
            return
        link.due = now + min(_RETRY_S, self._announcement.heartbeat_s)
        if link.away_since is None:
            link.away_since, link.answer = now, None
        if not link.complained and now - link.away_since >= _COMPLAIN_AFTER_S:
            link.complained = True
            self._report(RouterEvent(link.router, RouterEventKind.AWAY, f"{now - link.away_since:.0f} s"))
