"""The source half of a coordinator: keeps offered blocks under a lease, answers questions about them, gives them back once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvbaton.agent.engine_port import Offer, SourceEnded
from kvbaton.agent.ports import Clock, Control, EnginePort
from kvbaton.config import Limits
from kvbaton.core.handoff import HandoffKey, Incarnation, Outcome
from kvbaton.core.lifecycle import SOURCE, SourceEffect, SourceEvent, SourceState
from kvbaton.core.messages import Ask, ConfirmAsk, Confirmed, Offered, Refused, Release, Renew, Retracted

__all__ = ["SourceSide"]

log = logging.getLogger(__name__)

_RELEASED = {
    Outcome.DELIVERED: SourceEvent.RELEASED_DELIVERED,
    Outcome.FAILED: SourceEvent.RELEASED_FAILED,
    Outcome.EXPIRED: SourceEvent.RELEASED_FAILED,
    Outcome.CANCELLED: SourceEvent.RELEASED_CANCELLED,
}


@dataclass(slots=True)
class _Held:
    offer: Offer
    generation: int
    held_since: float
    lease_until: float
    state: SourceState = SOURCE.start
    target: Incarnation | None = None
    reason: str = ""


class SourceSide:
    """All live hand-offs that this instance is the source of. A hand-off belongs to the first target that asks for it."""

    def __init__(self, limits: Limits, clock: Clock, control: Control, engine: EnginePort) -> None:
        self._limits = limits
        self._clock = clock
        self._control = control
        self._engine = engine
        self._held: dict[HandoffKey, _Held] = {}
        self._generation = 0
        self.late_total: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def offer(self, offer: Offer) -> None:
        """Hold the blocks of a finished prefill until the target releases them or the lease is out."""
        if offer.key in self._held:
            self._engine(SourceEnded(offer.key, Outcome.FAILED, f"hand-off {offer.key} is live already"))
            return
        self._generation += 1
        now = self._clock()
        self._held[offer.key] = _Held(offer, self._generation, now, now + self._limits.defer_timeout)

    def cancel(self, key: HandoffKey, reason: str) -> None:
        """Take an offer back; the target is told, the blocks go back."""
        if (held := self._held.get(key)) is not None:
            self._step(held, SourceEvent.ABORTED, reason)

    def stop(self, reason: str) -> None:
        """Take every offer back."""
        for key in list(self._held):
            self.cancel(key, reason)

    def on_ask(self, sender: Incarnation, ask: Ask) -> None:
        """A target wants the cache: tell it where it lies, or why not."""
        held = self._held.get(ask.key)
        if held is None:
            self._control.send(sender, Refused(f"hand-off {ask.key} is not held here (any more)", ask.key))
        elif held.target not in (None, sender):
            self._control.send(sender, Refused(f"hand-off {ask.key} belongs to another target", ask.key))
        else:
            held.target = sender
            self._step(held, SourceEvent.ASKED)

    def on_renew(self, sender: Incarnation, renew: Renew) -> None:
        """A target is alive and still wants these."""
        for key in renew.keys:
            if (held := self._owned(key, sender)) is not None:
                self._step(held, SourceEvent.RENEWED)

    def on_confirm_ask(self, sender: Incarnation, ask: ConfirmAsk) -> None:
        """A target has read everything: confirm that the blocks never changed, or say that they did."""
        held = self._owned(ask.key, sender)
        if held is None or held.generation != ask.generation:
            self._control.send(sender, Retracted(ask.key, f"hand-off {ask.key} is not held here any more"))
        else:
            self._step(held, SourceEvent.CONFIRM_ASKED)

    def on_release(self, sender: Incarnation, release: Release) -> None:
        """The target is through with it."""
        held = self._owned(release.key, sender)
        if held is None:
            self.late_total["release"] += 1
        else:
            self._step(held, _RELEASED[release.outcome], release.reason)

    def on_peer_gone(self, target: Incarnation, reason: str) -> None:
        """A target is provably gone: what it was reading goes back."""
        for held in [held for held in self._held.values() if held.target == target]:
            self._step(held, SourceEvent.PEER_GONE, reason)

    def tick(self) -> None:
        """End what has had no sign of life from its target for too long."""
        now = self._clock()
        for held in [held for held in self._held.values() if held.lease_until <= now]:
            self._step(held, SourceEvent.LEASE_OUT, f"no word from the target for {self._limits.defer_timeout:g} s")

    def deadlines(self) -> Iterator[float]:
        """When something here will want to be looked at."""
        return (held.lease_until for held in self._held.values())

    def peers(self) -> set[Incarnation]:
        """Targets that hold something of ours."""
        return {held.target for held in self._held.values() if held.target is not None}

    def _owned(self, key: HandoffKey, sender: Incarnation) -> _Held | None:
        held = self._held.get(key)
        return held if held is not None and held.target == sender else None

    def _step(self, held: _Held, event: SourceEvent, reason: str = "") -> None:
        row = SOURCE.step(held.state, event)
        if row is None:
            self.late_total[event] += 1
            return
        held.state = row.state
        held.reason = held.reason or reason
        for effect in row.effects:
            self._perform(held, effect)

    def _perform(self, held: _Held, effect: SourceEffect) -> None:
        match effect:
            case SourceEffect.EXTEND_LEASE:
                held.lease_until = self._clock() + self._limits.defer_timeout
            case SourceEffect.SEND_OFFER:
                self._to_target(held, self._offered(held))
            case SourceEffect.SEND_CONFIRMATION:
                self._to_target(held, Confirmed(held.offer.key, held.generation))
            case SourceEffect.TELL_RETRACTED:
                self._to_target(held, Retracted(held.offer.key, held.reason))
            case SourceEffect.RETURN_BLOCKS:
                self._end(held)

    def _offered(self, held: _Held) -> Offered:
        offer = held.offer
        waited = self._clock() - held.held_since
        return Offered(offer.key, held.generation, offer.blocks, offer.tokens, offer.aux, waited)

    def _to_target(self, held: _Held, message: Offered | Confirmed | Retracted) -> None:
        if held.target is not None:
            self._control.send(held.target, message)

    def _end(self, held: _Held) -> None:
        del self._held[held.offer.key]
        outcome = Outcome(held.state.value)
        if outcome is not Outcome.DELIVERED:
            log.warning("hand-off %s: source %s: %s", held.offer.key, outcome, held.reason or "no reason given")
        self._engine(SourceEnded(held.offer.key, outcome, held.reason))
