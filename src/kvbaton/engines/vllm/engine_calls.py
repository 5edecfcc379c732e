"""How vLLM's engine process calls its worker: a request has come in, so a step that only waits for caches has to end now.

While requests wait for their caches, vLLM takes one step after the other without a forward, and each waits in the worker for
news of the agents. A new request is taken up between two steps. It comes in at the engine process, where only the thread that
reads vLLM's sockets sees it at once: that thread sends a byte to the worker, whose step ends. So steps may wait for long, and
no request waits for them. As long as no engine process is connected, steps have to be short.

The socket is in Linux's abstract namespace, and taken only from processes of the same user on the same host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable

from kvbaton.core.handoff import Incarnation

__all__ = ["CallListener", "EngineCaller", "listen"]

log = logging.getLogger(__name__)

_TURN_S = 1.0
_CREDENTIALS = struct.Struct("iII")
_CALL = b"\x01"
_MANY_CALLS = 4096


def _name(incarnation: Incarnation) -> str:
    return f"\0kvbaton.{incarnation}.calls"


def listen(incarnation: Incarnation, can_call: Callable[[bool], None], called: Callable[[], None]) -> CallListener | None:
    """A listener for the calls of this instance's engine; None where the system does not allow one, and steps stay short."""
    try:
        return CallListener(incarnation, can_call, called)
    except OSError as error:
        log.info("new requests end no wait of this worker, which cannot be called: %s", error)
        return None


class CallListener:
    """The end of the worker of rank 0. `can_call` is called with whether an engine is connected, `called` when it has called.

    Both are called from a thread of its own, between `start` and `close`. One engine is connected at a time: the last one.
    Raises OSError where the system does not allow to listen.
    """

    def __init__(self, incarnation: Incarnation, can_call: Callable[[bool], None], called: Callable[[], None]) -> None:
        self._can_call = can_call
        self._called = called
        self._engine: socket.socket | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvbaton-calls", daemon=True)
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(_name(incarnation))
            self._listener.listen(1)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)

    def start(self) -> None:
        """Listen from now on."""
        self._thread.start()

    def close(self) -> None:
        """Listen no more. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(2 * _TURN_S)
        self._lose_engine()
        self._listener.close()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._take_turn()
        finally:
            self._lose_engine()

    def _take_turn(self) -> None:
        # Not `select`, which takes no descriptor beyond 1023: a worker with GPUs and network devices has more.
        poller, engine = select.poll(), self._engine
        poller.register(self._listener, select.POLLIN)
        if engine is not None:
            poller.register(engine, select.POLLIN)
        ready = {number for number, _ in poller.poll(_TURN_S * 1000)}
        if engine is not None and engine.fileno() in ready:
            self._take_calls(engine)
        if self._listener.fileno() in ready:
            self._accept()

    def _accept(self) -> None:
        """Take an engine of this user in place of the one before; what comes of others changes nothing for that one."""
        try:
            connected, _ = self._listener.accept()
        except OSError as error:
            log.warning("an engine process cannot connect to this worker: %s", error)
            self._stopping.wait(_TURN_S)  # what cannot be accepted now would be tried again without a pause
            return
        try:
            credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            is_ours = _CREDENTIALS.unpack(credentials)[1] == os.getuid()
            connected.setblocking(False)
        except OSError:
            is_ours = False
        if not is_ours:
            connected.close()
            return
        self._lose_engine()
        self._engine = connected
        self._can_call(True)

    def _take_calls(self, engine: socket.socket) -> None:
        try:
            has_called = bool(engine.recv(_MANY_CALLS))
        except OSError:
            has_called = False
        if has_called:
            self._called()
        else:
            self._lose_engine()

    def _lose_engine(self) -> None:
        """No engine calls from now on."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
            self._can_call(False)


class EngineCaller:
    """The end of the engine process. What cannot be sent is dropped: the worker's steps end by themselves then."""

    def __init__(self) -> None:
        self._worker: socket.socket | None = None

    def connect(self, incarnation: Incarnation) -> bool:
        """Connect to the worker of this instance, if it is on this host; whether it is."""
        self.close()
        connected = socket.socket(socket.AF_UNIX)
        connected.setblocking(False)
        try:
            connected.connect(_name(incarnation))
        except OSError as error:
            log.info("new requests end no wait of a worker, which cannot be called from here: %s", error)
            connected.close()
            return False
        self._worker = connected
        return True

    def call(self) -> None:
        """A request has come in. Never waits; safe to call from any thread."""
        if (worker := self._worker) is not None:
            # A worker that has not read for so long that the socket is full will find what lies there.
            with contextlib.suppress(OSError):
                worker.send(_CALL)

    def close(self) -> None:
        """Call no more: the worker notices. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
