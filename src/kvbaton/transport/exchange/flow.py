"""One direction of a connection as a generator: it yields what it needs next, and is resumed when that is there.

A step is: a number (receive so many bytes), bytes (send them), `MemoryFill` and `MemorySend` (between the socket and registered
memory, which is looked up before every system call), `Skip` (receive and forget), or `TURN` (let other connections have their
turn). A memory that is withdrawn in the middle raises RangeError inside the generator.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvbaton.core.plan import Runs
from kvbaton.errors import PeerLost, RangeError
from kvbaton.transport.exchange.memories import MemoryTable
from kvbaton.transport.tcp.sockets import VectorCalls
from kvbaton.transport.tcp.vectors import Vectors

__all__ = ["TURN", "Flow", "MemoryFill", "MemorySend", "Skip", "Step"]

_MAX_STEPS = 64
_SCRATCH_BYTES = 1 << 18


class _PinnedPieces:
    """Pieces of one registered memory."""

    def __init__(self, table: MemoryTable, slot: int, stamp: int, offsets: Runs, lengths: Runs) -> None:
        """Raises RangeError when the memory is not live. The ranges have been checked."""
        self._table, self._slot, self._stamp = table, slot, stamp
        address, _ = table.find(slot, stamp)
        self.vectors = Vectors(np.stack([offsets + np.uint64(address), lengths], axis=1))

    def move(self, calls: VectorCalls, sock: socket.socket, *, is_send: bool) -> int:
        """Send or fill what is possible now. Raises RangeError when the memory is gone, OSError."""
        # The pin, not the address, is what makes a late store impossible: `withdraw` waits for it, and afterwards refuses it.
        self._table.pin(self._slot, self._stamp)
        try:
            return calls.send(sock, self.vectors) if is_send else calls.receive(sock, self.vectors)
        finally:
            self._table.unpin(self._slot)


class MemoryFill(_PinnedPieces):
    """Receive into these pieces."""


class MemorySend(_PinnedPieces):
    """Send these pieces."""


@dataclass(slots=True)
class Skip:
    """Receive so many bytes and forget them."""

    left_bytes: int


class _Turn:
    """Let others have their turn."""


TURN: Final = _Turn()

Step = int | bytes | MemoryFill | MemorySend | Skip | _Turn


class Flow:
    """Runs a generator of steps over a non-blocking socket. For one thread at a time."""

    def __init__(self, sock: socket.socket, steps: Generator[Step, bytes, None]) -> None:
        self.sock = sock
        self.moved_bytes = 0
        self._calls = VectorCalls()
        self._steps = steps
        self._inbox = bytearray()
        self._step: Step = next(steps)

    @property
    def wants_to_send(self) -> bool:
        """Whether it waits for room in the socket; otherwise it waits for bytes, or for its turn."""
        return isinstance(self._step, bytes | MemorySend)

    @property
    def wants_turn(self) -> bool:
        """Whether it can go on at once."""
        return self._step is TURN

    @property
    def is_between_messages(self) -> bool:
        """Whether it waits for a message of which nothing has come."""
        return isinstance(self._step, int) and not self._inbox

    def advance(self, is_enough: Callable[[], bool] | None = None) -> None:
        """Go on until the socket has no more, a turn is over, an answer is sent, or `is_enough`.

        The last two spare a call that would find nothing: peers mostly wait for an answer before they send more.

        Raises PeerLost when the other end has closed, StopIteration when the generator ends, OSError, and what the generator
        raises.
        """
        for _ in range(_MAX_STEPS):
            step = self._step
            try:
                if not self._try(step):
                    return
            except BlockingIOError:
                return
            except RangeError as error:
                self._step = self._steps.throw(error)
            if self._step is TURN or (type(step) is bytes and type(self._step) is int):
                return
            if is_enough is not None and is_enough():
                return

    def put_back(self, data: bytes) -> None:
        """Count bytes that the caller has received, between two messages, as the begin of the next one.

        At most one message; the next `advance` goes on behind them. A close of the other end is nothing, and met again.
        """
        self._inbox += data

    def close(self) -> None:
        """End the generator and the socket."""
        self._steps.close()
        self.sock.close()

    def _try(self, step: Step) -> bool:
        """One system call for a step, and the next step if that was the last; False when it did not get on."""
        if isinstance(step, int):
            data = self._received(step - len(self._inbox)) if len(self._inbox) < step else b""
            if len(data) == step:
                self._step = self._steps.send(data)
                return True
            self._inbox += data
            if len(self._inbox) == step:
                message, self._inbox = bytes(self._inbox), bytearray()
                self._step = self._steps.send(message)
        elif isinstance(step, bytes):
            sent = self.sock.send(step)
            self.moved_bytes += sent
            self._step = step[sent:] if sent < len(step) else self._steps.send(b"")
        elif isinstance(step, Skip):
            step.left_bytes -= len(self._received(min(step.left_bytes, _SCRATCH_BYTES))) if step.left_bytes else 0
            if not step.left_bytes:
                self._step = self._steps.send(b"")
        elif isinstance(step, _Turn):
            self._step = self._steps.send(b"")
        else:
            return self._move(step)
        return True

    def _move(self, step: MemoryFill | MemorySend) -> bool:
        if step.vectors.remaining_bytes:
            moved = step.move(self._calls, self.sock, is_send=isinstance(step, MemorySend))
            if not moved:
                raise PeerLost("the other end closed the connection")
            self.moved_bytes += moved
        if not step.vectors.remaining_bytes:
            self._step = self._steps.send(b"")
        return True

    def _received(self, most: int) -> bytes:
        data = self.sock.recv(most)
        if not data:
            raise PeerLost("the other end closed the connection")
        self.moved_bytes += len(data)
        return data
