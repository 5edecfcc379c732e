"""The rank agent: turns a leg into batches, posts them inline, and reports what became of them. No I/O of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kvbaton.agent.ports import LegFailed, LegFilled, LegProgress, LegReport, LegStart, LegStopped
from kvbaton.core.card import Card
from kvbaton.core.handoff import HandoffKey, Incarnation
from kvbaton.core.layout import Layout
from kvbaton.core.plan import Pair, Runs, pair_layouts, plan_runs
from kvbaton.errors import KVBatonError, TransportError
from kvbaton.transport.base import Batch, Completion, Direction, PeerRank, Ticket, Transport

__all__ = ["RankAgent"]

_BATCH_BYTES = 4 << 20


@dataclass(slots=True)
class _Leg:
    planned: int
    open: set[Ticket] = field(default_factory=set)
    moved: int = 0
    error: str = ""
    stopping: bool = False


class RankAgent:
    """Owns the legs of one rank. Batches are bounded in size, so that a long leg shows progress and stops promptly."""

    def __init__(self, rank: int, layout: Layout, transport: Transport, report: Callable[[LegReport], None]) -> None:
        self.rank = rank
        self._layout = layout
        self._transport = transport
        self._report = report
        self._pairs: dict[PeerRank, Pair] = {}
        self._legs: dict[HandoffKey, _Leg] = {}
        self._owners: dict[Ticket, HandoffKey] = {}

    def connect(self, card: Card) -> None:
        """Make the peer's rank of the same number readable; raises TransportError or Incompatible."""
        rank_card = card.ranks[self.rank]
        peer = PeerRank(card.incarnation, rank_card.rank)
        pair = pair_layouts(rank_card.layout, self._layout)
        for endpoint in rank_card.endpoints:
            if endpoint.transport == self._transport.name:
                self._transport.connect(peer, endpoint)
                self._pairs[peer] = pair
                return
        offered = ", ".join(endpoint.transport for endpoint in rank_card.endpoints) or "none"
        raise TransportError(f"no common transport: {self._transport.name} here, {offered} there")

    def disconnect(self, incarnation: Incarnation) -> None:
        """Forget a peer; what is in flight to it completes with an error."""
        for peer in [peer for peer in self._pairs if peer.incarnation == incarnation]:
            del self._pairs[peer]
            self._transport.revoke(peer)

    def start_leg(self, start: LegStart) -> None:
        """Plan and post; always ends in LegFilled or LegFailed."""
        peer = PeerRank(start.source, start.source_rank)
        try:
            runs = self._plan(peer, start)
        except KVBatonError as error:
            self._report(LegFailed(start.key, self.rank, str(error)))
            return
        leg = _Leg(planned=int(runs[:, 2].sum()))
        self._legs[start.key] = leg
        try:
            for part in _batches(runs):
                ticket = self._transport.post(Batch(peer, Direction.READ, part))
                leg.open.add(ticket)
                self._owners[ticket] = start.key
        except TransportError as error:
            leg.error = str(error)
            self._cancel_open(leg)
        self._settle(start.key, leg)

    def stop_leg(self, key: HandoffKey) -> None:
        """Cancel what is open; LegStopped follows when nothing is."""
        leg = self._legs.get(key)
        if leg is None:
            self._report(LegStopped(key, self.rank))
            return
        leg.stopping = True
        self._cancel_open(leg)
        self._settle(key, leg)

    def poll(self) -> None:
        """Take what the transport has completed and report it."""
        for completion in self._transport.poll():
            key = self._owners.pop(completion.ticket, None)
            if key is not None:
                self._complete(key, self._legs[key], completion)

    def _plan(self, peer: PeerRank, start: LegStart) -> Runs:
        pair = self._pairs.get(peer)
        if pair is None:
            raise TransportError(
                f"rank {start.source_rank} of {start.source} is not connected", transfer_id=start.key.transfer_id
            )
        return plan_runs(pair, start.source_blocks, start.target_blocks, start.first_token, start.tokens)

    def _complete(self, key: HandoffKey, leg: _Leg, completion: Completion) -> None:
        leg.open.discard(completion.ticket)
        leg.moved += completion.moved_bytes
        if completion.error and not leg.error:
            leg.error = completion.error
            self._cancel_open(leg)
        if leg.open and not leg.error and not leg.stopping:
            self._report(LegProgress(key, self.rank))
        self._settle(key, leg)

    def _cancel_open(self, leg: _Leg) -> None:
        for ticket in tuple(leg.open):
            self._transport.cancel(ticket)

    def _settle(self, key: HandoffKey, leg: _Leg) -> None:
        if leg.open:
            return
        del self._legs[key]
        if leg.stopping:
            self._report(LegStopped(key, self.rank))
        elif leg.error:
            self._report(LegFailed(key, self.rank, leg.error))
        else:
            self._report(LegFilled(key, self.rank, leg.planned, leg.moved))


def _batches(runs: Runs) -> Iterator[Runs]:
    ends = np.cumsum(runs[:, 2])
    cuts = np.flatnonzero(np.diff(ends // _BATCH_BYTES)) + 1
    return (part for part in np.split(runs, cuts) if len(part))
