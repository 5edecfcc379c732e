"""What a source makes of the numbers of grants, beside the set of all that were used, which production does not keep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from kvbaton.core.grants import GrantWindow, GrantWindows
from kvbaton.core.handoff import Incarnation

__all__ = ["watch_windows"]


def watch_windows(windows: GrantWindows, find: Callable[[str, str], None]) -> None:
    """From now on report each number that counts twice or although it is too old, and each that should count and does not."""
    use, own = windows.use, vars(windows)
    used: defaultdict[GrantWindow, set[int]] = defaultdict(set)

    def watched(peer: Incarnation, number: int) -> bool:
        is_fresh = use(peer, number)
        before = used[own["_windows"].get(peer)]
        if next(reversed(own["_windows"]), None) != peer:
            find("nothing kept", f"{peer} has just granted, and another one would be forgotten later")
        high = max(before, default=0)
        is_near = number >= 1 and high - own["_size"] < number <= high + windows.reach
        if is_fresh and (number in before or not is_near):
            find("nothing twice", f"number {number} of {peer} counts, after {sorted(before)[-own['_size'] :]}")
        elif not is_fresh and is_near and number not in before:
            find("taken", f"number {number} of {peer} does not count, after {sorted(before)[-own['_size'] :]}")
        before.update({number} if is_fresh else ())
        return is_fresh

    own["use"] = watched
