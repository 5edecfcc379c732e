"""The control sockets of production in a run: what they send and receive is looked at, what they wait for is virtual."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from kvbaton.agent.sockets import ControlSockets, control_limits
from kvbaton.config import Trust
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import ProcessId
from kvbaton.core.handoff import Incarnation
from kvbaton.core.messages import Envelope, Message
from kvbaton.sim.virtual_sockets import VirtualMachine

__all__ = ["SocketsWatch", "WatchedSockets"]

_TRUST = Trust(key=b"the cluster key of every run")
_CONNECTIONS = 64
_SMALL_S = 1e-6


class SocketsWatch(Protocol):
    """What looks at the control sockets of an instance."""

    def on_dial(self, address: ControlAddress) -> None:
        """An address is dialled."""

    def on_send(self, address: str, recipient: str, message: Message) -> None:
        """A message leaves."""

    def on_receive(self, envelope: Envelope, sender_address: str) -> None:
        """A message was read."""

    def on_refusal(self, address: ControlAddress) -> None:
        """What answers at an address turned out to be no peer."""

    def on_late_dial(self, address: ControlAddress, wait_s: float) -> None:
        """Messages wait for an address to be dialled again, and the thread would wait for longer."""

    def check_hang_up(self, address: ControlAddress) -> None:
        """An address is dialled no longer."""

    def is_gone(self, process: ProcessId) -> bool:
        """Whether a process of this host is known to be dead."""


class WatchedSockets(ControlSockets):
    """`rest` is called after each turn of the driver, as the wait that follows it in production."""

    frames_per_turn = 2

    def __init__(
        self,
        me: Incarnation,
        machine: VirtualMachine,
        watch: SocketsWatch,
        beat_s: float,
    ) -> None:
        self._watch = watch
        self._virtual = machine
        # Unknown peers have all of the thread: how much they use of it is no virtual time.
        limits = replace(
            control_limits(beat_s), connections=_CONNECTIONS, messages_per_turn=self.frames_per_turn, unknown_share=1.0
        )
        super().__init__(me, machine.address, 1, _TRUST, limits, beat_s=beat_s, machine=machine)

    def is_gone(self, process: ProcessId) -> bool:
        return self._watch.is_gone(process)

    def dial(self, address: ControlAddress, message: Message) -> None:
        self._watch.on_dial(address)
        self._watch.on_send(address.host, "", message)
        super().dial(address, message)

    def hang_up(self, address: ControlAddress) -> None:
        self._watch.check_hang_up(address)
        super().hang_up(address)

    def send(self, peer: Incarnation, message: Message) -> None:
        self._watch.on_send(peer.partition("#")[0], peer, message)
        super().send(peer, message)

    def receive(self) -> Iterator[tuple[Envelope, ControlAddress | None]]:
        # What has become ready since the last turn; production returns from its wait with that.
        super().wait(0.0, [])
        for envelope, via in super().receive():
            self._watch.on_receive(envelope, envelope.sender.partition("#")[0])
            yield envelope, via

    def refusals(self) -> list[tuple[ControlAddress, str]]:
        refusals = super().refusals()
        for address, _ in refusals:
            self._watch.on_refusal(address)
        return refusals

    def rest(self, timeout_s: float) -> float:
        """What was sent leaves; for how long the thread may wait then, if nothing wakes it."""
        if super().wait(timeout_s, []):
            return 0.0
        wait_s = self._virtual.wait_s
        for address, dialled in self._dialled.items():
            if dialled.frames and dialled.connection is None and self._clock() + wait_s > dialled.retry_at + _SMALL_S:
                self._watch.on_late_dial(address, wait_s)
        return wait_s
