"""What an exchange promises, and the values that cross its seam.

A `Transport` hands out one region for as long as it is open, and only reads. An *exchange* has any number of *memories*, which
are registered and withdrawn while it runs; its peers read them, write them, and may leave a notice. What every exchange keeps:

- **The owner of the target memory executes every copy.** A read is executed by the side that asks for it, into its own memory.
  A write is a request to the owner of the target, which fetches the bytes (`local`: out of the memory of the process that asks;
  `tcp`: off the connection; memory of a GPU: by a kernel that reads the initiator's) and stores them itself. No process ever
  holds a right to store into another one, so there is nothing to revoke.
- **Every run is checked against memories that are live now**: of the target by its owner, before each slice; of the source
  before the first byte and after the last one. A memory is named by a slot and a random stamp, so a slot that was given to
  another memory, or a process that took over a port, is never mistaken for the one that is meant.
- **`withdraw` returns when no copy touches the memory**: from then on not one byte of it changes, whatever arrives. A slice in
  progress is waited for, which takes milliseconds; nothing else is.
- **A notice is recorded at the target after the last byte**, never for a transfer that failed, in a table of bounded size.
- Everything is bounded: memories, peers, transfers in flight, what an unauthenticated connection may hold and for how long.
- Order inside a transfer is free. Runs of a transfer may overlap; which of two overlapping runs wins is undefined.

`post` never waits for more than `INLINE_S`: small transfers are moved before it returns, because their callers would otherwise
pay for two changes of threads. A transfer that makes no progress for `timeout_s` fails. One that failed may have stored some of
its bytes in a target that is still registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvbaton.core.card import Endpoint
from kvbaton.core.plan import Runs
from kvbaton.transport.base import Direction

__all__ = ["INLINE_BYTES", "INLINE_S", "ExchangeContract", "MemoryHandle", "PeerLink", "PendingTransfer", "TransferRequest"]

INLINE_BYTES = 256 << 10
"""Transfers of at most so many bytes are moved by the thread that posts them."""

INLINE_S = 0.2
"""How long `post` waits at most for the peer's answer to a small write."""


class MemoryHandle(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Names one registered memory of one exchange, for good: no later memory has the same stamp.

    gpu_parts: for memory of a GPU, how other processes of its host open it; empty for main memory
    gpu_owner: the process whose memory it is: host, pid and start time, with spaces between them
    """

    slot: int
    stamp: int
    memory_bytes: int
    gpu_owner: str = ""
    gpu_parts: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class TransferRequest:
    """Runs between one memory of this side and one of a peer.

    runs: source offset, target offset, bytes; in a READ the source is the peer's memory, in a WRITE this side's
    tag:  the number of the notice that the peer shall keep; None: no notice
    """

    direction: Direction
    own: MemoryHandle
    remote: MemoryHandle
    runs: Runs
    tag: int | None = None


class PendingTransfer(Protocol):
    """One posted transfer. Asking for its state makes progress; it may be dropped at any time."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that have arrived."""

    @property
    def error(self) -> str:
        """Why it failed; empty while it is in flight, and when every byte has arrived."""

    def is_finished(self) -> bool:
        """Whether it is over, after one look at what has arrived."""

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it is over, at most `timeout_s` (None: its own time limits apply); returns whether it is."""


class PeerLink(Protocol):
    """A peer that answered: transfers are posted to it."""

    def post(self, request: TransferRequest) -> PendingTransfer:
        """Start a transfer. Raises RangeError, QueueFull or TransportError, and then nothing was started; a peer that is lost
        is a transfer that fails.
        """


class ExchangeContract(Protocol):
    """Registers memories, serves peers, and reaches them; see the module's text for the promises."""

    def register(self, address: int, memory_bytes: int, device: int = 0) -> MemoryHandle:
        """Let peers reach this memory; the caller keeps it mapped until it is withdrawn. Raises ConfigError.

        Main memory is what the processor can read. Other memory is taken for that of the GPU with the number `device`.
        """

    def withdraw(self, handle: MemoryHandle) -> None:
        """End all use of a memory, and return when nothing touches it; unknown ones are ignored. Raises TransportError when a
        copy does not end in time: the memory must then not be reused.
        """

    def endpoint(self) -> Endpoint:
        """Describe this exchange for peers; a process that has it may connect."""

    def connect(self, endpoint: Endpoint) -> PeerLink:
        """The peer behind `endpoint`, connected to; waits at most for a handshake. Raises TransportError or PeerError."""

    def has_notice(self, initiator: str, tag: int) -> bool:
        """Whether the notice `tag` of the peer that calls itself `initiator` is here."""

    def stats(self) -> Mapping[str, int]:
        """What was refused, dropped and served, in numbers."""

    def close(self) -> None:
        """Withdraw every memory, fail what is in flight, give port and threads back. Idempotent."""
