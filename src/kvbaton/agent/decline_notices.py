"""Declines: a target notifies sources that a request for their hand-off is over, although no grant ever reached them.

Without a notice, a source would keep its blocks for a target that never fetches them. A notice is `Stop` without a grant. It
needs the source's card first (a handshake), and is repeated until it is answered or `transfer_timeout` has passed; after that
the source's own lease frees the blocks. A hand-off that had a grant needs no notice: its `Stop` is sent by the state machine.

What a source remembers of notices: the router sends a request to both instances at once. A target that refuses it may do so
before the source's engine has even admitted its half; without a memory of that, the source would compute a cache that no
target fetches and hold it for `defer_timeout`. A decline counts for one request only: when the same key is used again, by a
request that the target does take, an old decline must not end it. So each is used up when it ends something, and withdrawn
when the target shows interest again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvbaton.agent.card_requests import CardRequests, is_answer_after
from kvbaton.agent.engine_port import SourceRequest
from kvbaton.agent.ports import Clock, Control
from kvbaton.agent.timers import Backoff, Timers
from kvbaton.config import Limits
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.bounded import BoundedMap
from kvbaton.core.card import Card
from kvbaton.core.handoff import HandoffKey, Incarnation, Outcome, TransferId
from kvbaton.core.messages import MAX_REASON, Stop

__all__ = ["DeclineNotices", "DeclinedRequests"]

_MAX_REMEMBERED = 4096
_MAX_EXCEPT = 1024


@dataclass(slots=True)
class _Notice:
    request: SourceRequest
    outcome: Outcome
    reason: str
    source: Incarnation | None
    asked_before: int
    give_up_at: float
    retry: Backoff


class DeclineNotices:
    """At most `limit` notices that have no answer yet; beyond that the oldest is given up, and counted."""

    def __init__(self, limits: Limits, clock: Clock, control: Control, card_requests: CardRequests, limit: int = 4096) -> None:
        self._limits = limits
        self._clock = clock
        self._control = control
        self._card_requests = card_requests
        self._waiting: BoundedMap[HandoffKey, _Notice] = BoundedMap(limit, self._on_given_up)
        self._timers = Timers(limits, clock, self._look_at)
        self.given_up_total = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, request: SourceRequest, outcome: Outcome, reason: str, source: Incarnation | None) -> None:
        """Notify the source of `request`, at once if it is known as `source`; a later notice about the same key replaces this.

        Without a prompt a notice is about every hand-off of the transfer id; a later one that is about one prompt must not
        narrow that, or the other prompts of the request would be held until their lease ends.
        """
        earlier = self._waiting.get(request.key)
        if earlier is not None and not earlier.request.prompt:
            request = replace(request, prompt="")
        now = self._clock()
        notice = _Notice(
            request=request,
            outcome=outcome,
            reason=reason[:MAX_REASON],
            source=source,
            asked_before=self._card_requests.asked,
            give_up_at=now + self._limits.transfer_timeout,
            retry=Backoff.start(self._limits, now),
        )
        self._waiting[request.key] = notice
        self._timers.set(request.key, notice.retry.at)
        self._transmit(notice)

    def forget(self, key: HandoffKey) -> None:
        """Send no more about `key`: the notice was answered, or the key is in use again."""
        self._waiting.pop(key, None)
        self._timers.drop(key)

    def unanswered(self) -> set[ControlAddress]:
        """The addresses at which notices wait for a peer to show its card."""
        return {each.request.source for each in self._waiting.values() if each.source is None}

    def on_card(self, card: Card, address: ControlAddress, answers: int | None = None) -> None:
        """A peer has shown its card at `address`: notify it, unless another incarnation was meant.

        That one is gone if the card answers a question that was sent after the request came; else the card may be late.
        """
        for notice in [each for each in self._waiting.values() if each.source is None and each.request.source == address]:
            if notice.request.source_incarnation in (None, card.incarnation):
                notice.source = card.incarnation
                self._transmit(notice)
            elif is_answer_after(notice.asked_before, answers):
                self.forget(notice.request.key)
            else:
                self._card_requests.dial(address, after=notice.asked_before)

    def resend_to(self, source: Incarnation) -> None:
        """A source asks for our card: it has dropped what was sent before as coming from an unknown peer."""
        for notice in [each for each in self._waiting.values() if each.source == source]:
            self._transmit(notice)

    def on_refused_peer(self, address: ControlAddress, source: Incarnation | None = None) -> None:
        """The peer at `address` is not one of ours. One that has shown who it is gets each notice once: its engine may have
        the request, too, and would wait for us. None is repeated, because a refused peer owes no answer.
        """
        for notice in [each for each in self._waiting.values() if each.source is None and each.request.source == address]:
            self.forget(notice.request.key)
            if source is not None:
                notice.source = source
                self._transmit(notice)

    def on_peer_gone(self, source: Incarnation) -> None:
        """A source is gone, and its blocks with it."""
        for key in [key for key, each in self._waiting.items() if each.source == source]:
            self.forget(key)

    def on_stopped(self, sender: Incarnation, key: HandoffKey) -> bool:
        """A source has answered; whether a notice to it was waiting for that."""
        notice = self._waiting.get(key)
        if notice is None or notice.source != sender:
            return False
        self.forget(key)
        return True

    def tick(self) -> None:
        """Repeat what has no answer, and give up what had none for too long."""
        self._timers.tick()

    def next_deadline(self) -> float | None:
        """When `tick` next has something to do."""
        return self._timers.next_deadline()

    def _look_at(self, key: HandoffKey, now: float) -> None:
        notice = self._waiting[key]
        if notice.give_up_at <= now:
            self._on_given_up(key, self._waiting.pop(key))
            return
        if is_due := notice.retry.at <= now:
            notice.retry.double(now)
        self._timers.set(key, min(notice.retry.at, notice.give_up_at))
        if is_due:
            self._transmit(notice)

    def _on_given_up(self, key: HandoffKey, notice: _Notice) -> None:
        del notice
        self.given_up_total += 1
        self._timers.drop(key)

    def _transmit(self, notice: _Notice) -> None:
        request = notice.request
        if notice.source is None:
            self._card_requests.dial(request.source)
        else:
            stop = Stop(key=request.key, grant=0, outcome=notice.outcome, reason=notice.reason, prompt=request.prompt)
            self._control.send(notice.source, stop)


@dataclass(frozen=True, slots=True)
class _DeclineRecord:
    """Why, about which prompt (of one key), except for which keys (of a whole transfer id), and how long it counts."""

    reason: str
    until: float
    prompt: str = ""
    except_for: set[HandoffKey] = field(default_factory=set)


class DeclinedRequests:
    """Declines of single hand-offs, by key and prompt, and of whole requests, by transfer id."""

    def __init__(self) -> None:
        self._max_used = _MAX_EXCEPT
        self._single: BoundedMap[HandoffKey, _DeclineRecord] = BoundedMap(_MAX_REMEMBERED)
        self._whole: BoundedMap[TransferId, _DeclineRecord] = BoundedMap(_MAX_REMEMBERED)

    def add(self, key: HandoffKey, prompt: str, reason: str, until: float) -> None:
        """A target declined the hand-off `key` of this prompt."""
        self._single[key] = _DeclineRecord(reason, until, prompt)

    def add_whole(
        self, transfer_id: TransferId, reason: str, until: float, now: float, except_for: Iterable[HandoffKey]
    ) -> None:
        """A target declined every hand-off of a transfer id, present and future, but those in `except_for`.

        The keys that an earlier decline of the same id has used up stay used up: a notice is repeated until it is answered,
        and a repeated one must not end what was submitted anew in the meantime.
        """
        earlier = self._whole.get(transfer_id)
        used = set() if earlier is None or earlier.until < now else earlier.except_for
        self._whole[transfer_id] = _DeclineRecord(reason, until, except_for=used | set(except_for))

    def use_up(self, key: HandoffKey, prompt: str, now: float) -> str | None:
        """The reason why a target declined this hand-off, used up by asking; None when none did."""
        single, whole = self._single.get(key), self._whole.get(key.transfer_id)
        if single is not None and single.prompt == prompt and now <= single.until:
            del self._single[key]
            return single.reason
        if whole is not None and key not in whole.except_for and now <= whole.until and len(whole.except_for) < self._max_used:
            whole.except_for.add(key)
            return whole.reason
        return None

    def withdraw(self, key: HandoffKey) -> bool:
        """A target asks for `key` after all: what it declined does not count for `key` any more; whether it had."""
        single, whole = self._single.pop(key, None), self._whole.get(key.transfer_id)
        if whole is not None and len(whole.except_for) < self._max_used:
            whole.except_for.add(key)
        return single is not None or whole is not None
