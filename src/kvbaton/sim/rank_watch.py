"""What one rank is held to by itself: what it was ordered to drop it does not report, spans for a peer that counts them are
reported as on their way once and before they are moved, what a full queue has refused it offers again as soon as something has
completed, and no turn of it is longer than it may be.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping

from kvbaton.agent.rank import Routes
from kvbaton.agent.rank_orders import (
    Connect,
    CopyId,
    Disconnect,
    DropSums,
    OpenCopy,
    RankOrder,
    RankReport,
    RevokePeer,
    SpansMoved,
    SpansPlanned,
    SpansSummed,
    SumSpans,
)
from kvbaton.core.handoff import HandoffKey, Incarnation
from kvbaton.core.timeline import Side
from kvbaton.transport.base import PeerRank

__all__ = ["RankWatch"]


class RankWatch:
    """Sees the orders of one rank as it takes them, its reports as it makes them, and what it does in a turn."""

    def __init__(self) -> None:
        self._to_sum: dict[tuple[Side, HandoffKey], set[CopyId]] = defaultdict(set)
        """Of which copies each side of a hand-off is summed."""
        self._counting: set[CopyId] = set()
        """Copies to peers that count what is written to them."""
        self._planned: dict[CopyId, set[int]] = defaultdict(set)
        """Spans of them that were reported as on their way."""
        self._last_planned: SpansPlanned | None = None
        self._summed: set[tuple[CopyId, Side, int]] = set()
        """Spans of which sums were reported."""
        self._last_summed: SpansSummed | None = None
        self.offers = 0
        """How often a batch was offered to the transport in this turn."""
        self._places: dict[PeerRank, int] = {}
        """When the queue of each peer that waits began to wait, or last had something taken, by a count of both."""
        self._moment = 0
        self._queue: list[tuple[int, PeerRank]] = []
        """Which peers were offered something in this turn, and their places before it, in this order."""

    def on_order(self, order: RankOrder) -> None:
        """The rank takes an order."""
        if isinstance(order, SumSpans):
            self._to_sum[order.side, order.copy.key].add(order.copy)
        elif isinstance(order, DropSums):
            self._to_sum.pop((order.side, order.key), None)
        elif isinstance(order, OpenCopy) and order.counts_arrivals:
            self._counting.add(order.copy)

    def report_problem(self, report: RankReport) -> str:
        """What is wrong with a report."""
        if isinstance(report, SpansSummed) and report.copy not in self._to_sum.get((report.side, report.copy.key), ()):
            return f"it was not to be summed, or not any longer: {report}"
        if isinstance(report, SpansSummed) and report is not self._last_summed:
            self._last_summed = report
            spans = {(report.copy, report.side, span) for span in report.sums}
            if not spans.isdisjoint(self._summed):
                return f"spans of it were summed before: {report}"
            self._summed |= spans
        return ""

    def planned_problem(self, report: RankReport) -> str:
        """What is wrong with a report of spans: those for a peer that counts are on their way once, and then moved."""
        if isinstance(report, SpansPlanned):
            planned = self._planned[report.copy]
            if report is self._last_planned:
                return ""  # passed on twice: that it counts once is up to the source
            self._last_planned = report
            if report.copy not in self._counting or not planned.isdisjoint(report.spans):
                return f"its peer does not count them, or they were on their way before: {report}"
            planned.update(report.spans)
        elif isinstance(report, SpansMoved) and report.copy in self._counting:
            unplanned = set(report.spans) - self._planned[report.copy]
            return f"its peer counts {unplanned}, and they were not on their way: {report}" if unplanned else ""
        return ""

    def session_problem(
        self,
        order: Disconnect | RevokePeer,
        *,
        sessions: Collection[PeerRank],
        routes: Collection[Incarnation],
        epochs: Mapping[PeerRank, int] | None,
    ) -> str:
        """What is left of a peer after the order to end its session; with `epochs`, each peer is fenced up to one."""
        peer = order.incarnation
        if peer in routes or any(each.incarnation == peer for each in sessions):
            return f"there is still a session with {peer} after {order}"
        if epochs is not None and isinstance(order, RevokePeer):
            fenced = max((epoch for each, epoch in epochs.items() if each.incarnation == peer), default=0)
            return "" if fenced >= order.epoch else f"{peer} is fenced up to {fenced} after {order}"
        return ""

    def connected_problem(
        self,
        order: Connect,
        error: str,
        *,
        is_first: bool,
        sessions: Collection[PeerRank],
        routes: Mapping[Incarnation, Routes],
        unreachable: Mapping[Incarnation, str],
    ) -> str:
        """What is wrong with a rank after the order to connect a peer: there are all sessions that are needed, or none.

        Of one that it cannot reach it knows why, and an operator learns which transports are offered there.
        """
        peer = order.card.incarnation
        offered = [endpoint.transport for each in order.card.ranks for endpoint in each.endpoints]
        if "no common transport" in error and not any(f"{each} there" in error for each in (*offered, "none")):
            return f"{peer} offers {offered}: {error}"
        if "none there" in error and all(each.endpoints for each in order.card.ranks):
            return f"{peer} offers {offered}: {error}"
        if unreachable.get(peer, "") != error:
            return f"{peer} counts as out of reach: {unreachable.get(peer)}, and not: {error}"
        found = {each for each in sessions if each.incarnation == peer}
        needed = set(routes[peer].peers) if peer in routes else set()
        if is_first and peer in routes and PeerRank(peer, 0) not in found:
            return f"sessions with {found} of {peer}, and aux records travel between first ranks"
        return "" if found == needed else f"sessions with {found} of {peer}, and {needed} are needed"

    def begin_turn(self, waiting: Collection[PeerRank]) -> None:
        """A turn begins, and these peers wait for a full queue."""
        self.offers = 0
        self._places = {peer: place for peer, place in self._places.items() if peer in waiting}
        self._queue = []

    def on_offer(self, peer: PeerRank, *, is_taken: bool, is_waiting: bool) -> None:
        """A batch for a peer was offered to the transport; others of that peer may wait already."""
        self.offers += 1
        self._moment += 1
        place = self._places.get(peer) if is_waiting else None
        if place is not None and peer not in (each for _, each in self._queue):
            self._queue.append((place, peer))
        if is_taken is (place is not None):
            self._places[peer] = self._moment

    def offer_problem(self, *, has_completed: bool, waiting: tuple[int, int]) -> str:
        """What is wrong with a turn in which as many parts waited for a full queue, before and after it.

        The queue may be shared by all peers: none has a batch taken before one that has waited for its own turn for longer.
        """
        if has_completed and min(waiting) > 0 and not self.offers:
            return f"a batch has completed, and {waiting[1]} parts were not offered again"
        return "" if self._queue == sorted(self._queue) else f"peers do not take turns: {self._queue}"

    def deadline_problem(self, deadline: float | None, retries: Collection[float]) -> str:
        """What is wrong with when a rank wants its next turn: it is no later than anything that is to be offered again."""
        next_turn = math.inf if deadline is None else deadline
        return f"its next turn is at {next_turn}, and {retries} are due" if min(retries, default=math.inf) < next_turn else ""

    def turns_problem(self, first: tuple[Side, HandoffKey] | None, left: tuple[tuple[Side, HandoffKey], ...]) -> str:
        """What is wrong with the queue of hand-offs after a turn that began with `first`: next is another one."""
        return f"{first} has had its turn, and is the next of {left} again" if len(left) > 1 and left[0] == first else ""

    def turn_problem(self, summed: int, largest: int, most: int, *, is_late: bool) -> str:
        """What is wrong with a turn that summed so many cells, in pieces of at most so many, some of them when it was over."""
        if is_late:
            return f"{most} cells may be summed in one turn, and were when more of them was begun"
        return f"{summed} cells were summed in one turn, and {most} may be" if summed > most + largest else ""
