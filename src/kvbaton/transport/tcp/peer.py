"""One peer as the mover sees it: a few connections that share its work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbaton.transport.base import PeerRank
from kvbaton.transport.tcp.link import LinkState, TcpLink

if TYPE_CHECKING:
    from kvbaton.transport.ledger import Job

__all__ = ["TcpPeer"]


class TcpPeer:
    """The links to one peer; the second and later ones are opened only while those before them are full of requests.

    A link that could not be opened beside others rests for a while; the others go on.
    """

    def __init__(self, peer: PeerRank, links: Sequence[TcpLink]) -> None:
        self.peer = peer
        self.links = tuple(links)
        for link in self.links:
            link.owner = self

    def has_other_open(self, link: TcpLink) -> bool:
        """Whether the peer can be read without `link`."""
        return any(other.state is LinkState.OPEN for other in self.links if other is not link)

    def link_for_more(self, now: float) -> TcpLink | None:
        """The link that shall ask next: the least busy one with room, or else one to open; None while all are full or rest."""
        roomy = [link for link in self.links if link.has_room]
        if roomy:
            return min(roomy, key=lambda link: link.request_count)
        if any(link.state in (LinkState.CONNECTING, LinkState.HELLO, LinkState.GREETING) for link in self.links):
            return None
        return next((link for link in self.links if link.state is LinkState.CLOSED and link.rests_until <= now), None)

    def forget(self, job: Job[TcpPeer]) -> None:
        """From now on throw away what still comes for `job`; its target memory is not touched again."""
        for link in self.links:
            link.forget(job)
