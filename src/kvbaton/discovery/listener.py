"""The discovery port of a router: one thread that takes registrations in, as a ZeroMQ ROUTER would, and feeds the registry.

Whatever arrives, the thread goes on: what is no registration is counted by cause, logged (rate limited) with the field's
name, and skipped. With a cluster key, so is what no holder of the key has written. An instance that asks for an answer gets
one, in one frame: `{"type": "welcome"}` or `{"type": "refused", "reason": …}`; real routers send none, and an answer that
cannot be sent at once is dropped. With a cluster key each connection has a nonce, which every message on it must carry under
its seal, with a count that grows; one that does not is answered with the nonce. So a recorded message is worth nothing, on
another connection or on the same one.

Connections are kept by a `Door`: a sender is unknown until its first registration, and has few bytes and seconds until then.
A flood is dropped, and counted: a connection has so many messages per second, and registers so many instances; what is beyond
is not looked at. Every sender has a turn, a small piece at a time, and all together have a fifth of a core: what even that
cannot read waits in its sender's buffers. Neither holds up the router's requests or the heartbeats of others.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Self

import msgspec

from kvbaton.core.auth import NONCE_BYTES, ClusterKey, Seal
from kvbaton.discovery.heartbeats import AnswerKind
from kvbaton.discovery.messages import (
    Cause,
    Freshness,
    InstanceType,
    Malformed,
    Registration,
    TransferMode,
    decode_registration,
)
from kvbaton.discovery.registry import Left, Outcome, Refreshed, Registered, RegistrationRefused, Registry, Replaced
from kvbaton.errors import Bug, ConfigError
from kvbaton.wire.door import Door, DoorLimits, EndCause, PeerConnection
from kvbaton.wire.log_limit import LogLimit, PacedLines, shown
from kvbaton.wire.machine import listen_on
from kvbaton.wire.tls import ClusterTls

__all__ = ["Listener"]

_logger = logging.getLogger(__name__)

_READ_BYTES = 8192
_LOOK_S = 0.1
_REST_PER_WORK = 4.0
_LONGEST_REST_S = 0.2
_JOIN_S = 5.0
_GUARANTEED_S = 1.0
_FRAMES = 2
_MESSAGES_PER_S = 100.0
_BURST = 200.0
_REGISTERS_FOR = 64
_FORGET_S = 60.0
_JOIN_LINES = 200
_COUNTED_ENDS = {
    EndCause.NOT_ZMTP: Cause.NOT_ZMTP,
    EndCause.TLS_FAILED: Cause.TLS_FAILED,
    EndCause.TOO_LONG: Cause.TOO_LONG,
    EndCause.TOO_MANY_PARTS: Cause.TOO_LONG,
}


class _Sender:
    """What one connection may still send, and what makes its messages new."""

    def __init__(self, now: float) -> None:
        self.freshness = Freshness(secrets.token_bytes(NONCE_BYTES))
        self._credit = _BURST
        self._credited_at = now
        self._registers: dict[tuple[str, InstanceType], float] = {}

    def take_credit(self, now: float) -> bool:
        """Whether one more message is looked at; else it is one too many."""
        self._credit = min(_BURST, self._credit + (now - self._credited_at) * _MESSAGES_PER_S)
        self._credited_at = now
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True

    def take_instance(self, message: Registration, now: float) -> bool:
        """Whether the sender may register one more instance; those that it has not named for long do not count."""
        key = (message.http_address, message.type)
        if key not in self._registers and len(self._registers) >= _REGISTERS_FOR:
            self._registers = {k: last for k, last in self._registers.items() if now - last < _FORGET_S}
            if len(self._registers) >= _REGISTERS_FOR:
                return False
        self._registers[key] = now
        return True


class Listener:
    """Binds `host:port` when entered and feeds `registry` until it is left; with `cluster_key`, only sealed messages count.

    With `tls`, only senders that encrypt, with a certificate of the cluster.

    `p2p_mode` is the mode of instances of P2pNcclConnector, which register without one; without it they are skipped.
    """

    def __init__(
        self,
        registry: Registry,
        host: str,
        port: int,
        clock: Callable[[], float] = time.monotonic,
        cluster_key: ClusterKey | None = None,
        max_connections: int | None = None,
        p2p_mode: TransferMode | None = None,
        tls: ClusterTls | None = None,
    ) -> None:
        self._tls = tls
        self._p2p_mode = p2p_mode
        self._registry = registry
        self._host = host
        self._port = port
        self._clock = clock
        self._seal = Seal(cluster_key)
        limits = {} if max_connections is None else {"connections": max_connections}
        # The whole thread has a share of a core, so that unknown senders need none of their own. libzmq takes three round trips
        # for a handshake, each with a rest of this thread, and two more answer our challenge.
        self._limits = DoorLimits(
            read_bytes=_READ_BYTES,
            messages_per_turn=1,
            all_unsent_bytes=4 << 20,
            guaranteed_s=_GUARANTEED_S,
            unknown_share=1.0,
            **limits,
        )
        self._warnings = PacedLines()
        self._joins = LogLimit(burst=_JOIN_LINES)
        self._malformed: Counter[Cause] = Counter()
        self._messages = 0
        self._stopping = threading.Event()
        self._connections = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Bind, and take registrations from now on. Raises ConfigError when the address cannot be bound."""
        bound = _bind(self._host, self._port)
        self._thread = threading.Thread(target=self._listen, args=(bound,), name="kvbaton-discovery", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and free the port. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise Bug when the thread has died although `stop` was not called."""
        if not self.is_alive and not self._stopping.is_set():
            raise Bug("the discovery listener's thread has died; registrations are no longer taken in")

    def messages_total(self) -> int:
        """How many messages have arrived, good or bad."""
        return self._messages

    def malformed_total(self) -> dict[Cause, int]:
        """How many messages were skipped, by cause."""
        return {cause: self._malformed[cause] for cause in Cause}

    def connections(self) -> int:
        """How many senders are connected."""
        return self._connections

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _listen(self, bound: socket.socket) -> None:
        door = Door(self._limits, self._on_end, tls=self._tls, clock=self._clock)
        door.listen(bound)
        while not self._stopping.is_set():
            try:
                self._turn(door)
            except Exception:
                self._malformed[Cause.INTERNAL] += 1
                _logger.exception("discovery: a message could not be handled; it is skipped")
                self._stopping.wait(_LOOK_S)
        door.close()

    def _turn(self, door: Door) -> None:
        door.wait(_LOOK_S)
        began = time.thread_time()
        for connection, frames in door.receive():
            answer = self._take_from(connection, frames, door)
            if answer is not None:
                door.send(connection, answer)
        self._connections = len(door)
        if self._warnings:
            self._log_due(self._clock())
        self._stopping.wait(min(_REST_PER_WORK * (time.thread_time() - began), _LONGEST_REST_S))

    def _take_from(self, connection: PeerConnection, frames: list[bytes], door: Door) -> bytes | None:
        """Handle one message of a connection; what is to be answered."""
        now = self._clock()
        if not isinstance(connection.tag, _Sender):
            connection.tag = _Sender(now)
        sender = connection.tag
        if not sender.take_credit(now):
            self._messages += 1
            detail = f"more than {_MESSAGES_PER_S:g} messages per second; the others are dropped"
            self._skip(Malformed(Cause.TOO_MANY, "", detail), connection.name, now)
            return None
        outcome = self.take([connection.name.encode(), *frames], sender)
        if not isinstance(outcome, Malformed):
            door.admit(connection)
        return _answer_to(outcome, sender.freshness.nonce)

    def _on_end(self, connection: PeerConnection, ended: EndCause, detail: str) -> None:
        """What breaks the rules of the wire counts as a message. Silent and lost connections are not worth a line."""
        cause = _COUNTED_ENDS.get(ended)
        if cause is not None:
            self._messages += 1
            self._skip(Malformed(cause, "", detail), connection.name, self._clock())

    def take(self, frames: list[bytes], sender: _Sender | None = None) -> Outcome | Malformed:
        """Handle one message: the sender's name and the frame. Returns what came of it."""
        self._messages += 1
        now = self._clock()
        source = frames[0].decode(errors="replace") if frames else ""
        if len(frames) != _FRAMES:
            detail = f"{len(frames) - 1} frames instead of one; send one msgpack map from a DEALER socket"
            return self._skip(Malformed(Cause.FRAMES, "", detail), source, now)
        freshness = None if sender is None else sender.freshness
        message = decode_registration(frames[1], self._seal, freshness, self._p2p_mode)
        if isinstance(message, Malformed):
            return self._skip(message, source, now)
        if sender is not None and not sender.take_instance(message, now):
            detail = f"{message.http_address!r} is one more than the {_REGISTERS_FOR} instances that a connection may register"
            return self._skip(Malformed(Cause.TOO_MANY, "http_address", detail), source, now)
        outcome = self._registry.register(message, now)
        self._log(message, outcome, now)
        return outcome

    def _skip(self, malformed: Malformed, source: str, now: float) -> Malformed:
        self._malformed[malformed.cause] += 1
        if malformed.cause is Cause.NOT_FRESH:
            return malformed
        text = f"registration from {source} skipped: {shown(str(malformed))}"
        self._warn(malformed.cause, (malformed.field, source), text, now)
        return malformed

    def _warn(self, cause: str, key: Hashable, text: str, now: float) -> None:
        self._warnings.add(cause, key, text, now)
        self._log_due(now)

    def _log_due(self, now: float) -> None:
        for line in self._warnings.due(now):
            _logger.warning("discovery: %s", line)

    def _log(self, message: Registration, outcome: Outcome, now: float) -> None:
        if isinstance(outcome, Refreshed):
            return
        name = f"{message.type.word} instance {message.http_address}"
        match outcome:
            case Registered():
                self._log_join(f"discovery: {name} joined ({message.zmq_address})", now)
            case Replaced(earlier=earlier):
                was = ", ".join(f"{i.type.word} {i.zmq_address} {i.registration.incarnation}".rstrip() for i in earlier)
                self._log_join(f"discovery: {name} was restarted ({message.zmq_address}, before: {was})", now)
            case Left(instance=instance) if instance is not None:
                self._log_join(f"discovery: {name} has left", now)
            case RegistrationRefused(reason=reason):
                self._warn("refused", (message.http_address, message.type, reason), f"{name} refused: {reason}", now)
            case _:
                pass

    def _log_join(self, line: str, now: float) -> None:
        held_back = self._joins.allow((line, now), now)
        if held_back is not None:
            _logger.info("%s%s", line, _more(held_back))


def _answer_to(outcome: Outcome | Malformed, nonce: bytes) -> bytes | None:
    """What the sender is answered, if it asks for it, or needs it."""
    match outcome:
        case Malformed(cause=Cause.NOT_FRESH):
            return msgspec.msgpack.encode({"type": AnswerKind.CHALLENGE, "nonce": nonce})
        case Malformed(cause=Cause.NOT_SEALED, detail=reason, wants_answer=True):
            return msgspec.msgpack.encode({"type": AnswerKind.REFUSED, "reason": reason})
        case Registered(instance) | Refreshed(instance) | Replaced(instance) if instance.registration.answer:
            return msgspec.msgpack.encode({"type": AnswerKind.WELCOME})
        case RegistrationRefused(reason, wants_answer=True):
            return msgspec.msgpack.encode({"type": AnswerKind.REFUSED, "reason": reason})
    return None


def _bind(host: str, port: int) -> socket.socket:
    try:
        return listen_on(host, port)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"discovery address {host}:{port} cannot be bound ({error}); stop what uses the port, or choose another with"
            " --discovery-port"
        ) from error


def _more(held_back: int) -> str:
    return f" ({held_back} similar lines held back)" if held_back else ""
