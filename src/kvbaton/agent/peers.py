"""The cards of peers, by the address they answer at and by incarnation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from kvbaton.core.addresses import ControlAddress
from kvbaton.core.bounded import BoundedMap
from kvbaton.core.card import Card
from kvbaton.core.handoff import Incarnation
from kvbaton.errors import TransportError

__all__ = ["Peers"]


class Peers:
    """Cards of at most `limit` peers that passed the compatibility check, and up to `limit` addresses they answered at."""

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        # Not a BoundedMap: the card of a peer with live hand-offs must not be evicted, see `make_room`.
        self._cards: OrderedDict[Incarnation, Card] = OrderedDict()
        self._at: BoundedMap[ControlAddress, Incarnation] = BoundedMap(limit)

    def __len__(self) -> int:
        return len(self._cards)

    def card(self, incarnation: Incarnation) -> Card | None:
        """The card of a peer, if it is known."""
        if incarnation in self._cards:
            self._cards.move_to_end(incarnation)
        return self._cards.get(incarnation)

    def at(self, address: ControlAddress) -> Card | None:
        """The card of the peer that last answered at `address`."""
        incarnation = self._at.get(address)
        return None if incarnation is None else self.card(incarnation)

    def learn(self, card: Card, address: ControlAddress | None) -> Incarnation | None:
        """Remember a card; returns the incarnation that it replaces at its address, forgotten now."""
        before = None
        if address is not None:
            before = self._at.get(address)
            self._at[address] = card.incarnation
        self._cards[card.incarnation] = card
        self._cards.move_to_end(card.incarnation)
        if before is None or before == card.incarnation:
            return None
        # Two processes cannot listen at one address: the one that answered there before is dead.
        self.forget(before)
        return before

    def make_room(self, busy: Collection[Incarnation]) -> Incarnation | None:
        """Without room for another peer, forget the longest unused one and return it; raises TransportError if all are busy."""
        if len(self._cards) < self._limit:
            return None
        idle = next((incarnation for incarnation in self._cards if incarnation not in busy), None)
        if idle is None:
            raise TransportError(f"{len(self._cards)} peers have hand-offs here, more are not taken; try again later")
        self.forget(idle)
        return idle

    def forget(self, incarnation: Incarnation) -> None:
        """Forget a peer and the address it answered at."""
        self._cards.pop(incarnation, None)
        for address in [address for address, known in self._at.items() if known == incarnation]:
            del self._at[address]
