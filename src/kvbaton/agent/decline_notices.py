"""Farewells: sources that are told that a request for their hand-off is over, although no grant of it ever reached them.

Without one, a source would keep its blocks for somebody who will never come. A farewell greets the source if its card is not
known yet, says `Stop` without a grant, and is repeated until it is answered or `transfer_timeout` has passed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvbaton.agent.engine_port import SourceWanted
from kvbaton.agent.ports import Clock, Control
from kvbaton.config import Limits
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.alarms import Alarms
from kvbaton.core.card import Card
from kvbaton.core.handoff import HandoffKey, Incarnation, Outcome
from kvbaton.core.messages import MAX_REASON, Stop

__all__ = ["Farewells"]


@dataclass(slots=True)
class _Farewell:
    wanted: SourceWanted
    outcome: Outcome
    reason: str
    source: Incarnation | None
    give_up_at: float
    retry_at: float
    retry_s: float


class Farewells:
    """At most `limit` farewells that have no answer yet; beyond that the oldest is given up, and counted."""

    def __init__(
        self, limits: Limits, clock: Clock, control: Control, greet: Callable[[ControlAddress], None], limit: int = 4096
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._control = control
        self._greet = greet
        self._limit = limit
        self._waiting: OrderedDict[HandoffKey, _Farewell] = OrderedDict()
        self._alarms: Alarms[HandoffKey] = Alarms()
        self.given_up_total = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def say(self, wanted: SourceWanted, outcome: Outcome, reason: str, source: Incarnation | None) -> None:
        """Tell the source of `wanted`, at once if it is known as `source`, that it ended here; a later end replaces it.

        Without a prompt that is about every hand-off of the transfer id; a later one of the same key does not take that back.
        """
        earlier = self._waiting.get(wanted.key)
        if earlier is not None and not earlier.wanted.prompt:
            wanted = replace(wanted, prompt="")
        now, retry_s = self._clock(), self._limits.retry
        give_up_at = now + self._limits.transfer_timeout
        self.forget(wanted.key)
        farewell = _Farewell(wanted, outcome, reason[:MAX_REASON], source, give_up_at, now + retry_s, retry_s)
        self._waiting[wanted.key] = farewell
        self._alarms.set(wanted.key, farewell.retry_at)
        while len(self._waiting) > self._limit:
            self._give_up(next(iter(self._waiting)))
        self._speak(farewell)

    def forget(self, key: HandoffKey) -> None:
        """Say no more about `key`: it was answered, or lives again."""
        self._waiting.pop(key, None)
        self._alarms.drop(key)

    def on_card(self, card: Card, address: ControlAddress) -> None:
        """A peer has shown its card at `address`: tell it, unless another incarnation was meant, which is gone."""
        for farewell in [each for each in self._waiting.values() if each.source is None and each.wanted.source == address]:
            if farewell.wanted.source_incarnation not in (None, card.incarnation):
                self.forget(farewell.wanted.key)
            else:
                farewell.source = card.incarnation
                self._speak(farewell)

    def on_forgotten(self, source: Incarnation) -> None:
        """A source asks who we are: it has not taken in what we said."""
        for farewell in [each for each in self._waiting.values() if each.source == source]:
            self._speak(farewell)

    def on_refused_peer(self, address: ControlAddress) -> None:
        """The peer at `address` is none of ours: there is nobody to tell."""
        for key in [key for key, each in self._waiting.items() if each.source is None and each.wanted.source == address]:
            self.forget(key)

    def on_peer_gone(self, source: Incarnation) -> None:
        """A source is gone, and its blocks with it."""
        for key in [key for key, each in self._waiting.items() if each.source == source]:
            self.forget(key)

    def on_stopped(self, sender: Incarnation, key: HandoffKey) -> bool:
        """A source has answered; whether that was waited for."""
        farewell = self._waiting.get(key)
        if farewell is None or farewell.source != sender:
            return False
        self.forget(key)
        return True

    def tick(self) -> None:
        """Say again what has no answer, and give up what had none for too long."""
        now = self._clock()
        for key in self._alarms.ring(now):
            farewell = self._waiting[key]
            if farewell.give_up_at <= now:
                self._give_up(key)
                continue
            if is_due := farewell.retry_at <= now:
                farewell.retry_s = min(farewell.retry_s * 2, self._limits.beat_s)
                farewell.retry_at = now + farewell.retry_s
            self._alarms.set(key, min(farewell.retry_at, farewell.give_up_at))
            if is_due:
                self._speak(farewell)

    def next_deadline(self) -> float | None:
        """When `tick` next has something to do."""
        return self._alarms.next()

    def _give_up(self, key: HandoffKey) -> None:
        self.given_up_total += 1
        self.forget(key)

    def _speak(self, farewell: _Farewell) -> None:
        wanted = farewell.wanted
        if farewell.source is None:
            self._greet(wanted.source)
        else:
            self._control.send(farewell.source, Stop(wanted.key, 0, farewell.outcome, farewell.reason, wanted.prompt))
