"""Which request bodies instances died of, so that one request does not end every instance in turn.

A call whose connection breaks without an answer may be the cause of that: the instance is then looked at, and if it is gone
the request is not tried on another one. The client may send it again, and the instance may have died of something else; but
a body that was in flight at two deaths is refused, until it is forgotten. A body that is answered is cleared. While no body
is suspected, nothing is computed per request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from kvbaton.core.bounded import BoundedMap

__all__ = ["MOST_DEATHS", "DeathBook"]

MOST_DEATHS = 2
"""A body that was in flight at so many deaths is refused."""

_MOST_BODIES = 1024
_FORGET_S = 600.0
_DIGEST_BYTES = 16


class DeathBook:
    """How many instances died while they served a body, by its digest. Belongs to the event loop's thread.

    `report` is called with the digest after each death that this process has seen.
    """

    def __init__(self, report: Callable[[bytes], None] | None = None) -> None:
        self.report = report
        self.has_any = False
        """Whether a death was ever counted: nearly all routers never do, and then no body needs a digest."""
        self.bodies: BoundedMap[bytes, tuple[int, float]] = BoundedMap(_MOST_BODIES)
        """How many deaths each digest was counted for, and when the last was; the oldest first."""

    def note(self, path: str, body: bytes, now: float) -> int:
        """An instance died while it served `body`; how many have."""
        digest = _digest(path, body)
        count = self.add(digest, now)
        if self.report is not None:
            self.report(digest)
        return count

    def add(self, digest: bytes, now: float) -> int:
        """Count one death for a digest, which another process may have computed; how many there are."""
        count = self._count(digest, now) + 1
        self.bodies[digest] = (count, now)
        self.has_any = True
        return count

    def count(self, path: str, body: bytes, now: float) -> int:
        """How many instances died while they served `body`."""
        return self._count(_digest(path, body), now)

    def clear(self, path: str, body: bytes) -> None:
        """The body was answered: it is not what instances die of."""
        self.bodies.pop(_digest(path, body), None)

    def _count(self, digest: bytes, now: float) -> int:
        count, last = self.bodies.get(digest, (0, now))
        if now - last < _FORGET_S:
            return count
        del self.bodies[digest]
        return 0


def _digest(path: str, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES, key=path.encode()[:64]).digest()
