"""What an instance keeps of its peers: of which one the card gives way, and that nothing waits for one that is gone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kvbaton.agent.coordinator import Coordinator, Peers
from kvbaton.agent.target import TargetSide
from kvbaton.config import Limits
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import Card
from kvbaton.core.handoff import Executor, HandoffKey, Incarnation
from kvbaton.core.lifecycle import SourceEvent, SourceState, TargetEvent, TargetState
from kvbaton.sim.world import World

__all__ = [
    "HASTE",
    "CardWatch",
    "DialWatch",
    "NoticeWatch",
    "QuestionWatch",
    "WatchedPeers",
    "address_problems",
    "beat_problems",
    "gone_problems",
    "source_problems",
    "watch_dials",
    "watch_gone",
    "watch_ticks",
]

HASTE = 0.4
"""How long, as a share of that of others, an instance in haste waits for a silent source."""

_SIGNS = 3
"""How many signs of life of its source a target may expect at least before it gives up."""

_STOOD_STILL = 1.5
"""After how many heartbeat intervals without a turn an instance has stood still, or its clock was set ahead."""

_CLOSING = frozenset({SourceState.STOPPING, TargetState.STOPPING, TargetState.REVOKING, TargetState.ISOLATED})


_FENCING = frozenset({TargetState.REVOKING, TargetState.ISOLATED})

_ASKING = _CLOSING | {TargetState.GRANTED, TargetState.CONFIRMING}


class WatchedPeers(Peers):
    """Cards of a few peers: when one gives way, it is that of the peer without hand-offs that was used longest ago."""

    def __init__(self, limit: int, coordinator: Coordinator, world: World) -> None:
        super().__init__(limit)
        self._coordinator = coordinator
        self._world = world
        self._uses = 0
        self._used: dict[Incarnation, int] = {}

    def card(self, incarnation: Incarnation) -> Card | None:
        """The card of a peer, which is used by that."""
        found = super().card(incarnation)
        if found is not None:
            self._use(incarnation)
        return found

    def learn(self, card: Card, address: ControlAddress | None, *, asked: int) -> Incarnation | None:
        """Remember a card."""
        self._use(card.incarnation)
        return super().learn(card, address, asked=asked)

    def make_room(self, busy: Collection[Incarnation]) -> Incarnation | None:
        """Forget one peer where there is no room for another, and look which one it is."""
        source, target = self._coordinator.source, self._coordinator.target
        live = {record.target for record in source.live.values()} | {record.source for record in target.live.values()}
        known = [each for each in self._cards if each not in live]
        forgotten = super().make_room(busy)
        if forgotten is not None and forgotten != min(known, key=lambda each: self._used[each], default=None):
            name = self._coordinator.card.incarnation
            self._world.find(
                "left alone", f"{name}: the card of {forgotten} gave way, and not one of {known}, used {self._used}"
            )
        return forgotten

    def _use(self, incarnation: Incarnation) -> None:
        self._uses += 1
        self._used[incarnation] = self._uses


def gone_problems(coordinator: Coordinator, gone: Collection[Incarnation]) -> Iterator[str]:
    """What an instance still wants of peers that are gone."""
    for record in coordinator.source.live.values():
        if record.target in gone and record.state not in _CLOSING:
            yield f"{record.key} is {record.state} for {record.target}, which is gone"
    fences = vars(coordinator.target)["_ranks"].fences_writers
    for target_record in coordinator.target.live.values():
        if target_record.source not in gone:
            continue
        # One that can be fenced is, and its blocks wait for that; no other proof of its quiet will come.
        is_fenced = fences and target_record.state in _FENCING and target_record.executor is Executor.SOURCE_WRITES
        if target_record.state not in _CLOSING or not (target_record.peer_is_quiet or is_fenced):
            yield f"{target_record.key} is {target_record.state}, and its source {target_record.source} is gone"
    for key, notice in vars(coordinator.target.decline_notices)["_waiting"].items():
        if notice.source in gone:
            yield f"{notice.source} is gone, and is to be notified about {key}"


class CardWatch:
    """Of every peer whose card is kept: the first one stays, it fits, and when that peer was first met at an address."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._peers = vars(vars(coordinator)["_peers"])
        self._model = coordinator.card.fingerprint
        self._kept_s = coordinator.card.defer_timeout
        self._asked_back = vars(coordinator.target.card_requests)["_asked_back_at"]
        self._cards: dict[Incarnation, Card] = {}
        self._at: dict[ControlAddress, Any] = {}

    def problems(self, gone: Collection[Incarnation]) -> Iterator[str]:
        """Cards that are not the first ones, do not fit, or are of peers that are gone; addresses of later questions."""
        cards, addresses = self._peers["_cards"], self._peers["_at"]
        for incarnation, card in cards.items():
            if self._cards.get(incarnation, card) is not card:
                yield f"the card of {incarnation} is another one than the first"
            if card.fingerprint != self._model:
                yield f"{incarnation} serves another model, and its card is kept"
            if card.transfer_timeout >= self._kept_s and all(each.incarnation != incarnation for each in addresses.values()):
                yield f"{incarnation} was not dialled, so it is a target; it waits for longer than anything is kept for it"
            if incarnation in self._asked_back:
                yield f"the card of {incarnation} has come, and still counts as asked for"
            if incarnation in gone:
                yield f"{incarnation} is gone, and its card is kept"
        for address, resident in addresses.items():
            before = self._at.get(address, resident)
            if before.incarnation == resident.incarnation and before.asked != resident.asked:
                yield f"{resident.incarnation} is at {address} since question {before.asked}, and not {resident.asked}"
        self._cards, self._at = dict(cards), dict(addresses)


def watch_gone(coordinator: Coordinator, find: Callable[[str, str], None]) -> None:
    """From now on report each hand-off of another peer that ends with one that is gone."""
    source = coordinator.source
    call = source.on_peer_gone

    def watched(target: Incarnation, reason: str) -> None:
        others = [(record, record.state) for record in source.live.values() if record.target != target]
        call(target, reason)
        for record, state in others:
            if record.state is not state:
                find("left alone", f"{record.key} of {record.target} is {record.state}, because {target} is gone")

    vars(source)["on_peer_gone"] = watched


def watch_ticks(coordinator: Coordinator, find: Callable[[str, str], None]) -> None:
    """From now on report each peer that is given up for its silence while frames wait to be read: it may be one of its own."""
    source, target, tick = coordinator.source, coordinator.target, coordinator.tick

    def given_up() -> int:
        return source.failures_total[SourceEvent.LEASE_OUT] + target.failures_total[TargetEvent.NO_PROGRESS]

    def alarms() -> list[dict[HandoffKey, float]]:
        return [dict(vars(each)["_timers"].times) for each in (source, target, target.decline_notices)]

    def watched(*, is_behind: bool = False) -> None:
        # What dead peers had to do with us ends at once, behind or not, and its alarms go with it.
        is_still = is_behind and vars(coordinator)["_clock"]() < vars(coordinator)["_gone_check_at"]
        before, rung = given_up(), alarms() if is_still else []
        tick(is_behind=is_behind)
        if is_behind and (given_up() > before or (is_still and alarms() != rung)):
            find("on time", "frames wait to be read, and alarms ring")

    vars(coordinator)["tick"] = watched


def source_problems(coordinator: Coordinator) -> Iterator[str]:
    """Targets that wait for another source than their request names."""
    for record in coordinator.target.live.values():
        named = record.request.source_incarnation
        if named is not None and record.source not in (None, named):
            yield f"{record.key} is to come from {named}, and waits for {record.source}"


def address_problems(coordinator: Coordinator) -> Iterator[str]:
    """Addresses that lead to a peer which is forgotten: its successor there would count as one that replaces it."""
    peers = vars(vars(coordinator)["_peers"])
    for address, resident in peers["_at"].items():
        if resident.incarnation not in peers["_cards"]:
            yield f"{address} leads to {resident.incarnation}, whose card is not kept"


def beat_problems(coordinator: Coordinator) -> Iterator[str]:
    """Targets with a grant that would give up before their source shows a few times that it lives."""
    cards, interval_s = vars(vars(coordinator)["_peers"])["_cards"], coordinator.beat_interval_s
    for record in coordinator.source.live.values():
        if record.grant is None or record.state in (SourceState.PARKED, SourceState.STOPPING):
            continue
        card = cards.get(record.target)
        if card is not None and _SIGNS * interval_s > card.transfer_timeout:
            yield f"{record.target} waits for {card.transfer_timeout} s, and heartbeats are sent every {interval_s} s"


class DialWatch:
    """Of every address that an instance dials: when nothing waits for its answer any more, it is hung up on."""

    def __init__(self, coordinator: Coordinator, limits: Limits) -> None:
        self._target = coordinator.target
        self._dialled = vars(coordinator.target.card_requests)["_dialled"]
        self._notices = vars(coordinator.target.decline_notices)["_waiting"]
        self._patient_s = 2 * limits.retry
        self._still_s = _STOOD_STILL * limits.beat_s
        self._idle_since: dict[str, float] = {}
        self._looked_at = 0.0

    def problems(self, now: float, unanswered: Collection[str]) -> Iterable[str]:
        """Dials that go on for nothing: of addresses that count as dialled, or where none has answered since they were."""
        is_dialling = self._dialled or unanswered
        if self._idle_since and (now - self._looked_at > self._still_s or not is_dialling):
            self._idle_since.clear()
        self._looked_at = now
        return self._for_nothing(now, unanswered) if is_dialling else ()

    def _for_nothing(self, now: float, unanswered: Collection[str]) -> Iterator[str]:
        waiting = {record.request.source for record in self._target.live.values() if record.source is None}
        waiting |= {each.request.source for each in self._notices.values() if each.source is None}
        hosts = {each.host for each in self._dialled}.union(unanswered) - {each.host for each in waiting}
        self._idle_since = {each: self._idle_since.get(each, now) for each in hosts}
        for address, since in self._idle_since.items():
            if now - since > self._patient_s:
                yield f"{address} is dialled for {now - since:.3f} s, and nothing waits for it"


def watch_dials(target: TargetSide, retry_s: float, clock: Callable[[], float], find: Callable[[str, str], None]) -> None:
    """From now on report each question for a card that is asked for nothing, or although an earlier one does; and each that
    is not asked.
    """
    requests = target.card_requests
    dial, dialled = requests.dial, vars(requests)["_dialled"]

    def watched(address: ControlAddress, after: int = 0) -> None:
        earlier, asked = dialled.get(address), requests.asked
        does = earlier is not None and after < earlier.question and clock() - earlier.at < retry_s / 2
        dial(address, after)
        waiting = {record.request.source for record in target.live.values() if record.source is None}
        if requests.asked > asked and not after and address not in waiting | target.decline_notices.unanswered():
            find("no needless message", f"{address} is dialled, and nothing waits for it")
        if does and requests.asked > asked:
            find("no needless message", f"{address} is dialled again after question {after}, although it was: {earlier}")
        elif not does and requests.asked == asked:
            find("taken", f"{address} is not asked again after question {after}: {earlier}")

    vars(requests)["dial"] = watched


class QuestionWatch:
    """Of every target with a grant that waits for an answer: it asks again, unless its source is answering others."""

    def __init__(self, coordinator: Coordinator, limits: Limits) -> None:
        self._live = coordinator.target.live
        self._patient_s = 2 * limits.beat_s * 1.05 + limits.retry
        self._still_s = _STOOD_STILL * limits.beat_s
        self._asked_at: dict[HandoffKey, float] = {}
        self._awaited_since: dict[tuple[HandoffKey, int, int], float] = {}
        """By key, grant and generation: since when everything is in but a stamp that waits for checksums."""
        self._received_at: dict[Incarnation, float] = {}
        self._looked_at = self._since = 0.0

    def asked(self, key: HandoffKey, now: float) -> None:
        """Something was sent that expects an answer."""
        self._asked_at[key] = now

    def received(self, source: Incarnation, now: float) -> None:
        """A source has sent something."""
        self._received_at[source] = now

    def problems(self, now: float) -> Iterable[str]:
        """Questions that are not repeated."""
        if now - self._looked_at > self._still_s:
            self._since = now
        self._looked_at = now
        return self._not_repeated(now) if self._live else ()

    def _not_repeated(self, now: float) -> Iterator[str]:
        for key, record in self._live.items():
            if record.state in _ASKING and record.grant and record.source is not None:
                last = max(self._asked_at.get(key, now), self._received_at.get(record.source, 0.0), self._since)
                if record.sums_follow:
                    # It is asked about what does not come by itself.
                    last = max(last, self._awaited_since.setdefault((key, record.grant, record.generation), now))
                if now - last > self._patient_s:
                    yield f"{key} is {record.state}, and for {now - last:.3f} s its source is not asked again"


@dataclass(slots=True)
class _SeenNotice:
    """A notice, whose place in memory no other one takes meanwhile; since when it is there, and when it was last sent.

    Both bounds are counted from what suits the instance: it may not give up early, however long it stood still, and what is
    overdue when it goes on is not late.
    """

    notice: Any
    since: float
    late_from: float
    sent_at: float


class NoticeWatch:
    """Of every decline notice of an instance: it is repeated, and stays until it is answered or `transfer_timeout` is over."""

    def __init__(self, coordinator: Coordinator, limits: Limits) -> None:
        self._waiting = vars(coordinator.target.decline_notices)["_waiting"]
        self._limits = limits
        self._seen: dict[HandoffKey, _SeenNotice] = {}
        self._settled: set[HandoffKey] = set()
        self._looked_at = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether there is no notice, and was none."""
        return not self._seen and not self._waiting

    def sent(self, key: HandoffKey, now: float) -> None:
        """A notice was sent, or its source is being looked for."""
        if (seen := self._seen.get(key)) is not None:
            seen.sent_at = now

    def settled(self, key: HandoffKey) -> None:
        """Whatever comes of it now is right: it was answered, or the key is in use again."""
        self._settled.add(key)

    def settled_at(self, address: ControlAddress) -> None:
        """Likewise all that wait for the peer at an address, from which a card or a refusal has come."""
        self._settled |= {key for key, each in self._waiting.items() if each.request.source == address}

    def problems(self, now: float, gone: Collection[Incarnation]) -> Iterator[str]:
        """What is wrong with the notices that there are, or were when this was last asked."""
        early_s, late_s = self._limits.transfer_timeout * 0.98, self._limits.transfer_timeout * 1.05 + 0.1
        if now - self._looked_at > _STOOD_STILL * self._limits.beat_s:
            self._seen = {key: replace(seen, late_from=now, sent_at=now) for key, seen in self._seen.items()}
        self._looked_at = now
        for key, seen in list(self._seen.items()):
            notice, source = self._waiting.get(key), getattr(seen.notice, "source", None)
            if notice is seen.notice:
                if now - seen.late_from > late_s:
                    yield f"the notice about {key} is repeated for ever"
                if source is not None and now - seen.sent_at > self._limits.beat_s * 1.05 + 0.05:
                    yield f"the notice about {key} is not repeated"
                continue
            if notice is not None and notice.request.prompt and not seen.notice.request.prompt:
                yield f"what was declined of {key} was everything, and is {notice.request.prompt!r} alone"
            if key not in self._settled and notice is None and source not in gone and now - seen.since < early_s:
                yield f"the notice about {key} was given up after {now - seen.since:.3f} s"
            del self._seen[key]
        for key, notice in self._waiting.items():
            if key not in self._seen:
                self._seen[key] = _SeenNotice(notice, now, now, now)
        self._settled.clear()
