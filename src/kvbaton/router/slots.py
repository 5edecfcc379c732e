"""Which slot of the board counts the load of which instance; all processes of a router agree on it."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvbaton.discovery.messages import Registration

__all__ = ["InstanceKey", "SlotBook", "instance_key"]

InstanceKey = tuple[str, str, str]

_FORGET_S = 60.0


def instance_key(registration: Registration) -> InstanceKey:
    """What an instance is counted under: its address, its type and its incarnation."""
    return registration.http_address, str(registration.type), registration.incarnation


class SlotBook:
    """Gives each instance a slot of its own, as long as there are any; those beyond share the last one.

    A slot is free again when its instance has been gone for a while and nothing of it is in flight.
    """

    def __init__(self, slots: int) -> None:
        self._last = slots - 1
        self._free = list(range(slots - 2, -1, -1))
        self._slots: dict[InstanceKey, int] = {}
        self._gone: dict[InstanceKey, float] = {}

    def slot_of(self, key: InstanceKey) -> int:
        """The instance's slot, given to it now if it has none."""
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = self._free.pop() if self._free else self._last
        return slot

    def assign(self, key: InstanceKey, slot: int) -> None:
        """Use the slot that another process has given to the instance."""
        self._slots[key] = slot

    def key_of(self, slot: int) -> InstanceKey | None:
        """The instance of a slot; None when it is free, or shared by several."""
        if slot == self._last:
            return None
        return next((key for key, taken in self._slots.items() if taken == slot), None)

    def keep(self, live: Collection[InstanceKey], now: float, load_of: Callable[[int], int]) -> None:
        """Keep the slots of `live`, and free those of instances that are gone for good."""
        for key in [key for key in self._slots if key not in live]:
            gone_since = self._gone.setdefault(key, now)
            if now - gone_since >= _FORGET_S and load_of(self._slots[key]) == 0:
                slot = self._slots.pop(key)
                del self._gone[key]
                if slot != self._last:
                    self._free.append(slot)
        for key in [key for key in self._gone if key in live]:
            del self._gone[key]
