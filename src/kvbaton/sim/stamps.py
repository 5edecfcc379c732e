"""Stamps between simulated processes of one host: what each shows, and what is looked at.

Looking at one takes no time, as in production. What a dead process has shown stays, and counts no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvbaton.agent.source import SourceSide
from kvbaton.core.card import Card
from kvbaton.core.handoff import Incarnation, Integrity
from kvbaton.core.lifecycle import SourceState
from kvbaton.core.stamps import StampArea
from kvbaton.sim.world import SimProcess

__all__ = ["Boards", "SimStamps", "stamp_problems"]

_FD = 3
_PLENTY = 64
"""More slots than any source has hand-offs: with so many, none is without a stamp."""


@dataclass(slots=True)
class Boards:
    """What every process shows, by slot. `slots` is how many stamps each can show; 0: none shows any."""

    slots: int = 0
    shown: dict[Incarnation, dict[int, int]] = field(default_factory=dict)
    processes: dict[Incarnation, SimProcess] = field(default_factory=dict)

    def shows(self, peer: Incarnation, value: int) -> bool:
        """Whether a process lives and shows a stamp at this moment."""
        return self.processes[peer].is_alive and value in self.shown[peer].values()


class SimStamps:
    """The stamps of one process, and those of its peers, as its coordinator sees them."""

    def __init__(self, boards: Boards, own: Incarnation, process: SimProcess) -> None:
        self._boards = boards
        self._own = boards.shown[own] = {}
        boards.processes[own] = process
        self._followed: set[Incarnation] = set()
        self.area = StampArea(_FD, 1, boards.slots) if boards.slots else None

    def vouch(self) -> None:
        """What is shown counts as long as the process lives, whether a driver calls this or not."""

    def withdraw(self) -> None:
        """As for `vouch`."""

    def write(self, slot: int, value: int) -> None:
        if value:
            self._own[slot] = value
        else:
            self._own.pop(slot, None)

    def follow(self, card: Card) -> bool:
        if card.stamps is not None and self._boards.slots:
            self._followed.add(card.incarnation)
        return card.incarnation in self._followed

    def read(self, peer: Incarnation, slot: int) -> int:
        return self._boards.shown[peer].get(slot, 0) if peer in self._followed and self.counts(peer) else 0

    def counts(self, peer: Incarnation) -> bool:
        """Whether what a process shows is looked at."""
        return self._boards.processes[peer].is_alive

    def forget(self, peer: Incarnation) -> None:
        self._followed.discard(peer)

    def close(self) -> None:
        """Nothing to give back."""


def stamp_problems(boards: Boards, own: Incarnation, source: SourceSide, ranks: int) -> Iterator[str]:
    """A stamp that is shown is that of a complete cache which its target reads, and of which all is summed that has to be."""
    shown = boards.shown[own]
    named = {}
    for record in source.live.values():
        stamp, grant = record.stamp, record.grant
        is_read = grant is not None and grant.reads_stamps and not record.writes
        is_summed = record.integrity is Integrity.OFF or len(record.sums) == ranks * len(record.spans)
        is_due = is_read and is_summed and record.state is SourceState.SERVING
        if stamp is not None:
            named[stamp.slot] = stamp.value
        if stamp is not None and not is_due:
            yield f"{record.key} is {record.state}, and has {stamp} under {grant}"
        elif stamp is None and is_due and boards.slots >= _PLENTY:
            yield f"{record.key} is {record.state}, and has no stamp under {grant}"
    if shown != named:
        yield f"{shown} is shown, and {named} are the stamps of what is live"
    if len(shown) + len(source.stamp_slots) != boards.slots:
        yield f"{len(shown)} stamps are shown, {len(source.stamp_slots)} slots are free, of {boards.slots}"
