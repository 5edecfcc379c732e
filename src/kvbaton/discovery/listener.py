"""The router's ear: one thread with a ZMQ ROUTER socket that takes registrations in and feeds the registry.

Whatever arrives, the thread goes on: what is no registration is counted by cause, logged (rate limited) with the field's
name, and skipped. With a cluster key, so is what no holder of the key has written. An instance that asks for it is answered,
in one frame: `{"type": "welcome"}` or `{"type": "refused", "reason": …}`; real routers answer nobody, and an answer that
cannot be sent at once is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Self

import msgspec
import zmq

from kvbaton.core.auth import Seal
from kvbaton.discovery.heartbeats import NewsKind
from kvbaton.discovery.messages import Cause, Malformed, Registration, decode_registration
from kvbaton.discovery.registry import Left, Outcome, Refreshed, Refused, Registered, Registry, Replaced
from kvbaton.errors import Bug, ConfigError

__all__ = ["Listener", "LogLimit"]

_logger = logging.getLogger(__name__)

_MAX_FRAME_BYTES = 16 * 1024
_MAX_QUEUED_MESSAGES = 16
_MAX_UNSENT = 16
_MAX_TURN = 256
_REST_PER_WORK = 4.0
_LONGEST_REST_S = 0.2
_POLL_MS = 100
_HANDSHAKE_MS = 5000
_JOIN_S = 5.0
_FRAMES = 2


class LogLimit:
    """Lets one line per key and `every_s` through, and at most `burst` lines in all in that time. Time is an argument."""

    def __init__(self, every_s: float = 10.0, burst: int = 50, max_keys: int = 1024) -> None:
        self._every_s = every_s
        self._burst = burst
        self._max_keys = max_keys
        self._last: OrderedDict[Hashable, float] = OrderedDict()
        self._window_start = float("-inf")
        self._window_lines = 0
        self._suppressed = 0

    def allow(self, key: Hashable, now: float) -> int | None:
        """How many lines were held back since the last one that went through, or None when this one is held back too."""
        if now - self._window_start >= self._every_s:
            self._window_start, self._window_lines = now, 0
        too_soon = now - self._last.get(key, float("-inf")) < self._every_s
        if too_soon or self._window_lines >= self._burst:
            self._suppressed += 1
            return None
        self._last[key] = now
        self._last.move_to_end(key)
        if len(self._last) > self._max_keys:
            self._last.popitem(last=False)
        self._window_lines += 1
        suppressed, self._suppressed = self._suppressed, 0
        return suppressed


class Listener:
    """Binds `host:port` when entered and feeds `registry` until it is left; with `cluster_key`, only sealed messages count."""

    def __init__(
        self,
        registry: Registry,
        host: str,
        port: int,
        clock: Callable[[], float] = time.monotonic,
        cluster_key: bytes | None = None,
    ) -> None:
        self._registry = registry
        self._host = host
        self._port = port
        self._clock = clock
        self._seal = Seal(cluster_key)
        self._limit = LogLimit()
        self._malformed: Counter[Cause] = Counter()
        self._messages = 0
        self._stopping = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Bind, and take registrations from now on. Raises ConfigError when the address cannot be bound."""
        self._context = zmq.Context(io_threads=1)
        socket = self._context.socket(zmq.ROUTER)
        try:
            _bind(socket, self._host, self._port)
        except ConfigError:
            self._context.destroy(linger=0)
            self._context = None
            raise
        self._thread = threading.Thread(target=self._listen, args=(socket,), name="kvbaton-discovery", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and free the port. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        if self._context is not None and not self.is_alive:
            self._context.destroy(linger=0)
            self._context = None

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

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _listen(self, socket: zmq.Socket[bytes]) -> None:
        while not self._stopping.is_set():
            try:
                if socket.poll(_POLL_MS, zmq.POLLIN):
                    self._take_what_is_there(socket)
            except Exception:
                self._malformed[Cause.INTERNAL] += 1
                _logger.exception("discovery: a message could not be handled; it is skipped")
                self._stopping.wait(_POLL_MS / 1000)
        socket.close(linger=0)

    def _take_what_is_there(self, socket: zmq.Socket[bytes]) -> None:
        """A bounded number of messages, in turn from everybody who sent some.

        When there are more, we rest for four times as long as we worked: a flood has a fifth of a core, waits in its sender's
        buffers, and holds up neither this router's requests nor the heartbeats of others.
        """
        began = time.thread_time()
        for _ in range(_MAX_TURN):
            try:
                frames = _receive(socket)
            except zmq.Again:
                return
            answer = _answer_to(self.take(frames))
            if answer is not None:
                with contextlib.suppress(zmq.ZMQError):
                    socket.send_multipart([frames[0], answer], zmq.NOBLOCK)
        self._stopping.wait(min(_REST_PER_WORK * (time.thread_time() - began), _LONGEST_REST_S))

    def take(self, frames: list[bytes]) -> Outcome | Malformed:
        """Handle one message: the sender's identity and the frame. Returns what came of it."""
        self._messages += 1
        now = self._clock()
        if len(frames) != _FRAMES:
            detail = f"{len(frames) - 1} frames instead of one; send one msgpack map from a DEALER socket"
            return self._skip(Malformed(Cause.FRAMES, "", detail), now)
        message = decode_registration(frames[1], self._seal)
        if isinstance(message, Malformed):
            return self._skip(message, now)
        outcome = self._registry.register(message, now)
        self._tell(message, outcome, now)
        return outcome

    def _skip(self, malformed: Malformed, now: float) -> Malformed:
        self._malformed[malformed.cause] += 1
        held_back = self._limit.allow((malformed.cause, malformed.field), now)
        if held_back is not None:
            _logger.warning("discovery: registration skipped: %s%s", malformed, _more(held_back))
        return malformed

    def _tell(self, message: Registration, outcome: Outcome, now: float) -> None:
        name = f"{message.type.word} instance {message.http_address}"
        match outcome:
            case Registered():
                _logger.info("discovery: %s joined (%s)", name, message.zmq_address)
            case Replaced(earlier=earlier):
                was = ", ".join(f"{i.type.word} {i.zmq_address} {i.registration.incarnation}".rstrip() for i in earlier)
                _logger.info("discovery: %s was restarted (%s, before: %s)", name, message.zmq_address, was)
            case Left(instance=instance) if instance is not None:
                _logger.info("discovery: %s said goodbye", name)
            case Refused(reason=reason):
                held_back = self._limit.allow((message.http_address, message.type, reason), now)
                if held_back is not None:
                    _logger.warning("discovery: %s refused: %s%s", name, reason, _more(held_back))
            case _:
                pass


def _answer_to(outcome: Outcome | Malformed) -> bytes | None:
    """What the sender hears, if it wants to."""
    match outcome:
        case Registered(instance) | Refreshed(instance) | Replaced(instance) if instance.registration.answer:
            return msgspec.msgpack.encode({"type": NewsKind.WELCOME})
        case Refused(reason, wants_answer=True):
            return msgspec.msgpack.encode({"type": NewsKind.REFUSED, "reason": reason})
    return None


def _bind(socket: zmq.Socket[bytes], host: str, port: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.SNDHWM, _MAX_UNSENT)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    try:
        socket.bind(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
    except zmq.ZMQError as error:
        raise ConfigError(
            f"discovery address {host}:{port} cannot be bound ({error}); stop what uses the port, or choose another"
            " with --discovery-port"
        ) from error


def _receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    frames: list[bytes] = []
    while True:
        frame = socket.recv(zmq.NOBLOCK)
        if len(frames) <= _FRAMES:
            frames.append(frame)
        if not socket.getsockopt(zmq.RCVMORE):
            return frames


def _more(held_back: int) -> str:
    return f" ({held_back} similar lines held back)" if held_back else ""
