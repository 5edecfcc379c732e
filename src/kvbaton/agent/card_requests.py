"""Asks for the cards of peers at addresses: one question per address at a time, each with a number.

The numbers order the incarnations at an address. Frames may arrive late, also those of a process that has died: its card may
come after that of its successor. No clock shows which of the two is the newer one, because hosts' clocks differ and can be set
back. But only a process that lives can answer a question that was sent just now, and two processes never listen at one address
at a time. So whichever answers a question that was sent after X was known to have lived there is X, or X's successor.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from kvbaton.agent.ports import Clock, Control
from kvbaton.config import Limits
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.bounded import BoundedMap
from kvbaton.core.card import Card
from kvbaton.core.handoff import Incarnation
from kvbaton.core.messages import Hello

__all__ = ["CardRequests", "is_answer_after"]

_MAX_DIALLED = 4096
_MAX_ASKED_BACK = 1024


def is_answer_after(asked: int, answers: int | None) -> bool:
    """Whether a card answers a question that was sent after question `asked`.

    A peer of a release that does not number its answers (None) is believed: it cannot show more.
    """
    return answers is None or answers > asked


class _Dial(NamedTuple):
    at: float
    question: int


class CardRequests:
    """The questions of one coordinator for cards, and the addresses that it dials with them."""

    def __init__(self, card: Card, limits: Limits, clock: Clock, control: Control) -> None:
        self._card = card
        self._limits = limits
        self._clock = clock
        self._control = control
        self._dialled: BoundedMap[ControlAddress, _Dial] = BoundedMap(_MAX_DIALLED)
        self._asked_back_at: BoundedMap[Incarnation, float] = BoundedMap(_MAX_ASKED_BACK)
        self._hang_up_at = clock()
        self.asked = 0
        """The number of the last question."""

    def ask(self) -> Hello:
        """The next question for a card."""
        self.asked += 1
        return Hello(self._card, wants_answer=True, question=self.asked, answers=0, takes_several=True)

    def dial(self, address: ControlAddress, after: int = 0) -> None:
        """Ask for the card of the peer at `address`. One question after `after` does for all that wait for the answer."""
        now, earlier = self._clock(), self._dialled.get(address)
        if earlier is not None and earlier.question > after and now - earlier.at < self._limits.retry / 2:
            return
        if not self._dialled:
            self._hang_up_at = now + self._limits.retry
        hello = self.ask()
        self._dialled[address] = _Dial(now, self.asked)
        self._control.dial(address, hello)

    def ask_back(self, peer: Incarnation) -> None:
        """Ask a peer that has sent something, and whose card is not known, for its card.

        Not for each of its frames: it answers every question with its card and with all that it waits for.
        """
        now, earlier = self._clock(), self._asked_back_at.get(peer)
        if earlier is None or now - earlier >= self._limits.retry / 2:
            self._asked_back_at[peer] = now
            self._control.send(peer, self.ask())

    def on_card_of(self, peer: Incarnation) -> None:
        """The card of a peer has come: if it is forgotten once more, it is asked for at once."""
        self._asked_back_at.pop(peer, None)

    def on_answer(self, address: ControlAddress) -> None:
        """A peer at `address` has answered, or there is none."""
        self._dialled.pop(address, None)

    def next_deadline(self) -> float | None:
        """When `hang_up` next has something to do."""
        return self._hang_up_at if self._dialled else None

    def hang_up(self, needed: AbstractSet[ControlAddress]) -> None:
        """Dial no address any longer that has not answered and is not `needed`: dials end with their requests."""
        self._hang_up_at = self._clock() + self._limits.retry
        for address in [address for address in self._dialled if address not in needed]:
            del self._dialled[address]
            self._control.hang_up(address)
