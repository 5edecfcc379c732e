"""The one bounded map of the package: what is remembered about peers and finished work must not grow with their number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from kvbaton.errors import Bug

__all__ = ["BoundedMap"]

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class BoundedMap(OrderedDict[KeyT, ValueT]):
    """A dict of at most `limit` entries, oldest first: setting a key makes it the newest, a new key evicts the oldest.

    Reading does not change the order; `touch` does, for maps that keep what was used last. `on_evict` is called with each
    entry that had to make room, after it has left the map; deleting an entry does not call it.
    """

    def __init__(self, limit: int, on_evict: Callable[[KeyT, ValueT], None] | None = None) -> None:
        if limit < 1:
            raise Bug(f"a bounded map of {limit} entries")
        super().__init__()
        self._limit = limit
        self._on_evict = on_evict

    def __setitem__(self, key: KeyT, value: ValueT) -> None:
        before = len(self)
        OrderedDict.__setitem__(self, key, value)
        if len(self) == before:
            self.move_to_end(key)  # a new one is there already
        elif before >= self._limit:
            oldest = self.popitem(last=False)
            if self._on_evict is not None:
                self._on_evict(*oldest)

    def touch(self, key: KeyT) -> None:
        """Make `key` the newest, if it is there."""
        if key in self:
            self.move_to_end(key)
