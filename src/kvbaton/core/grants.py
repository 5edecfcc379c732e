"""Grants: numbers that are used once and cannot come back, and the reserve that keeps two full instances from deadlock.

A target counts its grants to each source (`sequence`), and the source uses each sequence number up. The control channel may
delay a grant, or deliver it twice: without the numbers a grant that arrives when its hand-off is over would start that hand-off
again, and the source would write into blocks that the target has long given to another request.

The numbers are dense for each pair, so a number far ahead of all others is no grant of that target, but a forged or corrupted
one. If it counted, it would make every later grant of the real target stale. So a source uses up no number that is more than
`REACH` ahead, and a refusal carries the highest number that was used: whichever of the two sides lost count, the target goes on
from there, upwards or downwards. To go down is safe: a target takes blocks back that a source may write to only when the number
of their grant is used up there, or the source is fenced.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbaton.core.bounded import BoundedMap
from kvbaton.core.handoff import Incarnation, Mode
from kvbaton.errors import Bug

__all__ = ["REACH", "GrantWindow", "GrantWindows", "Reserve", "may_start_prefill", "next_sequence"]

_WINDOW = 8192

REACH = 1 << 24
"""How far a grant may be ahead of all that were used: more grants than that are not lost in a row on the way to one source.

Much more than the window, because grants that a source never gets (it was cut off, or stood still) leave a gap. Much less than
the numbers there are (2^62): it takes 2^38 forged grants to leave the target no number to go on from.
"""


class GrantWindow:
    """Which sequence numbers of one peer were used: a high-water mark and one bit for each of the `size` numbers below it.

    A number counts once. Numbers may arrive out of order as long as they are among the last `size` below the mark. Older ones
    are refused although they may never have been used: the target then takes a new number (a stale grant), which costs one
    round trip, whereas to accept a used one would cost a foreign byte. So the memory is fixed and nothing finished comes back.
    Numbers more than `reach` above the mark are refused, too, and leave the mark where it is.
    """

    def __init__(self, size: int = _WINDOW, reach: int = REACH) -> None:
        if size < 1:
            raise Bug(f"a window of {size} grants")
        self._size = size
        self._reach = reach
        self._all = (1 << size) - 1
        self._high = 0
        self._used = 0

    @property
    def used_up_to(self) -> int:
        """The highest number that was used; 0 before any."""
        return self._high

    def use(self, number: int) -> bool:
        """Use `number` up; false when it was used before, is too old to know, or is too far ahead."""
        if number < 1 or not self._high - self._size < number <= self._high + self._reach:
            return False
        if number > self._high:
            step = min(number - self._high, self._size)
            self._used = ((self._used << step) | 1) & self._all
            self._high = number
            return True
        bit = 1 << (self._high - number)
        fresh = not self._used & bit
        self._used |= bit
        return fresh


class GrantWindows:
    """One window per peer incarnation; beyond `limit` peers the one that sent no grant for longest is forgotten."""

    def __init__(self, limit: int = 1024, reach: int = REACH, size: int = _WINDOW) -> None:
        self.reach = reach
        self._size = size
        self._windows: BoundedMap[Incarnation, GrantWindow] = BoundedMap(limit)

    def __len__(self) -> int:
        return len(self._windows)

    def use(self, peer: Incarnation, number: int) -> bool:
        """Use `number` of `peer` up; false when it was used before, is too old to know, or is too far ahead."""
        window = self._windows.get(peer)
        if window is None:
            window = self._windows[peer] = GrantWindow(self._size, self.reach)
        self._windows.touch(peer)
        return window.use(number)

    def used_up_to(self, peer: Incarnation) -> int:
        """The highest number of `peer` that was used; 0 before any."""
        window = self._windows.get(peer)
        return 0 if window is None else window.used_up_to


def next_sequence(last: int, used_up_to: int) -> int:
    """The number that a target takes after a refusal: the next of its own, if the source can accept it, else the source's next.

    Several grants may be refused at once, all with the same `used_up_to`: the first goes there, the others follow it.
    """
    return last + 1 if used_up_to <= last < used_up_to + REACH else used_up_to + 1


def may_start_prefill(*, free_blocks: int, needed_blocks: int, reserved_blocks: int, has_grant: bool) -> bool:
    """Whether a source may start a prefill now.

    A prefill without a grant waits for a target, and that target may wait for another prefill of this source: if prefills
    without a grant could hold the last blocks, two full pools would wait for each other for ever. So they leave
    `reserved_blocks`, enough for the largest request there can be, to prefills that have a grant. Those may take every block:
    their target has blocks for them, so they end.
    """
    left = free_blocks - needed_blocks
    return left >= 0 if has_grant else left >= reserved_blocks


@dataclass(frozen=True, slots=True)
class Reserve:
    """How many blocks an instance leaves free when it starts work that waits for another instance.

    Work that holds blocks while it waits must wait only for work that starts whatever is held, or two full instances wait for
    each other for ever. So each kind leaves room for the largest request of the kind that it waits for:

    - what waits for nothing leaves nothing: decodes, sources with a grant, and in pull targets, whose source is complete;
    - in push a target waits for a source with a grant, elsewhere. It leaves room for one here (`target`), because elsewhere a
      target may wait for that;
    - a source without a grant waits for a target, elsewhere: it leaves room for one here, and for what that leaves (`source`).

    Only an instance with both roles can be waited for in both ways; another leaves what its one role needs.
    """

    source: int = 0
    target: int = 0
    is_shared: bool = False
    """Whether sources and targets share the blocks: the instance has both roles."""
    has_grants: bool = False
    """Whether a source may wait for a grant before it takes blocks (push)."""

    @classmethod
    def of(cls, mode: Mode, *, largest: int, total: int, both_roles: bool) -> Reserve:
        """The reserve of an instance with `total` blocks, whose largest request needs `largest` of them.

        Where both roles share too few blocks for two of those, half of them are reserved: the rule then holds for requests
        that fit into half, and a larger one starts when no other hand-off has blocks.
        """
        is_push = mode is Mode.PUSH
        if not both_roles:
            return cls(source=largest if is_push else 0, has_grants=is_push)
        one = min(largest, total // 2)
        return cls(2 * one if is_push else one, one if is_push else 0, is_shared=True, has_grants=is_push)
