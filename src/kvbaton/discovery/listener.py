"""The router's ear: one thread that takes registrations in, as a ZeroMQ ROUTER would, and feeds the registry.

Whatever arrives, the thread goes on: what is no registration is counted by cause, logged (rate limited) with the field's
name, and skipped. With a cluster key, so is what no holder of the key has written. An instance that asks for it is answered,
in one frame: `{"type": "welcome"}` or `{"type": "refused", "reason": …}`; real routers answer nobody, and an answer that
cannot be sent at once is dropped. With a cluster key each connection has a nonce, which every message on it must carry
under its seal; one that does not is answered with the nonce: a recorded message is worth nothing on another connection.

A flood is dropped, and counted: a connection has so many messages per second, and speaks for so many instances; what is
beyond is not looked at. Everybody who sends has a turn, a small piece at a time, and all together have a fifth of a core:
what even that cannot read waits in its sender's buffers. Neither holds up the router's requests or the heartbeats of others.
Connections, frames and messages are bounded (`zmtp.py`); when there are too many connections, the one that was silent for
longest goes.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from kvbaton.core.auth import Seal
from kvbaton.discovery.heartbeats import AnswerKind
from kvbaton.discovery.log_limit import LogLimit
from kvbaton.discovery.messages import Cause, InstanceType, Malformed, Registration, decode_registration
from kvbaton.discovery.registry import Left, Outcome, Refreshed, Registered, RegistrationRefused, Registry, Replaced
from kvbaton.discovery.zmtp import Zmtp, ZmtpError, encode_frame
from kvbaton.errors import Bug, ConfigError

__all__ = ["Listener", "LogLimit"]

_logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 2048
_BACKLOG = 1024
_READ_BYTES = 8192
_MAX_UNSENT_BYTES = 4096
_MAX_ACCEPTS = 64
_LOOK_S = 0.1
_HANDSHAKE_S = 5.0
_REST_PER_WORK = 4.0
_LONGEST_REST_S = 0.2
_JOIN_S = 5.0
_FRAMES = 2
_MESSAGES_PER_S = 100.0
_BURST = 200.0
_SPEAKS_FOR = 64
_FORGET_S = 60.0
_NONCE_BYTES = 16
_JOIN_LINES = 200


class _Connection:
    """One sender: its socket, what it has not finished saying, and what it was not sent yet."""

    def __init__(self, sock: socket.socket, name: str, now: float) -> None:
        self.socket = sock
        self.name = name
        self.since = now
        self.nonce = secrets.token_bytes(_NONCE_BYTES)
        self.zmtp = Zmtp()
        self._unsent = bytearray()
        self._credit = _BURST
        self._credited_at = now
        self._speaks_for: dict[tuple[str, InstanceType], float] = {}

    @property
    def has_unsent(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._unsent)

    def allowed(self, count: int, now: float) -> int:
        """Of so many messages, how many may be looked at; the others are too many."""
        self._credit = min(_BURST, self._credit + (now - self._credited_at) * _MESSAGES_PER_S)
        self._credited_at = now
        allowed = min(count, int(self._credit))
        self._credit -= allowed
        return allowed

    def may_speak_for(self, message: Registration, now: float) -> bool:
        """Whether the sender may register one more instance; those it has not spoken of for long do not count."""
        key = (message.http_address, message.type)
        if key not in self._speaks_for and len(self._speaks_for) >= _SPEAKS_FOR:
            self._speaks_for = {k: last for k, last in self._speaks_for.items() if now - last < _FORGET_S}
            if len(self._speaks_for) >= _SPEAKS_FOR:
                return False
        self._speaks_for[key] = now
        return True

    def read(self) -> list[list[bytes]] | None:
        """The messages that are complete now; None at the end. Raises ZmtpError."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        return self.zmtp.feed(data) if data else None

    def answer(self, body: bytes) -> None:
        """Send one message if there is room for it."""
        if len(self._unsent) <= _MAX_UNSENT_BYTES:
            self._unsent += encode_frame(body)

    def flush(self) -> bool:
        """Send what can be sent now; False when the sender is gone."""
        self._unsent += self.zmtp.outgoing()
        if len(self._unsent) > 2 * _MAX_UNSENT_BYTES:
            return False
        try:
            if self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        return True


class Listener:
    """Binds `host:port` when entered and feeds `registry` until it is left; with `cluster_key`, only sealed messages count."""

    def __init__(
        self,
        registry: Registry,
        host: str,
        port: int,
        clock: Callable[[], float] = time.monotonic,
        cluster_key: bytes | None = None,
        max_connections: int = _MAX_CONNECTIONS,
    ) -> None:
        self._registry = registry
        self._host = host
        self._port = port
        self._clock = clock
        self._seal = Seal(cluster_key)
        self._max_connections = max_connections
        self._limit = LogLimit()
        self._joins = LogLimit(burst=_JOIN_LINES)
        self._malformed: Counter[Cause] = Counter()
        self._messages = 0
        self._stopping = threading.Event()
        self._connections: OrderedDict[int, _Connection] = OrderedDict()
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
        """Raise Bug when the thread has died although nobody stopped it."""
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
        return len(self._connections)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _listen(self, bound: socket.socket) -> None:
        with bound, selectors.DefaultSelector() as selector:
            selector.register(bound, selectors.EVENT_READ)
            while not self._stopping.is_set():
                try:
                    self._turn(bound, selector)
                except Exception:
                    self._malformed[Cause.INTERNAL] += 1
                    _logger.exception("discovery: a message could not be handled; it is skipped")
                    self._stopping.wait(_LOOK_S)
            for connection in list(self._connections.values()):
                self._drop(connection, selector)

    def _turn(self, bound: socket.socket, selector: selectors.BaseSelector) -> None:
        ready = selector.select(_LOOK_S)
        began = time.thread_time()
        for key, _ in ready:
            if key.fileobj is bound:
                self._accept(bound, selector)
            elif (connection := self._connections.get(key.fd)) is not None:
                self._serve(connection, selector)
        self._drop_late(selector)
        self._stopping.wait(min(_REST_PER_WORK * (time.thread_time() - began), _LONGEST_REST_S))

    def _accept(self, bound: socket.socket, selector: selectors.BaseSelector) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                sock, address = bound.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:
                self._make_room(selector)
                return
            sock.setblocking(False)
            if len(self._connections) >= self._max_connections:
                self._make_room(selector)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(sock, str(address[0]), self._clock())
            self._connections[sock.fileno()] = connection
            selector.register(sock, selectors.EVENT_READ)
            self._serve(connection, selector)

    def _serve(self, connection: _Connection, selector: selectors.BaseSelector) -> None:
        """Read one piece, and handle what is complete. Whoever does not speak as it must is cut off, and counted."""
        try:
            messages = connection.read()
        except ZmtpError as error:
            self._messages += 1
            cause = Cause.TOO_LONG if error.is_too_long else Cause.NOT_ZMTP
            self._skip(Malformed(cause, "", str(error)), connection.name, self._clock())
            messages = None
        self._take_all(messages or [], connection)
        if messages is None or not connection.flush():
            self._drop(connection, selector)
            return
        if messages:
            self._connections.move_to_end(connection.socket.fileno())
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0)
        if selector.get_key(connection.socket).events != events:
            selector.modify(connection.socket, events)

    def _take_all(self, messages: list[list[bytes]], connection: _Connection) -> None:
        now = self._clock()
        allowed = connection.allowed(len(messages), now)
        for frames in messages[:allowed]:
            answer = _answer_to(self.take([connection.name.encode(), *frames], connection), connection.nonce)
            if answer is not None:
                connection.answer(answer)
        if dropped := len(messages) - allowed:
            self._messages += dropped
            self._malformed[Cause.TOO_MANY] += dropped - 1
            detail = f"more than {_MESSAGES_PER_S:g} messages per second; the others are dropped"
            self._skip(Malformed(Cause.TOO_MANY, "", detail), connection.name, now)

    def _make_room(self, selector: selectors.BaseSelector) -> None:
        """This process has too many connections, or no file descriptor left: whoever was silent for longest goes."""
        if self._connections:
            self._drop(next(iter(self._connections.values())), selector)

    def _drop_late(self, selector: selectors.BaseSelector) -> None:
        """Whoever has been silent for longest is in front; those who never finished their handshake go."""
        late = self._clock() - _HANDSHAKE_S
        for connection in list(self._connections.values())[:_MAX_ACCEPTS]:
            if connection.since < late and not connection.zmtp.is_ready:
                self._drop(connection, selector)

    def _drop(self, connection: _Connection, selector: selectors.BaseSelector) -> None:
        del self._connections[connection.socket.fileno()]
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(connection.socket)
        connection.socket.close()

    def take(self, frames: list[bytes], connection: _Connection | None = None) -> Outcome | Malformed:
        """Handle one message: the sender's name and the frame. Returns what came of it."""
        self._messages += 1
        now = self._clock()
        source = frames[0].decode(errors="replace") if frames else ""
        if len(frames) != _FRAMES:
            detail = f"{len(frames) - 1} frames instead of one; send one msgpack map from a DEALER socket"
            return self._skip(Malformed(Cause.FRAMES, "", detail), source, now)
        message = decode_registration(frames[1], self._seal, b"" if connection is None else connection.nonce)
        if isinstance(message, Malformed):
            return self._skip(message, source, now)
        if connection is not None and not connection.may_speak_for(message, now):
            detail = f"{message.http_address!r} is one more than the {_SPEAKS_FOR} instances that a connection may speak for"
            return self._skip(Malformed(Cause.TOO_MANY, "http_address", detail), source, now)
        outcome = self._registry.register(message, now)
        self._tell(message, outcome, now)
        return outcome

    def _skip(self, malformed: Malformed, source: str, now: float) -> Malformed:
        self._malformed[malformed.cause] += 1
        if malformed.cause is Cause.NOT_FRESH:
            return malformed
        held_back = self._limit.allow((malformed.cause, malformed.field, source), now)
        if held_back is not None:
            _logger.warning("discovery: registration from %s skipped: %s%s", source, malformed, _more(held_back))
        return malformed

    def _tell(self, message: Registration, outcome: Outcome, now: float) -> None:
        if isinstance(outcome, Refreshed):
            return
        name = f"{message.type.word} instance {message.http_address}"
        match outcome:
            case Registered():
                self._tell_join(f"discovery: {name} joined ({message.zmq_address})", now)
            case Replaced(earlier=earlier):
                was = ", ".join(f"{i.type.word} {i.zmq_address} {i.registration.incarnation}".rstrip() for i in earlier)
                self._tell_join(f"discovery: {name} was restarted ({message.zmq_address}, before: {was})", now)
            case Left(instance=instance) if instance is not None:
                self._tell_join(f"discovery: {name} said goodbye", now)
            case RegistrationRefused(reason=reason):
                held_back = self._limit.allow((message.http_address, message.type, reason), now)
                if held_back is not None:
                    _logger.warning("discovery: %s refused: %s%s", name, reason, _more(held_back))
            case _:
                pass

    def _tell_join(self, line: str, now: float) -> None:
        held_back = self._joins.allow((line, now), now)
        if held_back is not None:
            _logger.info("%s%s", line, _more(held_back))


def _answer_to(outcome: Outcome | Malformed, nonce: bytes) -> bytes | None:
    """What the sender hears, if it wants to, or has to."""
    match outcome:
        case Malformed(cause=Cause.NOT_FRESH):
            return msgspec.msgpack.encode({"type": AnswerKind.CHALLENGE, "nonce": nonce})
        case Registered(instance) | Refreshed(instance) | Replaced(instance) if instance.registration.answer:
            return msgspec.msgpack.encode({"type": AnswerKind.WELCOME})
        case RegistrationRefused(reason, wants_answer=True):
            return msgspec.msgpack.encode({"type": AnswerKind.REFUSED, "reason": reason})
    return None


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise _unbound(host, port, error) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(address)
        bound.listen(_BACKLOG)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise _unbound(host, port, error) from error
    return bound


def _unbound(host: str, port: int, error: Exception) -> ConfigError:
    return ConfigError(
        f"discovery address {host}:{port} cannot be bound ({error}); stop what uses the port, or choose another with"
        " --discovery-port"
    )


def _more(held_back: int) -> str:
    return f" ({held_back} similar lines held back)" if held_back else ""
