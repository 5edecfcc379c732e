"""How a bare instance is made to stand still: messages that are swallowed, copies that do not complete."""

from __future__ import annotations

from dataclasses import replace

from kvbaton.agent.sockets import ControlSockets
from kvbaton.core.handoff import HandoffKey, Incarnation
from kvbaton.core.messages import Message
from kvbaton.transport.base import AfterEvent, Batch, Region, Ticket, Transport
from kvbaton.transport.faulty import Faults, FaultyTransport

__all__ = ["HoldingTransport", "MutedSockets", "task_of"]


def task_of(key: HandoffKey) -> str:
    """The task that a hand-off belongs to."""
    return key.transfer_id.rpartition("-")[0]


class MutedSockets(ControlSockets):
    """A control channel that swallows messages of chosen kinds about the hand-offs of chosen tasks.

    `swallowed` keeps, per task, the hand-offs that this happened to.
    """

    def __init__(self, me: Incarnation, host: str, port: int) -> None:
        super().__init__(me, host, port)
        self._muted: dict[str, tuple[str, ...]] = {}
        self.swallowed: dict[str, set[HandoffKey]] = {}

    def mute(self, task: str, kinds: tuple[str, ...]) -> None:
        """Swallow messages of these kinds from now on; none of them lifts it."""
        self._muted[task] = kinds
        self.swallowed[task] = set()

    def send(self, peer: Incarnation, message: Message) -> None:
        """Send, unless it is to be swallowed."""
        key = getattr(message, "key", None)
        if self._muted and key is not None:
            task = task_of(key)
            if message.__struct_config__.tag in self._muted.get(task, ()):
                self.swallowed[task].add(key)
                return
        super().send(peer, message)


class HoldingTransport(FaultyTransport):
    """A transport that fails on command, and counts the bytes that it holds up."""

    def __init__(self, inner: Transport, region: Region) -> None:
        super().__init__(inner, region, Faults())
        self._wrong = Faults()
        self.stalled_bytes = 0

    def go_wrong(self, faults: Faults) -> None:
        """What goes wrong from the next post on."""
        self._wrong = faults
        self.set_faults(faults)

    def stall(self, stalls: bool) -> None:
        """Hold up what is posted from now on, or stop doing so; what is held up stays so."""
        self.go_wrong(replace(self._wrong, stall=stalls))

    def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
        """Post, and count it when it will not complete."""
        ticket = super().post(batch, after)
        if self._wrong.stall:
            self.stalled_bytes += batch.wire_bytes
        return ticket
