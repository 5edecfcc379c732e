"""The coordinator: decides for its instance, from what engine, peers, ranks and clock tell it. Logic only; see `ports`."""

from __future__ import annotations

import logging
from collections import Counter

from kvbaton.agent.engine_port import Offer, Pull
from kvbaton.agent.peers import Peers
from kvbaton.agent.ports import Clock, Control, EnginePort, LegReport, Ranks
from kvbaton.agent.source import SourceSide
from kvbaton.agent.target import TargetSide
from kvbaton.config import Limits
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import Card, check_compatible
from kvbaton.core.handoff import HandoffKey, Incarnation
from kvbaton.core.messages import (
    Ask,
    ConfirmAsk,
    Confirmed,
    Envelope,
    Hello,
    Offered,
    Refused,
    Release,
    Renew,
    Retracted,
)
from kvbaton.errors import Incompatible, TransportError

__all__ = ["Coordinator"]

log = logging.getLogger(__name__)

_GONE_CHECK_S = 1.0


class Coordinator:
    """One instance's side of all its hand-offs. Not thread-safe: one driver calls it."""

    def __init__(
        self, card: Card, transport: str, limits: Limits, clock: Clock, control: Control, ranks: Ranks, engine: EnginePort
    ) -> None:
        self.card = card
        self._clock = clock
        self._control = control
        self._ranks = ranks
        self._peers = Peers()
        self._gone_check_at = clock()
        self.source = SourceSide(limits, clock, control, engine)
        self.target = TargetSide(card, transport, limits, clock, control, ranks, engine)
        self.dropped_total: Counter[str] = Counter()

    def offer(self, offer: Offer) -> None:
        """The engine has finished a prefill."""
        self.source.offer(offer)

    def pull(self, pull: Pull) -> None:
        """The engine wants a cache. A card of another incarnation than the expected one is asked for anew."""
        card = self._peers.at(pull.source)
        if card is not None and pull.source_incarnation not in (None, card.incarnation):
            card = None
        self.target.pull(pull, card)

    def cancel(self, key: HandoffKey) -> None:
        """The engine gives a hand-off up, on whichever side it is."""
        self.source.cancel(key, "the request was cancelled at the source")
        self.target.cancel(key, "the request was cancelled")

    def stop(self, reason: str) -> None:
        """Give every hand-off up and tell the peers, so that nobody has to wait for a deadline."""
        self.source.stop(reason)
        self.target.stop(reason)

    def on_frame(self, envelope: Envelope, via: ControlAddress | None) -> None:
        """A peer has spoken; `via` is the address we had dialled to reach it, None when it reached us."""
        sender, message = envelope.sender, envelope.message
        if envelope.recipient not in ("", self.card.incarnation):
            self.dropped_total["for an earlier incarnation"] += 1
            self._control.send(sender, Hello(self.card, wants_answer=False))
            return
        if isinstance(message, Hello):
            self._on_hello(message, via)
        elif isinstance(message, Refused) and message.key is None:
            self._on_refused_by_peer(message, via)
        elif self._peers.card(sender) is None:
            self.dropped_total["from a stranger"] += 1
        else:
            self._on_handoff_message(sender, message)

    def on_leg(self, report: LegReport) -> None:
        """A rank of ours reports."""
        self.target.on_leg(report)

    def tick(self) -> None:
        """Do what has become due."""
        self.source.tick()
        self.target.tick()
        if self._gone_check_at <= self._clock():
            self._gone_check_at = self._clock() + _GONE_CHECK_S
            self._check_for_the_dead()

    def next_deadline(self) -> float | None:
        """When `tick` next has something to do; None while nothing is live."""
        times = [*self.source.deadlines(), *self.target.deadlines()]
        if not times:
            return None
        return min(*times, self._gone_check_at)

    def _on_hello(self, hello: Hello, via: ControlAddress | None) -> None:
        try:
            self._admit(hello.card, via)
        except (Incompatible, TransportError) as error:
            log.error("peer %s refused: %s", hello.card.incarnation, error)
            self.dropped_total["incompatible"] += 1
            if hello.wants_answer:
                self._control.send(hello.card.incarnation, Refused(str(error)))
            if via is not None:
                self.target.on_refused_peer(via, str(error))
            return
        if hello.wants_answer:
            self._control.send(hello.card.incarnation, Hello(self.card, wants_answer=False))
        if via is not None:
            self.target.on_card(hello.card, via)

    def _admit(self, card: Card, via: ControlAddress | None) -> None:
        """Check a card before anything of it is used, then make its ranks readable if we reached it as a source."""
        if self._peers.card(card.incarnation) is None:
            source, target = (self.card, card) if via is None else (card, self.card)
            check_compatible(source, target, ours=self.card)
            if via is not None:
                self._ranks.connect(card)
        for dropped in self._peers.learn(card, via):
            self._lose(dropped, f"incarnation {dropped} was replaced by {card.incarnation}")

    def _on_refused_by_peer(self, message: Refused, via: ControlAddress | None) -> None:
        log.error("refused by the peer at %s: %s", via, message.reason)
        if via is not None:
            self.target.on_refused_peer(via, f"refused by the source: {message.reason}")

    def _on_handoff_message(
        self, sender: Incarnation, message: Ask | Offered | Renew | ConfirmAsk | Confirmed | Release | Retracted | Refused
    ) -> None:
        match message:
            case Ask():
                self.source.on_ask(sender, message)
            case Renew():
                self.source.on_renew(sender, message)
            case ConfirmAsk():
                self.source.on_confirm_ask(sender, message)
            case Release():
                self.source.on_release(sender, message)
            case Offered():
                self.target.on_offered(sender, message)
            case Confirmed():
                self.target.on_confirmed(sender, message)
            case Refused() | Retracted():
                self.target.on_refused(sender, message)

    def _check_for_the_dead(self) -> None:
        for incarnation in self.source.peers() | self.target.peers():
            card = self._peers.card(incarnation)
            if card is not None and self._control.is_gone(card.process):
                self._peers.forget(incarnation)
                self._lose(incarnation, f"process {card.process.pid} of the peer is dead")

    def _lose(self, incarnation: Incarnation, reason: str) -> None:
        self._ranks.disconnect(incarnation)
        self.source.on_peer_gone(incarnation, reason)
        self.target.on_peer_gone(incarnation, reason)
