"""The one bounded map of the package: what is remembered about peers and finished work must not grow with their number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import TypeVar

from kvbaton.errors import Bug

__all__ = ["BoundedMap"]

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class BoundedMap(MutableMapping[KeyT, ValueT]):
    """A dict of at most `limit` entries, oldest first: setting a key makes it the newest, a new key evicts the oldest.

    Reading does not change the order; `touch` does, for maps that keep what was used last. `on_evict` is called with each
    entry that had to make room, after it has left the map; deleting an entry does not call it.
    """

    def __init__(self, limit: int, on_evict: Callable[[KeyT, ValueT], None] | None = None) -> None:
        if limit < 1:
            raise Bug(f"a bounded map of {limit} entries")
        self._limit = limit
        self._on_evict = on_evict
        self._entries: OrderedDict[KeyT, ValueT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[KeyT]:
        return iter(self._entries)

    def __getitem__(self, key: KeyT) -> ValueT:
        return self._entries[key]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __setitem__(self, key: KeyT, value: ValueT) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._limit:
            oldest = self._entries.popitem(last=False)
            if self._on_evict is not None:
                self._on_evict(*oldest)

    def __delitem__(self, key: KeyT) -> None:
        del self._entries[key]

    def touch(self, key: KeyT) -> None:
        """Make `key` the newest, if it is there."""
        if key in self._entries:
            self._entries.move_to_end(key)
