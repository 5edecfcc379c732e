"""Which pair of instances a transfer was routed to; the newest transfers only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from kvbaton.router.policy import Pair

__all__ = ["Routed", "RoutedTransfers"]


class Routed(msgspec.Struct, frozen=True):
    """One transfer: who serves it, and when it came, on the router's clock."""

    transfer_id: str
    pair: Pair
    arrived: float


class RoutedTransfers:
    """The newest `limit` transfers that this router has made. Belongs to the event loop's thread."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._by_id: OrderedDict[str, Routed] = OrderedDict()

    def add(self, transfer_id: str, pair: Pair, arrived: float) -> None:
        """Remember a transfer, and forget the oldest one when there are too many."""
        self._by_id[transfer_id] = Routed(transfer_id, pair, arrived)
        if len(self._by_id) > self._limit:
            self._by_id.popitem(last=False)

    def get(self, transfer_id: str) -> Routed | None:
        """The transfer of that id; None when it is not known, or not any more."""
        return self._by_id.get(transfer_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def __reversed__(self) -> Iterator[Routed]:
        return reversed(self._by_id.values())
