"""The coordinator: decides for its instance, from what engine, peers, ranks and clock tell it. Logic only; see `ports`."""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import assert_never

from kvbaton.agent.engine_port import Allocation, Offer, SourceWanted
from kvbaton.agent.peers import Peers
from kvbaton.agent.ports import AuxRead, Clock, Control, EnginePort, LegSummed, PeerFenced, RankReport, Ranks, RegionFenced
from kvbaton.agent.source import SourceSide
from kvbaton.agent.target import TargetSide
from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings, Limits
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import Card, check_compatible
from kvbaton.core.handoff import BlockLists, HandoffKey, Incarnation, Span
from kvbaton.core.messages import (
    Announced,
    AuxSent,
    ConfirmAsk,
    Confirmed,
    Envelope,
    Grant,
    HandoffMessage,
    Heartbeat,
    Hello,
    Over,
    Prefilled,
    Refused,
    Release,
    Retracted,
    Stop,
    Stopped,
)
from kvbaton.core.timeline import Observer, Side, no_observer
from kvbaton.errors import Incompatible, TransportError

__all__ = ["Coordinator"]

log = logging.getLogger(__name__)

_GONE_CHECK_S = 1.0
_MIN_BEAT_S = 0.05
_BEAT_ENTRIES = 1024


class Coordinator:
    """One instance's side of all its hand-offs. Not thread-safe: one driver calls it."""

    source_side = SourceSide
    target_side = TargetSide

    def __init__(
        self,
        card: Card,
        transport: str,
        limits: Limits,
        clock: Clock,
        control: Control,
        ranks: Ranks,
        engine: EnginePort,
        settings: HandoffSettings = DEFAULT_HANDOFF,
        observe: Observer = no_observer,
    ) -> None:
        self.card = card
        self._limits = limits
        self._clock = clock
        self._control = control
        self._ranks = ranks
        self._peers = Peers()
        self._beaten_at = clock()
        self._patience_s = math.inf
        self._gone_check_at = clock() + _GONE_CHECK_S
        self._peer_fences: dict[Incarnation, dict[int, int]] = {}
        self._region_epochs: dict[int, int] = {}
        self._region_epoch = 0
        self.source = self.source_side(len(card.ranks), limits, clock, control, ranks, engine, observe, card.ranks[0].aux)
        self.target = self.target_side(card, transport, limits, clock, control, ranks, engine, settings, observe)
        self.dropped_total: Counter[str] = Counter()
        self.handshakes_total = 0

    @property
    def peers(self) -> int:
        """How many peers are known."""
        return len(self._peers)

    # What the engine says.

    def expect_target(self, key: HandoffKey, prompt: str) -> None:
        """A prefill for a hand-off was admitted."""
        self.source.expect(key, prompt)

    def spans_ready(self, key: HandoffKey, blocks: BlockLists, spans: tuple[Span, ...]) -> None:
        """Spans are computed."""
        self.source.spans_ready(key, blocks, spans)

    def retract(self, key: HandoffKey) -> None:
        """What was said about a prefill is void."""
        self.source.retract(key)

    def offer(self, offer: Offer) -> None:
        """A prefill is complete."""
        layers = self.card.layers
        self.source.offer(offer, lambda: Span(0, 0, offer.tokens, layers.start, layers.stop))

    def expect_source(self, wanted: SourceWanted) -> None:
        """A request for a hand-off was admitted. A card of another incarnation than the expected one is asked for anew."""
        self.target.expect(wanted, self._source_of(wanted))

    def decline(self, wanted: SourceWanted, reason: str) -> None:
        """A request for a hand-off was refused before admission: its source is told, once it is known."""
        self.target.decline(wanted, self._source_of(wanted), reason)

    def _source_of(self, wanted: SourceWanted) -> Card | None:
        """The peer at an address, if it is known, meant and not dead: another one may answer there by now."""
        card = self._peers.at(wanted.source)
        if card is None or wanted.source_incarnation not in (None, card.incarnation) or self._is_lost(card):
            return None
        return card

    def allocated(self, allocation: Allocation) -> None:
        """Blocks for a hand-off are there."""
        self.target.allocated(allocation)

    def cancel(self, key: HandoffKey, side: Side | None = None) -> None:
        """The engine gives a hand-off up, on `side` or on whichever side it is."""
        if side is not Side.TARGET:
            self.source.cancel(key, "the request was cancelled at the source")
        if side is not Side.SOURCE:
            self.target.cancel(key, "the request was cancelled")

    def stop(self, reason: str) -> None:
        """Give every hand-off up and tell the peers, so that nobody has to wait for a deadline."""
        self.source.stop(reason)
        self.target.stop(reason)

    # What peers say.

    def on_frame(self, envelope: Envelope, via: ControlAddress | None) -> None:
        """A peer has spoken; `via` is the address we had dialled to reach it, None when it reached us."""
        sender, message = envelope.sender, envelope.message
        if not self.is_for_us(envelope):
            self.dropped_total["for an earlier incarnation"] += 1
            self._control.send(sender, Hello(self.card, wants_answer=False))
        elif isinstance(message, Hello):
            self._on_hello(sender, message, via)
        elif isinstance(message, Refused) and message.key is None:
            self._on_refused_by_peer(message, via)
        elif self._peers.card(sender) is None:
            self.dropped_total["from a stranger"] += 1
            self._control.send(sender, Hello(self.card, wants_answer=True))
        elif isinstance(message, Refused):
            self.target.on_refused(sender, message)
        else:
            self._on_handoff_message(sender, message)

    def is_for_us(self, envelope: Envelope) -> bool:
        """Whether a frame was meant for this incarnation."""
        return envelope.recipient in ("", self.card.incarnation)

    def _on_handoff_message(self, sender: Incarnation, message: HandoffMessage) -> None:
        match message:
            case Grant():
                card = self._peers.card(sender)
                self._patience_s = min(self._patience_s, math.inf if card is None else card.transfer_timeout)
                self.source.on_grant(sender, message)
            case ConfirmAsk():
                self.source.on_confirm_ask(sender, message)
            case Release():
                self.source.on_release(sender, message)
            case Stop():
                self.source.on_stop(sender, message)
            case Announced():
                self.target.on_announced(sender, message)
            case Prefilled():
                self.target.on_prefilled(sender, message)
            case AuxSent():
                self.target.on_aux(sender, message)
            case Retracted():
                self.target.on_retracted(sender, message)
            case Confirmed():
                self.target.on_confirmed(sender, message)
            case Over():
                self.target.on_over(sender, message)
            case Stopped():
                self.target.on_stopped(sender, message)
            case Heartbeat():
                (self.target if message.from_source else self.source).on_heartbeat(sender, message)
            case _:
                assert_never(message)

    # What ranks say.

    def on_rank(self, report: RankReport) -> None:
        """A rank of ours reports. A fence counts when every rank has put it up."""
        match report:
            case PeerFenced():
                self._on_peer_fenced(report)
            case RegionFenced():
                self._on_region_fenced(report)
            case AuxRead():
                self.target.on_aux_read(report)
            case LegSummed():
                (self.source if report.side is Side.SOURCE else self.target).on_summed(report)
            case _ if self.source.owns_leg(report.leg):
                self.source.on_leg(report)
            case _:
                self.target.on_leg(report)

    def _on_peer_fenced(self, report: PeerFenced) -> None:
        epochs = self._peer_fences.setdefault(report.peer, {})
        epochs[report.rank] = max(report.epoch, epochs.get(report.rank, 0))
        if len(epochs) == len(self.card.ranks):
            del self._peer_fences[report.peer]
            self._peers.forget(report.peer)
            self.target.on_peer_fenced(report.peer, min(epochs.values()))

    def _on_region_fenced(self, report: RegionFenced) -> None:
        self._region_epochs[report.rank] = max(report.epoch, self._region_epochs.get(report.rank, 0))
        epoch = min(self._region_epochs.get(rank.rank, 0) for rank in self.card.ranks)
        if epoch > self._region_epoch:
            self._region_epoch = epoch
            self.target.on_region_fenced(epoch)

    # What the clock says.

    def tick(self, *, is_behind: bool = False) -> None:
        """Do what has become due. While we are behind with what peers say, nobody is given up for their silence."""
        now = self._clock()
        self.beat()
        if not is_behind:
            self.source.tick()
            self.target.tick()
        if self._gone_check_at <= now:
            self._gone_check_at = now + _GONE_CHECK_S
            self._check_for_the_dead()

    def next_deadline(self) -> float | None:
        """When `tick` next has something to do; None while nothing is live and nobody has to be told anything."""
        if not self.source.live and not self.target.live:
            return self.target.farewells.next_deadline()
        sides = (self.source.next_deadline(), self.target.next_deadline())
        return min(self._gone_check_at, *(when for when in sides if when is not None), self._beat_at())

    def _beat_at(self) -> float:
        """When heartbeats are due: several times within our own patience, and within that of every target that waits for us."""
        return self._beaten_at + min(self._limits.beat_s, max(self._patience_s / 6, _MIN_BEAT_S))

    def beat(self) -> None:
        """Send the heartbeats that are due."""
        now = self._clock()
        if not self._beat_at() <= now:
            return
        self._beaten_at = now
        waiting = [self._peers.card(target) for target in self.source.peers()]
        self._patience_s = min((card.transfer_timeout for card in waiting if card is not None), default=math.inf)
        for beats in (self.source.beat(), self.target.beat()):
            for peer, heartbeat in beats.items():
                for first in range(0, len(heartbeat.live), _BEAT_ENTRIES):
                    part = heartbeat.live[first : first + _BEAT_ENTRIES]
                    self._control.send(peer, Heartbeat(heartbeat.from_source, part))

    def _check_for_the_dead(self) -> None:
        for incarnation in sorted(self.source.peers() | self.target.peers()):
            card = self._peers.card(incarnation)
            if card is not None:
                self._is_lost(card)

    def _is_lost(self, card: Card) -> bool:
        """Whether the process of a known peer is dead; what it had to do with us ends then."""
        if not self._control.is_gone(card.process):
            return False
        self._peers.forget(card.incarnation)
        self._lose(card.incarnation, f"process {card.process.pid} of the peer is dead")
        return True

    # Who is who.

    def _on_hello(self, sender: Incarnation, hello: Hello, via: ControlAddress | None) -> None:
        if hello.card.incarnation != sender:
            self.dropped_total["a card of somebody else"] += 1
            return
        try:
            self._admit(hello.card, via)
        except (Incompatible, TransportError) as error:
            log.error("peer %s refused: %s", hello.card.incarnation, error)
            self.dropped_total["incompatible"] += 1
            if hello.wants_answer:
                self._control.send(hello.card.incarnation, Refused(str(error)[:2000]))
            if via is not None:
                self.target.on_refused_peer(via, str(error))
            return
        if hello.wants_answer:
            self._control.send(hello.card.incarnation, Hello(self.card, wants_answer=False))
            self.target.on_forgotten(hello.card.incarnation)
        if via is not None:
            self.target.on_card(hello.card, via)

    def _admit(self, card: Card, via: ControlAddress | None) -> None:
        """Check a card before anything of it is used, then make its ranks reachable."""
        source, target = (self.card, card) if via is None else (card, self.card)
        check_compatible(source, target, ours=self.card)
        known = self._peers.card(card.incarnation)
        if known is None:
            idle = self._peers.make_room(self.source.peers() | self.target.peers())
            if idle is not None:
                self._ranks.disconnect(idle)
            self._ranks.connect(card)
            self.handshakes_total += 1
        replaced = self._peers.learn(known or card, via)
        if replaced is not None:
            self._lose(replaced, f"incarnation {replaced} was replaced by {card.incarnation}")

    def _on_refused_by_peer(self, message: Refused, via: ControlAddress | None) -> None:
        log.error("refused by the peer at %s: %s", via, message.reason)
        if via is not None:
            self.target.on_refused_peer(via, f"refused by the source: {message.reason}")

    def _lose(self, incarnation: Incarnation, reason: str) -> None:
        self._peer_fences.pop(incarnation, None)
        self._ranks.disconnect(incarnation)
        self.source.on_peer_gone(incarnation, reason)
        self.target.on_peer_gone(incarnation, reason)
