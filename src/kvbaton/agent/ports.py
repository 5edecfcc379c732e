"""The ports behind which the agents' logic lives: a clock, a channel to peers, the ranks, and the engine's event queue.

The driver gives real ones, the simulator gives simulated ones, tests give scripted ones. The logic on this side of the ports
does no I/O and starts no thread: that is why the simulator can run the very code that production runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvbaton.agent.engine_port import EngineEvent
from kvbaton.agent.rank_orders import RankOrder
from kvbaton.config import Trust
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import Card, ProcessId
from kvbaton.core.checks import BlockSums, Pieces
from kvbaton.core.handoff import Executor, Incarnation
from kvbaton.core.messages import Envelope, Message
from kvbaton.core.stamps import StampArea

__all__ = ["NO_STAMPS", "Bell", "Clock", "Control", "ControlSocketsPort", "EnginePort", "Memory", "NoStamps", "Ranks", "Stamps"]

Clock = Callable[[], float]
"""Monotonic seconds; only differences mean anything."""

EnginePort = Callable[[EngineEvent], None]
"""Where decided facts go."""


class Control(Protocol):
    """Sends to other coordinators. No method waits, and a message may be lost."""

    def dial(self, address: ControlAddress, message: Message) -> None:
        """Send `message` to whichever incarnation answers at `address`."""

    def hang_up(self, address: ControlAddress) -> None:
        """No hand-off needs a peer at `address` any more: dial it no longer. Where one has answered, nothing changes."""

    def send(self, peer: Incarnation, message: Message) -> None:
        """Send `message` to a peer that has sent something before; dropped and counted when there is no route to it."""

    def is_gone(self, process: ProcessId) -> bool:
        """Whether a process of this host is provably dead; false whenever that cannot be known."""


class ControlSocketsPort(Control, Protocol):
    """The control channel as the driver's thread sees it: what the logic sends with, and where frames arrive."""

    address: ControlAddress
    """Where peers reach this instance."""

    trust: Trust
    """Which peers are trusted."""

    dropped_total: Counter[str]
    """How much was not sent or not taken, by cause."""

    frames_per_turn: int
    """How many frames one turn reads at least, if so many have arrived: a turn with fewer has read all of them."""

    def wait(self, timeout_s: float, wakeups: list[int]) -> bool:
        """Wait until a frame or one of the file descriptors `wakeups` is ready, at most `timeout_s`; whether anything is."""

    def receive(self) -> Iterator[tuple[Envelope, ControlAddress | None]]:
        """Read what has arrived; with each message the address at which its sender was dialled, if it was."""

    def refusals(self) -> list[tuple[ControlAddress, str]]:
        """Take the addresses that turned out to be no peers of ours since the last call, each with the reason."""

    def certificate_loads_total(self) -> int:
        """Changes of the certificate files that were taken; safe to call from any thread."""

    def failed_certificate_loads_total(self) -> int:
        """Changes of the certificate files that were not taken; safe to call from any thread."""

    def close(self) -> None:
        """Close every socket. Idempotent."""


class Bell(Protocol):
    """Wakes the driver's thread; rung from any thread."""

    @property
    def fds(self) -> Sequence[int]:
        """The descriptors to wait on."""

    def set(self) -> None:
        """Ring it."""

    def set_soon(self) -> None:
        """Ring it a little later: something waits that more is expected to join."""

    def clear(self) -> None:
        """What it was rung for is looked at from here on."""

    def close(self) -> None:
        """Give back what it holds. Idempotent."""


class Memory(Protocol):
    """A rank's own memory, as its agent sees it."""

    def sums(self, pieces: Pieces, ends: Sequence[int], value: int) -> list[int]:
        """The checksums of consecutive parts of these pieces, each up to the number in `ends`; the first continues `value`."""

    def sum_blocks(self, blocks: BlockSums, most_bytes: int) -> tuple[list[int], int] | None:
        """The checksums of spans, and how many bytes that were; None, and nothing was summed, where `sums` has to do it."""

    def read(self, offset: int, size_bytes: int) -> bytes:
        """A copy of these bytes."""

    def write(self, offset: int, data: bytes) -> None:
        """Overwrite the bytes from `offset` on with `data`."""


class Ranks(Protocol):
    """The rank agents of this instance, as the coordinator sees them. Answers come back as `RankReport`s."""

    @property
    def counts_arrivals(self) -> bool:
        """Whether the ranks report what peers have written into their memory, so that no message of the source is needed."""

    @property
    def fences_writers(self) -> bool:
        """Whether the ranks can end the right of a peer to write into their memory, and report that (`RevokePeer`)."""

    @property
    def executor(self) -> Executor:
        """Which side executes the copies into this instance's memory, by the promise of its transport."""

    def send(self, rank: int, order: RankOrder) -> None:
        """Have one rank carry out an order."""

    def send_all(self, order: RankOrder) -> None:
        """Have every rank carry out an order.

        `Connect` raises TransportError or Incompatible where the ranks live in this process; ranks in other processes
        report the same failure when they are to move something.
        """


class Stamps(Protocol):
    """The stamps of this process, and those of peers on this host (core/stamps.py)."""

    @property
    def area(self) -> StampArea | None:
        """Where peers find those of this process; None where there are none."""

    def vouch(self) -> None:
        """What is shown counts from now on, as long as the calling thread lives."""

    def withdraw(self) -> None:
        """The same thread ends: what is shown counts no more."""

    def write(self, slot: int, value: int) -> None:
        """Show `value` in a slot, 0 for nothing. Whatever this process does next, peers see afterwards."""

    def follow(self, card: Card) -> bool:
        """Whether the stamps of a peer can be read here; finds it out the first time."""

    def read(self, peer: Incarnation, slot: int) -> int:
        """What stands in a slot of a peer that is followed and lives, after all that was read before; 0 where nothing is."""

    def forget(self, peer: Incarnation) -> None:
        """Follow a peer no longer."""

    def close(self) -> None:
        """Give back what this holds. Idempotent."""


class NoStamps:
    """No stamps, of no process: every confirmation is a message."""

    area = None

    def vouch(self) -> None:
        """Nothing is shown."""

    def withdraw(self) -> None:
        """Nothing was shown."""

    def write(self, slot: int, value: int) -> None:
        """Nothing is shown."""

    def follow(self, card: Card) -> bool:
        """No peer is followed."""
        del card
        return False

    def read(self, peer: Incarnation, slot: int) -> int:
        """Nothing stands there."""
        del peer, slot
        return 0

    def forget(self, peer: Incarnation) -> None:
        """No peer was followed."""

    def close(self) -> None:
        """Nothing is held."""


NO_STAMPS: Stamps = NoStamps()
"""Where there is no shared memory, no compiled loop, or no peer on this host."""
