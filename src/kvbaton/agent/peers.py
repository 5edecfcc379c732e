"""Who is who: the cards of peers, by the address they answer at and by incarnation."""

from __future__ import annotations

from collections import OrderedDict

from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import Card
from kvbaton.core.handoff import Incarnation

__all__ = ["Peers"]


class Peers:
    """Cards of peers that passed the compatibility check; the longest unused ones are forgotten beyond `limit`."""

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._cards: OrderedDict[Incarnation, Card] = OrderedDict()
        self._at: dict[ControlAddress, Incarnation] = {}

    def card(self, incarnation: Incarnation) -> Card | None:
        """The card of a peer, if it is known."""
        if incarnation in self._cards:
            self._cards.move_to_end(incarnation)
        return self._cards.get(incarnation)

    def at(self, address: ControlAddress) -> Card | None:
        """The card of the peer that last answered at `address`."""
        incarnation = self._at.get(address)
        return None if incarnation is None else self.card(incarnation)

    def learn(self, card: Card, address: ControlAddress | None) -> list[Incarnation]:
        """Remember a card; returns the incarnations forgotten for it: the one it replaces at its address, or the oldest."""
        dropped: list[Incarnation] = []
        if address is not None:
            before = self._at.get(address)
            if before is not None and before != card.incarnation:
                dropped.append(before)
            self._at[address] = card.incarnation
        self._cards[card.incarnation] = card
        self._cards.move_to_end(card.incarnation)
        if len(self._cards) > self._limit:
            dropped.append(next(iter(self._cards)))
        for incarnation in dropped:
            self.forget(incarnation)
        return dropped

    def forget(self, incarnation: Incarnation) -> None:
        """Forget a peer and the address it answered at."""
        self._cards.pop(incarnation, None)
        for address in [address for address, known in self._at.items() if known == incarnation]:
            del self._at[address]
