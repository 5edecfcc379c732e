"""Batches that a transport's full queue has not taken yet: kept per peer, in order, and offered again a little later.

The first refusal of a peer's batch makes the next ones to it wait behind it, so that no copy starves behind later ones; other
peers go on. Each refusal doubles the wait, from 1 to 50 ms; each acceptance ends it. The copies of a peer of which nothing is
taken for `transfer_timeout` fail.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvbaton.agent.rank_orders import CopyId
from kvbaton.core.plan import Runs
from kvbaton.errors import QueueFull
from kvbaton.transport.base import PeerRank

__all__ = ["Backlog", "Part"]

_FIRST_WAIT_S = 0.001
_LONGEST_WAIT_S = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One batch of one span of a copy."""

    copy: CopyId
    span: int
    runs: Runs


@dataclass(slots=True)
class _PeerBacklog:
    full_since: float
    retry_at: float
    wait_s: float = 0.0
    parts: deque[Part] = field(default_factory=deque)


class Backlog:
    """What waits for room, by peer.

    `offer(peer, part)` hands one part to the transport and raises QueueFull when it must wait; a part of a copy that
    has ended in the meantime it takes without doing anything.
    """

    def __init__(self, transfer_timeout: float, offer: Callable[[PeerRank, Part], None]) -> None:
        self._transfer_timeout = transfer_timeout
        self._offer = offer
        self._peers: OrderedDict[PeerRank, _PeerBacklog] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(peer.parts) for peer in self._peers.values())

    def add(self, peer: PeerRank, part: Part, now: float) -> None:
        """Offer a part at once, unless others of that peer wait already; what is refused waits."""
        waiting = self._peers.get(peer)
        if waiting is None:
            try:
                self._offer(peer, part)
            except QueueFull:
                self._peers[peer] = _PeerBacklog(now, now + _FIRST_WAIT_S, _FIRST_WAIT_S, deque([part]))
        else:
            waiting.parts.append(part)

    def offer_again(self, now: float, *, at_once: bool) -> list[tuple[CopyId, str]]:
        """Offer what is due, or everything `at_once`; returns the copies of peers of which nothing was taken for too long."""
        given_up: list[tuple[CopyId, str]] = []
        for peer, waiting in list(self._peers.items()):
            if at_once or waiting.retry_at <= now:
                given_up += self._offer_of(peer, waiting, now)
        return given_up

    def next_deadline(self) -> float | None:
        """When `offer_again` next has something to do."""
        return min((waiting.retry_at for waiting in self._peers.values()), default=None)

    def _offer_of(self, peer: PeerRank, waiting: _PeerBacklog, now: float) -> list[tuple[CopyId, str]]:
        try:
            while waiting.parts:
                self._offer(peer, waiting.parts[0])
                waiting.parts.popleft()
                waiting.full_since, waiting.wait_s = now, 0.0
                # The queue may be shared by all peers: one that has just had its turn is offered last the next time.
                self._peers.move_to_end(peer)
        except QueueFull as error:
            waiting.wait_s = min(max(2 * waiting.wait_s, _FIRST_WAIT_S), _LONGEST_WAIT_S)
            waiting.retry_at = now + waiting.wait_s
            if now - waiting.full_since < self._transfer_timeout:
                return []
            reason = f"{error}; nothing was taken for {self._transfer_timeout:g} s"
            del self._peers[peer]
            return [(copy, reason) for copy in dict.fromkeys(part.copy for part in waiting.parts)]
        del self._peers[peer]
        return []
