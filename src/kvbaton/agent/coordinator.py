"""The coordinator: decides for its instance, from calls of the engine, messages of peers, reports of ranks, and the clock.

Logic only, no I/O (see `ports`). It knows the peers, and passes everything about a hand-off to the side that it belongs to.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, assert_never

from msgspec import structs

from kvbaton.agent.card_requests import is_answer_after
from kvbaton.agent.engine_port import Allocation, Offer, SourceRequest
from kvbaton.agent.ports import NO_STAMPS, Clock, Control, EnginePort, Ranks, Stamps
from kvbaton.agent.rank_orders import (
    Arrived,
    AuxRead,
    Connect,
    CopyFailed,
    CopyStopped,
    Disconnect,
    PeerFenced,
    RankReport,
    RegionFenced,
    SpansMoved,
    SpansPlanned,
    SpansSummed,
)
from kvbaton.agent.source import SourceSide
from kvbaton.agent.target import TargetSide
from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings, Limits
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.bounded import BoundedMap
from kvbaton.core.card import Card, check_compatible
from kvbaton.core.checks import size_worth_summing
from kvbaton.core.handoff import BlockLists, Confirmation, HandoffKey, Incarnation, Span
from kvbaton.core.messages import (
    Announced,
    AuxSent,
    ConfirmAsk,
    Confirmed,
    Envelope,
    Grant,
    Heartbeat,
    Hello,
    Message,
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
from kvbaton.wire.log_limit import LogLimit, shown

__all__ = ["Coordinator", "Peers"]

log = logging.getLogger(__name__)

_GONE_CHECK_S = 1.0
_MIN_BEAT_S = 0.05
_BEAT_ENTRIES = 1024
_MAX_REFUSED = 1024
_MAX_FENCED = 1024


class _Resident(NamedTuple):
    """Which incarnation answers at an address, and the last question for a card that was sent before its own card arrived."""

    incarnation: Incarnation
    asked: int


class Peers:
    """Cards of at most `limit` peers that passed the compatibility check, and up to `limit` addresses they answered at."""

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        # Not a BoundedMap: the card of a peer with live hand-offs must not be evicted, see `make_room`.
        self._cards: OrderedDict[Incarnation, Card] = OrderedDict()
        self._latest: Card | None = None
        """The one that was asked for last: frames of one peer come together, and each of them asks several times."""
        self._at: BoundedMap[ControlAddress, _Resident] = BoundedMap(limit)

    def __len__(self) -> int:
        return len(self._cards)

    def card(self, incarnation: Incarnation) -> Card | None:
        """The card of a peer, if it is known."""
        latest = self._latest
        if latest is not None and latest.incarnation == incarnation:
            return latest
        card = self._latest = self._cards.get(incarnation)
        if card is not None:
            self._cards.move_to_end(incarnation)
        return card

    def at(self, address: ControlAddress) -> Card | None:
        """The card of the peer that last answered at `address`."""
        resident = self._at.get(address)
        return None if resident is None else self.card(resident.incarnation)

    def replaces_after(self, incarnation: Incarnation, address: ControlAddress) -> int | None:
        """The question that `incarnation` has to answer a later one than, to replace another one at `address`; None for none.

        If the late card of a dead process were taken for that of a new one, its successor would count as dead, and the blocks
        that it still writes to would be freed. See `card_requests`.
        """
        resident = self._at.get(address)
        return None if resident is None or resident.incarnation == incarnation else resident.asked

    def learn(self, card: Card, address: ControlAddress | None, *, asked: int) -> Incarnation | None:
        """Remember a card, which arrived after question `asked` was sent; returns the incarnation that it replaces, forgotten.

        Only after `replaces_after`: whatever a card replaces counts as dead.
        """
        before = None
        if address is not None:
            before = self._at.get(address)
            if before is None or before.incarnation != card.incarnation:
                self._at[address] = _Resident(card.incarnation, asked)
        self._cards[card.incarnation] = self._latest = card
        self._cards.move_to_end(card.incarnation)
        if before is None or before.incarnation == card.incarnation:
            return None
        # Two processes cannot listen at one address: the one that answered there before is dead, or gets nothing sent any more.
        self.forget(before.incarnation)
        return before.incarnation

    def make_room(self, busy: Collection[Incarnation]) -> Incarnation | None:
        """Without room for another peer, forget the longest unused one and return it; raises TransportError if all are busy."""
        if len(self._cards) < self._limit:
            return None
        idle = next((incarnation for incarnation in self._cards if incarnation not in busy), None)
        if idle is None:
            raise TransportError(f"{len(self._cards)} peers have hand-offs here, more are not taken; try again later")
        self.forget(idle)
        return idle

    def forget(self, incarnation: Incarnation) -> None:
        """Forget a peer and the address it answered at."""
        self._cards.pop(incarnation, None)
        self._latest = None
        for address in [address for address, known in self._at.items() if known.incarnation == incarnation]:
            del self._at[address]


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
        stamps: Stamps = NO_STAMPS,
    ) -> None:
        stamps = stamps if settings.confirmation is Confirmation.STAMP else NO_STAMPS
        # Here and nowhere else: what the card states and what is written are the same memory.
        self.card = card = structs.replace(card, stamps=stamps.area)
        self._stamps = stamps
        self._layers = card.layers
        self._limits = limits
        self._clock = clock
        self._refusals = LogLimit(every_s=1.0)
        self._control = control
        self._ranks = ranks
        self._peers = Peers()
        self._refused_peers: BoundedMap[Incarnation, None] = BoundedMap(_MAX_REFUSED)
        """Peers whose card does not fit ours. Nothing is taken from them but that they decline a hand-off."""
        self._beaten_at = clock()
        self.stepped_at = clock()
        """When the engine took its last step. Set by the driver, on the engine's thread."""
        self._shortest_timeout = math.inf
        """The shortest `transfer_timeout` of the targets that wait for this instance: they give up after that much silence."""
        self.beat_interval_s = limits.beat_s
        """How often heartbeats are due: several times within our own timeout, and within that of every target of ours."""
        self._gone_check_at = clock() + _GONE_CHECK_S
        self._peer_fences: BoundedMap[Incarnation, dict[int, int]] = BoundedMap(_MAX_FENCED)
        """The latest epoch in which each rank has fenced a peer. Kept: a peer may be fenced again before every rank has."""
        self._region_epochs: dict[int, int] = {}
        aux, sum_size = card.ranks[0].aux, size_worth_summing(rank.layout for rank in card.ranks)
        own = (stamps, card.incarnation)
        self.source = self.source_side(len(card.ranks), limits, clock, control, ranks, engine, observe, aux, sum_size, *own)
        self.target = self.target_side(card, transport, limits, clock, control, ranks, engine, settings, observe, stamps)
        self.handlers: dict[type[Message], Callable[[Incarnation, Any], None]] = {
            Grant: self._on_grant,
            Announced: self.target.on_announced,
            Prefilled: self.target.on_prefilled,
            AuxSent: self.target.on_aux,
            Retracted: self.target.on_retracted,
            ConfirmAsk: self.source.on_confirm_ask,
            Confirmed: self.target.on_confirmed,
            Release: self.source.on_release,
            Stop: self.source.on_stop,
            Stopped: self.target.on_stopped,
            Over: self.target.on_over,
            Heartbeat: self._on_heartbeat,
        }
        """What is done with each message about hand-offs. A table: every hand-off has five of them and more."""
        self.dropped_total: Counter[str] = Counter()
        self.handshakes_total = 0

    @property
    def peers(self) -> int:
        """How many peers are known."""
        return len(self._peers)

    # Calls of the engine.

    def expect_target(self, key: HandoffKey, prompt: str) -> None:
        self.source.expect(key, prompt)

    def spans_ready(self, key: HandoffKey, blocks: BlockLists, spans: tuple[Span, ...]) -> None:
        self.source.spans_ready(key, blocks, spans)

    def retract(self, key: HandoffKey) -> None:
        self.source.retract(key)

    def offer(self, offer: Offer) -> None:
        layers = self._layers
        self.source.offer(offer, lambda: Span(0, 0, offer.tokens, layers.start, layers.stop))

    def expect_source(self, request: SourceRequest) -> None:
        """A request for a hand-off was admitted. A card of another incarnation than the expected one is asked for anew."""
        self.target.expect(request, self._find_source(request))

    def decline(self, request: SourceRequest, reason: str) -> None:
        """A request for a hand-off was refused before admission: its source is notified, once it is known."""
        self.target.decline(request, self._find_source(request), reason)

    def _find_source(self, request: SourceRequest) -> Card | None:
        """The card of the peer at an address, if it is known and the one that is meant.

        A peer that has died in the meantime is dropped here: another process may answer at its address by now.
        """
        card = self._peers.at(request.source)
        if card is None or request.source_incarnation not in (None, card.incarnation):
            return None
        if self._control.is_gone(card.process):
            self._drop_dead(card)
            return None
        return card

    def allocated(self, allocation: Allocation) -> None:
        self.target.allocated(allocation)

    def cancel(self, key: HandoffKey, side: Side | None = None) -> None:
        if side is not Side.TARGET:
            self.source.cancel(key, "the request was cancelled at the source")
        if side is not Side.SOURCE:
            self.target.cancel(key, "the request was cancelled")

    def refuse(self, key: HandoffKey, reason: str) -> None:
        self.source.refuse(key, reason)

    def stop(self, reason: str) -> None:
        """Cancel every hand-off and notify the peers, so that none of them has to wait for a deadline."""
        for side in (self.source, self.target):
            for key in list(side.live):
                side.cancel(key, reason)

    # Messages of peers.

    def on_frame(self, envelope: Envelope, via: ControlAddress | None) -> None:
        """A peer has sent something; `via` is the address we had dialled to reach it, None when it reached us."""
        sender, message = envelope.sender, envelope.message
        is_for_us = self.is_for_us(envelope)
        if is_for_us and (handle := self.handlers.get(type(message))) is not None and self._peers.card(sender) is not None:
            handle(sender, message)
        elif not is_for_us:
            # The sender takes us for the process that was here before. Our card shows it that this one is gone.
            self.dropped_total["for an earlier incarnation"] += 1
            self._control.send(sender, Hello(self.card, wants_answer=False, answers=0, takes_several=True))
        elif isinstance(message, Hello):
            self._on_hello(sender, message, via)
        elif isinstance(message, Refused) and message.key is None:
            self._on_refused_by_peer(sender, message, via)
        elif self._peers.card(sender) is None:
            # We have forgotten the sender, or never knew it. It resends what it waits for when it gets this question.
            if isinstance(message, Stop) and not message.grant and sender in self._refused_peers:
                # A target that was refused here declines what it was sent for: the request must not wait for it any longer.
                self.source.on_stop(sender, message)
                return
            self.dropped_total["from an unknown peer"] += 1
            self.target.card_requests.ask_back(sender)
        elif isinstance(message, Refused):
            self.target.on_refused(sender, message)

    def is_for_us(self, envelope: Envelope) -> bool:
        """Whether a frame was meant for this incarnation."""
        return envelope.recipient in ("", self.card.incarnation)

    def _on_grant(self, sender: Incarnation, grant: Grant) -> None:
        card = self._peers.card(sender)
        if card is not None and card.transfer_timeout < self._shortest_timeout:
            self._note_timeout(card.transfer_timeout)
        self.source.on_grant(sender, grant)

    def _on_heartbeat(self, sender: Incarnation, heartbeat: Heartbeat) -> None:
        (self.target if heartbeat.from_source else self.source).on_heartbeat(sender, heartbeat)

    # Reports of the ranks.

    def take_report(self, reports: deque[RankReport]) -> None:
        """Take the first report of a queue."""
        self.on_rank(reports.popleft())

    def on_rank(self, report: RankReport) -> None:
        """A rank of ours reports. A fence counts when every rank has it: until then one of them may still be written to."""
        match report:
            # The two that every hand-off has come first.
            case SpansMoved() | CopyFailed() | CopyStopped():
                (self.source if self.source.owns_copy(report.copy) else self.target).on_copy(report)
            case SpansSummed():
                (self.source if report.side is Side.SOURCE else self.target).on_summed_spans(report)
            case PeerFenced():
                self._on_peer_fenced(report)
            case RegionFenced():
                self._on_region_fenced(report)
            case AuxRead():
                self.target.on_aux_read(report)
            case SpansPlanned():
                self.source.on_planned(report)
            case Arrived():
                self.target.on_arrived(report)
            case _:
                assert_never(report)

    def _on_peer_fenced(self, report: PeerFenced) -> None:
        # Put behind the others: the oldest are dropped, and one that is only half reported must not be.
        epochs = self._peer_fences[report.peer] = self._peer_fences.get(report.peer, {})
        before = min((epochs.get(rank.rank, 0) for rank in self.card.ranks), default=0)
        epochs[report.rank] = max(report.epoch, epochs.get(report.rank, 0))
        epoch = min(epochs.get(rank.rank, 0) for rank in self.card.ranks)
        if epoch > before:
            # Its session is gone: without a card, the next hand-off with it begins with a handshake that opens a new one. Its
            # stamps are not forgotten: its process lives, and to look at them takes no session.
            self._peers.forget(report.peer)
            self.target.on_peer_fenced(report.peer, epoch)

    def _on_region_fenced(self, report: RegionFenced) -> None:
        self._region_epochs[report.rank] = max(report.epoch, self._region_epochs.get(report.rank, 0))
        self.target.on_region_fenced(min(self._region_epochs.get(rank.rank, 0) for rank in self.card.ranks))

    # Time.

    def tick(self, *, is_behind: bool = False) -> None:
        """Do what has become due. While frames of peers wait to be read, no peer is given up for its silence."""
        now = self._clock()
        self.beat()
        if not is_behind:
            # Both sides measure silence. Heartbeats and the check for dead processes above and below do not depend on frames.
            self.source.tick()
            self.target.tick()
        if self._gone_check_at <= now:
            self._gone_check_at = now + _GONE_CHECK_S
            self._drop_all_dead()

    def next_deadline(self) -> float | None:
        """When `tick` next has something to do; None while nothing is live, no notice waits and no address is dialled."""
        if not self.source.live and not self.target.live:
            return self.target.next_deadline()
        earliest = min(self._gone_check_at, self._beat_at())
        for when in (self.source.next_deadline(), self.target.next_deadline()):
            if when is not None and when < earliest:
                earliest = when
        return earliest

    def _note_timeout(self, shortest: float) -> None:
        """The shortest `transfer_timeout` of the targets that wait for this instance is another one."""
        self._shortest_timeout = shortest
        self.beat_interval_s = min(self._limits.beat_s, max(shortest / 6, _MIN_BEAT_S))

    def _beat_at(self) -> float:
        return self._beaten_at + self.beat_interval_s

    def beat(self) -> None:
        """Send the heartbeats that are due."""
        now = self._clock()
        if not self._beat_at() <= now:
            return
        self._beaten_at = now
        waiting = [self._peers.card(target) for target in self.source.peers()]
        self._note_timeout(min((card.transfer_timeout for card in waiting if card is not None), default=math.inf))
        step_age_s = max(0.0, now - self.stepped_at)
        for beats in (self.source.beat(), self.target.beat()):
            for peer, heartbeat in beats.items():
                for first in range(0, len(heartbeat.live), _BEAT_ENTRIES):
                    part = heartbeat.live[first : first + _BEAT_ENTRIES]
                    self._control.send(peer, Heartbeat(heartbeat.from_source, part, step_age_s))

    def _drop_all_dead(self) -> None:
        for incarnation in sorted(self.source.peers() | self.target.peers()):
            card = self._peers.card(incarnation)
            if card is not None and self._control.is_gone(card.process):
                self._drop_dead(card)

    def _drop_dead(self, card: Card) -> None:
        """The process of a known peer is dead: what it had to do with us ends now, not with a deadline."""
        self._peers.forget(card.incarnation)
        self._lose(card.incarnation, f"process {card.process.pid} of the peer is dead")

    # Cards of peers.

    def _on_hello(self, sender: Incarnation, hello: Hello, via: ControlAddress | None) -> None:
        if hello.card.incarnation != sender:
            # Answers go to the sender of the envelope: with the card of another peer, it would get that peer's hand-offs.
            self.dropped_total["a card of another peer"] += 1
            return
        if via is not None and (after := self.needs_answer_after(hello, via)) is not None:
            # Not refused and not taken: the process may be dead, and then neither is about the one that lives there.
            self.dropped_total["a card that may be late"] += 1
            self.target.card_requests.dial(via, after)
            return
        try:
            self._admit(hello.card, via)
        except (Incompatible, TransportError) as error:
            self._log_refusal(f"peer {hello.card.incarnation} refused: {error}")
            self.dropped_total["incompatible"] += 1
            self._refused_peers[sender] = None
            if hello.wants_answer:
                self._control.send(hello.card.incarnation, Refused(str(error)[:2000]))
            if via is not None:
                self.target.on_refused_peer(via, str(error), sender)
            return
        self.target.card_requests.on_card_of(sender)
        if hello.wants_answer:
            # It did not know us, so it has dropped what we sent it before. The card goes first, or it would drop that again.
            answer = Hello(self.card, wants_answer=False, answers=hello.question, takes_several=True)
            self._control.send(hello.card.incarnation, answer)
            self.target.resend_to(hello.card.incarnation)
        if via is not None:
            self.target.on_card(hello.card, via, hello.answers)

    def needs_answer_after(self, hello: Hello, via: ControlAddress) -> int | None:
        """The question that this card has to answer a later one than, to be taken; None when it may be taken as it is."""
        after = self._peers.replaces_after(hello.card.incarnation, via)
        return None if after is None or is_answer_after(after, hello.answers) else after

    def _admit(self, card: Card, via: ControlAddress | None) -> None:
        """Check a card before anything of it is used, then make its ranks reachable.

        Targets dial sources, so a peer that answered at an address which we dialled is a source. The first card of an
        incarnation stays: a process does not change what it is, and its sessions were made for that card.
        """
        source, target = (self.card, card) if via is None else (card, self.card)
        check_compatible(source, target, ours=self.card)
        known = self._peers.card(card.incarnation)
        if known is None:
            idle = self._peers.make_room(self.source.peers() | self.target.peers())
            if idle is not None:
                self._stamps.forget(idle)
                self._ranks.send_all(Disconnect(idle))
            self._ranks.send_all(Connect(card))
            self.handshakes_total += 1
        replaced = self._peers.learn(known or card, via, asked=self.target.card_requests.asked)
        if replaced is not None:
            self._lose(replaced, f"incarnation {replaced} was replaced by {card.incarnation}")

    def _on_refused_by_peer(self, sender: Incarnation, message: Refused, via: ControlAddress | None) -> None:
        self._log_refusal(f"refused by the peer at {via}: {message.reason}")
        if via is not None:
            self.target.on_refused_peer(via, f"refused by the source: {message.reason}", sender)

    def _log_refusal(self, text: str) -> None:
        """Peers repeat what was refused, and choose the text: one line a second, without control characters."""
        held_back = self._refusals.allow("refused", self._clock())
        if held_back is not None:
            log.error("%s%s", shown(text, 2000), f" ({held_back} similar lines held back)" if held_back else "")

    def _lose(self, incarnation: Incarnation, reason: str) -> None:
        # Fenced first: a rank that has disconnected a peer does not know any more which of its ranks could write.
        self.target.on_peer_gone(incarnation, reason)
        self._ranks.send_all(Disconnect(incarnation))
        self._stamps.forget(incarnation)
        self.source.on_peer_gone(incarnation, reason)
