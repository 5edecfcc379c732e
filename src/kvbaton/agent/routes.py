"""Which ranks of a peer one rank exchanges bytes with, and which bytes; worked out once per pair of cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbaton.core.card import Card
from kvbaton.core.checks import LegPart
from kvbaton.core.layout import Layout
from kvbaton.core.legs import assign_legs
from kvbaton.core.pair import Pair, pair_layouts
from kvbaton.transport.base import PeerRank

__all__ = ["Route", "Routes", "find_routes"]


@dataclass(frozen=True, slots=True)
class Route:
    """What this rank exchanges with one rank of a peer, in the leg of this number."""

    leg: int
    peer: PeerRank
    pair: Pair
    part: LegPart


@dataclass(frozen=True, slots=True)
class Routes:
    """Every rank of a peer that this rank has a session with; from which it reads what, and to which it writes what."""

    peers: tuple[PeerRank, ...]
    reads: tuple[Route, ...]
    writes: tuple[Route, ...]


def find_routes(own: Layout, instance: Sequence[Layout], rank: int, card: Card) -> Routes:
    """The routes from one rank of an instance, with the layout `own`, to those of `card`; raises Incompatible.

    First ranks always have a session with each other: aux records travel there.
    """
    theirs = [each.layout for each in card.ranks]
    peers = [PeerRank(card.incarnation, each.rank) for each in card.ranks]
    reads = tuple(
        Route(
            leg.number,
            peers[leg.source],
            pair_layouts(theirs[leg.source], own, leg.share),
            LegPart(leg.share, theirs[leg.source]),
        )
        for leg in assign_legs(theirs, instance).of_target(rank)
    )
    writes = tuple(
        Route(
            leg.number,
            peers[leg.target],
            pair_layouts(own, theirs[leg.target], leg.share),
            LegPart(leg.share, theirs[leg.target]),
        )
        for leg in assign_legs(instance, theirs).of_source(rank)
    )
    met = {route.peer for route in (*reads, *writes)} | ({peers[0]} if rank == 0 else set())
    return Routes(tuple(peer for peer in peers if peer in met), reads, writes)
