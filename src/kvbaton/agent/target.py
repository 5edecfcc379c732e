"""The target half of a coordinator: finds the source, asks, fills, has it confirmed, and only then lets decode start."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvbaton.agent.engine_port import HandoffStats, Landed, Pull, TargetEnded
from kvbaton.agent.ports import Clock, Control, EnginePort, LegFailed, LegFilled, LegProgress, LegReport, LegStart, Ranks
from kvbaton.config import Limits
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import Card
from kvbaton.core.handoff import HandoffKey, Incarnation, Outcome
from kvbaton.core.lifecycle import TARGET, TargetEffect, TargetEvent, TargetState
from kvbaton.core.messages import Ask, ConfirmAsk, Confirmed, Hello, Offered, Refused, Release, Renew, Retracted

__all__ = ["TargetSide"]

log = logging.getLogger(__name__)

_QUIET = {
    Outcome.FAILED: TargetEvent.QUIET_FAILED,
    Outcome.CANCELLED: TargetEvent.QUIET_CANCELLED,
    Outcome.EXPIRED: TargetEvent.QUIET_EXPIRED,
}
_ASKING_AGAIN = (TargetState.GREETING, TargetState.ASKING, TargetState.CONFIRMING)
_RENEWING = (TargetState.ASKING, TargetState.FILLING, TargetState.CONFIRMING)


@dataclass(slots=True)
class _Wanted:
    pull: Pull
    grant: int
    give_up_at: float
    retry_at: float
    state: TargetState = TARGET.start
    source: Incarnation | None = None
    offered: Offered | None = None
    open_legs: set[int] = field(default_factory=set)
    verdict: Outcome = Outcome.FAILED
    reason: str = ""
    offered_at: float = 0.0
    filled_at: float = 0.0
    bytes_planned: int = 0
    bytes_moved: int = 0


class TargetSide:
    """All live hand-offs that this instance is the target of."""

    def __init__(
        self, card: Card, transport: str, limits: Limits, clock: Clock, control: Control, ranks: Ranks, engine: EnginePort
    ) -> None:
        self._card = card
        self._transport = transport
        self._limits = limits
        self._clock = clock
        self._control = control
        self._ranks = ranks
        self._engine = engine
        self._wanted: dict[HandoffKey, _Wanted] = {}
        self._grant = 0
        self._renew_at = clock()
        self.late_total: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._wanted)

    def pull(self, pull: Pull, source: Card | None) -> None:
        """Start a hand-off; `source` is the card of the peer at that address, when it is known and the right incarnation."""
        if pull.key in self._wanted:
            self._engine(TargetEnded(pull.key, Outcome.FAILED, f"hand-off {pull.key} is live already"))
            return
        self._grant += 1
        now = self._clock()
        wanted = _Wanted(pull, self._grant, now + self._limits.transfer_timeout, now + self._limits.retry)
        self._wanted[pull.key] = wanted
        if source is None:
            self._control.dial(pull.source, Hello(self._card, wants_answer=True))
        else:
            self._meet(wanted, source)

    def cancel(self, key: HandoffKey, reason: str) -> None:
        """Give a hand-off up; its blocks come back once nobody writes to them."""
        if (wanted := self._wanted.get(key)) is not None:
            self._stop(wanted, TargetEvent.ABORTED, Outcome.CANCELLED, reason)

    def stop(self, reason: str) -> None:
        """Give every hand-off up."""
        for key in list(self._wanted):
            self.cancel(key, reason)

    def on_card(self, card: Card, address: ControlAddress) -> None:
        """A peer has shown its card at `address`: go on with whoever waited for it."""
        for wanted in self._greeting(address):
            self._meet(wanted, card)

    def on_refused_peer(self, address: ControlAddress, reason: str) -> None:
        """The peer at `address` does not want us, or we do not want it: whoever waited for it fails with the reason."""
        for wanted in self._greeting(address):
            self._stop(wanted, TargetEvent.REFUSED, Outcome.FAILED, reason)

    def on_offered(self, sender: Incarnation, offered: Offered) -> None:
        """The source has told where the cache lies."""
        wanted = self._from(sender, offered.key)
        if wanted is None or wanted.state is not TargetState.ASKING:
            self.late_total["offered"] += 1
        elif offered.tokens != wanted.pull.tokens:
            reason = f"the source holds {offered.tokens} tokens, the target asked for {wanted.pull.tokens}"
            self._stop(wanted, TargetEvent.REFUSED, Outcome.FAILED, reason)
        else:
            wanted.offered = offered
            wanted.offered_at = self._clock()
            self._step(wanted, TargetEvent.OFFERED)

    def on_confirmed(self, sender: Incarnation, confirmed: Confirmed) -> None:
        """The source says that what was read was right."""
        wanted = self._from(sender, confirmed.key)
        if wanted is None or wanted.offered is None or wanted.offered.generation != confirmed.generation:
            self.late_total["confirmed"] += 1
        else:
            self._step(wanted, TargetEvent.CONFIRMED)

    def on_refused(self, sender: Incarnation, answer: Refused | Retracted) -> None:
        """The source says no, or takes it back."""
        wanted = None if answer.key is None else self._from(sender, answer.key)
        if wanted is None:
            self.late_total["refused"] += 1
        else:
            self._stop(wanted, TargetEvent.REFUSED, Outcome.FAILED, answer.reason)

    def on_leg(self, report: LegReport) -> None:
        """A rank tells what became of its leg; the hand-off is decided by all of them together."""
        wanted = self._wanted.get(report.key)
        if wanted is None:
            self.late_total["leg"] += 1
            return
        wanted.give_up_at = self._clock() + self._limits.transfer_timeout
        if isinstance(report, LegProgress):
            return
        wanted.open_legs.discard(report.rank)
        if isinstance(report, LegFilled):
            wanted.bytes_planned += report.bytes_planned
            wanted.bytes_moved += report.bytes_moved
        if isinstance(report, LegFailed):
            self._stop(wanted, TargetEvent.LEG_FAILED, Outcome.FAILED, report.reason)
        self._settle_legs(wanted)

    def on_peer_gone(self, source: Incarnation, reason: str) -> None:
        """A source is provably gone, or has been replaced: what was wanted of it fails."""
        for wanted in [wanted for wanted in self._wanted.values() if wanted.source == source]:
            self._stop(wanted, TargetEvent.PEER_GONE, Outcome.FAILED, reason)

    def tick(self) -> None:
        """Ask again what has no answer, renew leases, and give up what makes no progress."""
        now = self._clock()
        for wanted in list(self._wanted.values()):
            if wanted.state is not TargetState.STOPPING and wanted.give_up_at <= now:
                reason = f"no progress for {self._limits.transfer_timeout:g} s while {wanted.state}"
                self._stop(wanted, TargetEvent.NO_PROGRESS, Outcome.EXPIRED, reason)
            elif wanted.state in _ASKING_AGAIN and wanted.retry_at <= now:
                wanted.retry_at = now + self._limits.retry
                self._ask_again(wanted)
        if self._renew_at <= now:
            self._renew_at = now + self._limits.renew_s
            self._renew()

    def deadlines(self) -> Iterator[float]:
        """When something here will want to be looked at."""
        for wanted in self._wanted.values():
            if wanted.state is not TargetState.STOPPING:
                yield wanted.give_up_at
                yield self._renew_at
                if wanted.state in _ASKING_AGAIN:
                    yield wanted.retry_at

    def peers(self) -> set[Incarnation]:
        """Sources that we wait for."""
        return {wanted.source for wanted in self._wanted.values() if wanted.source is not None}

    def _greeting(self, address: ControlAddress) -> list[_Wanted]:
        return [
            wanted for wanted in self._wanted.values() if wanted.state is TargetState.GREETING and wanted.pull.source == address
        ]

    def _from(self, sender: Incarnation, key: HandoffKey) -> _Wanted | None:
        wanted = self._wanted.get(key)
        return wanted if wanted is not None and wanted.source == sender else None

    def _meet(self, wanted: _Wanted, card: Card) -> None:
        expected = wanted.pull.source_incarnation
        if expected is not None and expected != card.incarnation:
            reason = f"the source restarted: incarnation {expected} is gone, {card.incarnation} answers in its place"
            self._stop(wanted, TargetEvent.REFUSED, Outcome.FAILED, reason)
        else:
            wanted.source = card.incarnation
            self._step(wanted, TargetEvent.PEER_KNOWN)

    def _ask_again(self, wanted: _Wanted) -> None:
        match wanted.state:
            case TargetState.GREETING:
                self._control.dial(wanted.pull.source, Hello(self._card, wants_answer=True))
            case TargetState.ASKING:
                self._perform(wanted, TargetEffect.SEND_ASK)
            case TargetState.CONFIRMING:
                self._perform(wanted, TargetEffect.ASK_CONFIRMATION)

    def _renew(self) -> None:
        wanted_of: dict[Incarnation, list[HandoffKey]] = {}
        for wanted in self._wanted.values():
            if wanted.state in _RENEWING and wanted.source is not None:
                wanted_of.setdefault(wanted.source, []).append(wanted.pull.key)
        for source, keys in wanted_of.items():
            self._control.send(source, Renew(tuple(keys)))

    def _stop(self, wanted: _Wanted, event: TargetEvent, verdict: Outcome, reason: str) -> None:
        if wanted.state is TargetState.STOPPING:
            self.late_total[event] += 1
            return
        wanted.verdict, wanted.reason = verdict, reason
        self._step(wanted, event)
        self._settle_legs(wanted)

    def _settle_legs(self, wanted: _Wanted) -> None:
        if wanted.open_legs:
            return
        if wanted.state is TargetState.FILLING:
            wanted.filled_at = self._clock()
            self._step(wanted, TargetEvent.LEGS_FILLED)
        elif wanted.state is TargetState.STOPPING:
            self._step(wanted, _QUIET[wanted.verdict])

    def _step(self, wanted: _Wanted, event: TargetEvent) -> None:
        row = TARGET.step(wanted.state, event)
        if row is None:
            self.late_total[event] += 1
            return
        now = self._clock()
        wanted.state = row.state
        wanted.give_up_at = now + self._limits.transfer_timeout
        wanted.retry_at = now + self._limits.retry
        for effect in row.effects:
            self._perform(wanted, effect)

    def _perform(self, wanted: _Wanted, effect: TargetEffect) -> None:
        key = wanted.pull.key
        match effect:
            case TargetEffect.SEND_ASK:
                self._to_source(wanted, Ask(key, wanted.grant))
            case TargetEffect.START_LEGS:
                self._start_legs(wanted)
            case TargetEffect.ASK_CONFIRMATION if wanted.offered is not None:
                self._to_source(wanted, ConfirmAsk(key, wanted.offered.generation))
            case TargetEffect.STOP_LEGS:
                for rank in tuple(wanted.open_legs):
                    self._ranks.stop_leg(rank, key)
            case TargetEffect.TELL_RELEASE:
                outcome = Outcome.DELIVERED if wanted.state is TargetState.DELIVERED else wanted.verdict
                self._to_source(wanted, Release(key, outcome, wanted.reason))
            case TargetEffect.DELIVER:
                self._deliver(wanted)
            case TargetEffect.RETURN_BLOCKS:
                self._end(wanted)

    def _start_legs(self, wanted: _Wanted) -> None:
        offered, pull = wanted.offered, wanted.pull
        if offered is None or wanted.source is None:
            return
        wanted.open_legs = {rank.rank for rank in self._card.ranks}
        for rank in sorted(wanted.open_legs):
            start = LegStart(pull.key, wanted.source, rank, offered.blocks, pull.blocks, pull.cached_tokens, pull.tokens)
            self._ranks.start_leg(rank, start)

    def _to_source(self, wanted: _Wanted, message: Ask | ConfirmAsk | Release) -> None:
        if wanted.source is not None:
            self._control.send(wanted.source, message)

    def _deliver(self, wanted: _Wanted) -> None:
        offered = wanted.offered
        if offered is None:
            return
        del self._wanted[wanted.pull.key]
        now = self._clock()
        wire_s = wanted.filled_at - wanted.offered_at
        stats = HandoffStats(
            bytes_planned=wanted.bytes_planned,
            bytes_moved=wanted.bytes_moved,
            handover_s=offered.held_s + (now - wanted.offered_at) - wire_s,
            wire_s=wire_s,
            transport=self._transport,
        )
        self._engine(Landed(wanted.pull.key, offered.aux, stats))

    def _end(self, wanted: _Wanted) -> None:
        del self._wanted[wanted.pull.key]
        outcome = Outcome(wanted.state.value)
        log.warning("hand-off %s: target %s: %s", wanted.pull.key, outcome, wanted.reason)
        self._engine(TargetEnded(wanted.pull.key, outcome, wanted.reason))
