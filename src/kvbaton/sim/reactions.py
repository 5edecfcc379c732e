"""What a message has to bring about at once, and what it must leave alone.

Every message is about one grant of one peer, and mostly about one generation. If that is the grant, the peer and the generation
in hand, what the message states counts before the next event; if not, the hand-off is as it was before. Both are worked out
here from the records alone, without the guards of the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.source import SourceRecord
from kvbaton.agent.target import TargetRecord
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.grants import REACH, GrantWindows, next_sequence
from kvbaton.core.handoff import (
    AuxChannel,
    Executor,
    HandoffKey,
    Incarnation,
    Integrity,
    Mode,
    Outcome,
    TransferId,
    key_problem,
)
from kvbaton.core.lifecycle import SourceState, TargetEvent, TargetState
from kvbaton.core.messages import (
    MAX_NUMBER,
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
from kvbaton.sim.card_reactions import LEFT_ALONE, TAKEN, Broken, CardReactions, Check

__all__ = ["Reactions", "source_place", "target_place"]

_CLOSING = frozenset({TargetState.STOPPING, TargetState.REVOKING, TargetState.ISOLATED})
_UNANSWERED = frozenset({TargetState.QUEUED, TargetState.HANDSHAKING, TargetState.GRANTED})
_RENEWED = frozenset({TargetState.GRANTED, TargetState.FILLING})
_OVERDUE = _CLOSING | {TargetState.CLEARING, TargetState.CONFIRMING}
"""Where our ranks or an answer are waited for, and a sign of life of the source is neither."""

_EARLY = frozenset({SourceState.PARKED, SourceState.QUEUED, SourceState.HELD})
_SMALL_S = 1e-6

_MOST_STALE = 8
"""How many numbers in a row a source may refuse."""

NEEDLESS = "no needless message"

SourceMessage = Announced | Prefilled | AuxSent | Retracted | Confirmed | Refused | Over | Stopped


def _nothing(sent: list[Message]) -> Broken:
    del sent
    return None


def _has(sent: list[Message], kind: type[Message], key: HandoffKey) -> bool:
    return any(isinstance(each, kind) and getattr(each, "key", None) == key for each in sent)


def _of_other_grants(sent: list[Message], key: HandoffKey, *grants: int) -> list[Over]:
    """Ends of a hand-off that are reported for other grants than those that its target may ask about."""
    return [each for each in sent if isinstance(each, Over) and each.key == key and each.grant not in grants]


def _is_refused(sent: list[Message], key: HandoffKey) -> bool:
    """Whether a hand-off was refused, and not only the number of a grant."""
    return any(isinstance(each, Refused) and each.key == key and not each.stale for each in sent)


def _ended_by(stop: Stop) -> Outcome:
    """How a source ends that is stopped: never as delivered, whatever its target claims."""
    return Outcome.FAILED if stop.outcome is Outcome.DELIVERED else stop.outcome


def source_place(record: SourceRecord | None) -> tuple[object, ...]:
    """Where a hand-off stands at its source; a message that is about another one leaves it there."""
    if record is None:
        return ()
    flags = (record.is_asked, record.is_confirmed, record.stop_asked, record.superseded_by, record.is_released)
    return record.state, record.target, record.grant_number, record.generation, len(record.spans), record.lease_until, *flags


def target_place(record: TargetRecord | None) -> tuple[object, ...]:
    """Where it stands at its target."""
    if record is None:
        return ()
    counts = (len(record.spans), record.span_count, len(record.source_sums), len(record.open_copies))
    flags = (record.aux is None, record.aux_pointer is None, record.is_confirmed, record.peer_is_quiet, record.sums_follow)
    kept = (record.give_up_at, record.early_confirmed)
    return record.state, record.source, record.grant, record.generation, *kept, *counts, *flags


def _stands(record: TargetRecord) -> tuple[object, ...]:
    """How far it has got: as long as this is the same, no message of its source but a heartbeat renews a deadline."""
    moved = sum(map(len, record.moved.values()))
    counts = (moved, len(record.sums), record.arrived_bytes)
    return record.state, record.generation, record.span_count is None, *counts, record.aux is None


def _is_proof(refused: Refused, sequence: int) -> bool:
    """Whether a source that refuses number `sequence` cannot have taken it."""
    return not refused.stale or refused.sequence > 0 or sequence > refused.used_up_to + REACH


class Reactions:
    """What one instance has to make of the messages that it gets."""

    def __init__(
        self, coordinator: Coordinator, clock: Callable[[], float], everything_sent: list[tuple[str, Message]]
    ) -> None:
        self._coordinator = coordinator
        self._source, self._target = coordinator.source, coordinator.target
        self._clock = clock
        self._limits = vars(coordinator)["_limits"]
        self._ranks = len(coordinator.card.ranks)
        self._asked_back_at: dict[Incarnation, float] = {}
        """When each peer that is not known was last asked for its card."""
        self._cards = CardReactions(coordinator, self._asked_back_at, everything_sent)
        self._declined: set[TransferId] = set()
        """What was ever declined here: such a hand-off may be asked for again, and its earlier end is no answer then."""
        self._refused_at: dict[HandoffKey, float] = {}
        """When the engine has refused each request of which no grant has arrived yet."""
        self._declined_at: dict[tuple[HandoffKey | TransferId, str], float] = {}
        """When a target last declined each hand-off with its prompt, or each request as a whole."""
        self._used_up: set[tuple[HandoffKey, float]] = set()
        """What has ended at once, and when it was declined: one notice ends one request of each key."""
        self._numbers: set[tuple[Incarnation, int]] = set()
        """Of every target the numbers in sequence of the grants and stops that have come."""
        self._superseding: list[tuple[SourceRecord, Incarnation, Grant]] = []
        """Grants that wait for the end of an earlier one of their target."""
        self._by_message: set[tuple[Incarnation, HandoffKey, int]] = set()
        """Target, key and grant of the aux records that were asked for in a message, after all or from the start."""

    def expect(self, envelope: Envelope, via: ControlAddress | None) -> Check:
        """What has to hold when a frame that has just arrived was handled; `via` is the address that was dialled for it."""
        sender, message = envelope.sender, envelope.message
        is_for_us = envelope.recipient in ("", self._coordinator.card.incarnation)
        if isinstance(message, Stop) and is_for_us:
            self._note_decline(message)
        if isinstance(message, Hello) and is_for_us:
            is_own = message.card.incarnation == sender
            return self._cards.on_card(sender, message, via) if is_own else self._cards.on_card_of_another(sender, message)
        if isinstance(message, Refused) and message.key is None and is_for_us:
            return self._cards.on_refusal(via, sender)
        if not is_for_us or not self._is_known(sender):
            is_decline = is_for_us and isinstance(message, Stop) and not message.grant
            if is_decline and isinstance(message, Stop) and sender in vars(self._coordinator)["_refused_peers"]:
                # What it declines need not wait for it, although its card does not fit.
                return self._on_stop(sender, message) if message.prompt else self._on_whole(sender, message)
            return self._asked_back(sender, message, is_for_us)
        match message:
            case Grant():
                return self._on_grant(sender, message)
            case ConfirmAsk():
                return self._on_confirm_ask(sender, message)
            case Release():
                return self._on_release(sender, message)
            case Stop():
                return self._on_stop(sender, message) if message.grant or message.prompt else self._on_whole(sender, message)
            case Heartbeat():
                return self._on_source_beat(sender, message) if message.from_source else self._on_target_beat(sender, message)
            case Hello():
                return _nothing
            case _:
                return self._on_source_message(sender, message)

    def _is_known(self, peer: Incarnation) -> bool:
        return peer in vars(vars(self._coordinator)["_peers"])["_cards"]

    def _asked_back(self, sender: Incarnation, message: Message, is_for_us: bool) -> Check:
        """From a peer that is not known, or for another incarnation: the card is sent, and nothing else is done.

        A peer is not asked for its card by each of its frames: it answers with everything that it waits for.
        """
        key, now = getattr(message, "key", None), self._clock()
        unchanged = _nothing if key is None else self._unchanged(key, message)
        is_asked = is_for_us and now - self._asked_back_at.get(sender, -math.inf) < self._limits.retry / 2
        if is_for_us and not is_asked:
            self._asked_back_at[sender] = now

        def check(sent: list[Message]) -> Broken:
            has_card = any(isinstance(each, Hello) for each in sent)
            if has_card and is_asked:
                return NEEDLESS, f"{sender} is asked for its card again by {message}"
            if not has_card and not is_asked:
                return TAKEN, f"no card was sent in answer to {message}"
            return unchanged(sent)

        return check

    def _unchanged(self, key: HandoffKey, message: object) -> Check:
        before = source_place(self._source.live.get(key)), target_place(self._target.live.get(key))

        def check(sent: list[Message]) -> Broken:
            del sent
            after = source_place(self._source.live.get(key)), target_place(self._target.live.get(key))
            return None if after == before else (LEFT_ALONE, f"{before} became {after} by {message}")

        return check

    # At a source.

    def refused(self, key: HandoffKey) -> None:
        """The engine has refused a request before it was admitted, and so one grant for it, too."""
        self._refused_at[key] = self._clock()

    def admitted(self, key: HandoffKey, prompt: str, *, is_declined: bool) -> str:
        """The engine has taken a request up, or that has ended at once; what is wrong with that."""
        if key_problem(key):
            return ""
        self._refused_at.pop(key, None)
        if key in vars(self._source)["_refused_here"]:
            return f"{key} is taken up, and the next grant for it would be refused"
        notices = ((key, prompt), (key.transfer_id, ""))
        declined_at = max(self._declined_at.get(each, -math.inf) for each in notices)
        if is_declined and self._clock() - declined_at > self._limits.defer_timeout + _SMALL_S:
            return f"{key} ends at once, and no target has declined this prompt of it, or not lately"
        if is_declined and (key, declined_at) in self._used_up:
            return f"{key} ends at once, for the second time by one notice"
        self._used_up |= {(key, declined_at)} if is_declined else set()
        return ""

    def _note_decline(self, stop: Stop) -> None:
        """A target declines a prompt, or all of a transfer id."""
        record = self._source.live.get(stop.key)
        if not stop.grant and not stop.prompt:
            self._declined_at[stop.key.transfer_id, ""] = self._clock()
        elif not stop.grant:
            self._declined_at[stop.key, stop.prompt] = self._clock()
        if record is not None and record.state is SourceState.PARKED:
            self._declined_at[stop.key, record.prompt] = self._clock()

    def sent(self, recipient: str, message: Message) -> None:
        """Something is sent: it may be the answer that a grant waits for."""
        if self._superseding and isinstance(message, Refused | Over):
            self._superseding = [
                (record, target, grant)
                for record, target, grant in self._superseding
                if (target, grant.key, grant.grant) != (recipient, message.key, message.grant)
            ]

    def unanswered(self) -> str:
        """A grant that has waited for the end of an earlier one, and got no answer with it."""
        over = [grant for record, _, grant in self._superseding if self._source.live.get(grant.key) is not record]
        if over:
            self._superseding = [each for each in self._superseding if each[2] not in over]
        return f"an earlier grant has ended, and that is not the answer to {over[0]}" if over else ""

    @property
    def _source_windows(self) -> GrantWindows:
        windows: GrantWindows = vars(self._source)["_windows"]
        return windows

    def _declines_of(self, key: HandoffKey) -> tuple[Any, Any]:
        """What is remembered of declines that is about this hand-off."""
        declined = vars(vars(self._source)["_declined"])
        return declined["_single"].get(key), declined["_whole"].get(key.transfer_id)

    def _is_declined(self, key: HandoffKey) -> bool:
        """Whether the next request of this hand-off would end because a target has declined it."""
        single, whole = self._declines_of(key)
        return single is not None or (whole is not None and self._has_room(whole) and key not in whole.except_for)

    def _has_room(self, whole: Any) -> bool:
        """Whether one more can be excepted from the decline of a whole request; if not, it does not end one more either."""
        most: int = vars(vars(self._source)["_declined"])["_max_used"]
        return len(whole.except_for) < most

    def _owned(self, sender: Incarnation, key: HandoffKey, grant: int) -> SourceRecord | None:
        record = self._source.live.get(key)
        return record if record is not None and record.target == sender and record.grant_number == grant else None

    def _on_grant(self, sender: Incarnation, grant: Grant) -> Check:
        """Taken up, or answered. One that is repeated has everything sent again; one of another target disturbs no other."""
        self._numbers.add((sender, grant.sequence))
        if grant.aux_channel is AuxChannel.CONTROL:
            self._by_message.add((sender, grant.key, grant.grant))
        if (record := self._owned(sender, grant.key, grant.grant)) is not None:
            return self._on_grant_again(sender, record, grant)
        record = self._source.live.get(grant.key)
        is_over = (sender, grant.key, grant.grant) in self._source.ends()
        refused_s = self._clock() - self._refused_at.get(grant.key, -math.inf)
        is_refused = record is None and refused_s < self._limits.defer_timeout - _SMALL_S
        may_be_refused = refused_s < self._limits.defer_timeout + _SMALL_S
        of_before = 0 if record is None else record.grant_number
        is_foreign = record is not None and record.grant is not None and record.target != sender
        claimed_by = None if record is None or record.grant is not None else record.target
        unchanged = self._unchanged(grant.key, grant) if is_foreign else _nothing
        is_full = sum(each.state is SourceState.PARKED for each in self._source.live.values()) >= self._source.most_parked

        def check(sent: list[Message]) -> Broken:
            now = self._source.live.get(grant.key)
            is_held = self._owned(sender, grant.key, grant.grant) is not None
            is_kept = now is not None and now.superseded_by == grant
            answers = [each for each in sent if getattr(each, "key", None) == grant.key]
            if not is_held and not is_kept and all(getattr(each, "grant", 0) != grant.grant for each in answers):
                return TAKEN, f"neither taken up nor answered: {grant}"
            if is_over and not is_held and not is_kept and not _has(sent, Over, grant.key):
                return TAKEN, f"it has ended here, and that is not the answer to {grant}"
            is_answered = any(isinstance(each, Refused) and each.grant == grant.grant for each in answers)
            if is_kept and now is not None and not is_answered:
                self._superseding.append((now, sender, grant))
            is_used = record is None and not is_over and not any(isinstance(each, Refused) and each.stale for each in sent)
            if is_used:
                self._refused_at.pop(grant.key, None)
            if is_used and not may_be_refused and _has(sent, Over, grant.key):
                return TAKEN, f"its engine has not refused it, and nothing of it has ended here: {grant}"
            if foreign := _of_other_grants(sent, grant.key, grant.grant, of_before):
                return LEFT_ALONE, f"{foreign} is no answer to {grant}"
            if now is not None and now is not record and now.state is SourceState.PARKED and grant.mode is Mode.PULL:
                return TAKEN, f"in pull the prefill comes first, and this one is over: {grant}"
            if is_full and now is not None and now is not record:
                return TAKEN, f"as many grants as may wait for their prefill did already: {grant}"
            is_crowded = any(isinstance(each, Refused) and "wait for their prefill" in each.reason for each in answers)
            if is_crowded and not is_full:
                return TAKEN, f"more grants may wait for their prefill, and it is refused: {grant}"
            if is_refused and is_held:
                return TAKEN, f"its engine has refused the request of {grant}"
            if self._is_declined(grant.key):
                return TAKEN, f"it is asked for, and still counts as declined: {grant}"
            is_going_on = now is not None and now is record and now.state is not SourceState.STOPPING
            is_second = record is not None and record.grant is not None and record.prompt == grant.prompt and not is_foreign
            if is_going_on and is_second and _is_refused(sent, grant.key):
                return TAKEN, f"refused, although an earlier grant of that target goes on: {grant}"
            if now is not None and now.grant is None and now.target == sender and _is_refused(sent, grant.key):
                return LEFT_ALONE, f"{grant} is refused, and still {sender} counts as the target"
            is_claimed = now is record and claimed_by not in (None, sender) and _is_refused(sent, grant.key)
            if is_claimed and now is not None and now.target != claimed_by:
                return LEFT_ALONE, f"{grant} is refused, and {claimed_by}, which waits for it, counts no more as the target"
            return unchanged(sent)

        return check

    def _on_grant_again(self, sender: Incarnation, record: SourceRecord, grant: Grant) -> Check:
        state, numbers, lease_until = record.state, {span.number for span in record.spans}, record.lease_until
        is_by_message = (sender, grant.key, grant.grant) in self._by_message
        kinds: list[type[Message]] = []
        if state is SourceState.SERVING:
            kinds = [Prefilled, AuxSent, *([Confirmed] if record.is_confirmed and record.writes else [])]
        elif state is SourceState.RETRACTING:
            kinds, numbers = [Retracted], set()
        elif state is not SourceState.STREAMING:
            numbers = set()

        def check(sent: list[Message]) -> Broken:
            announced = {span.number for each in sent if isinstance(each, Announced) for span in each.spans}
            missing = [kind.__name__ for kind in kinds if not _has(sent, kind, grant.key)]
            if missing or not announced >= numbers:
                return TAKEN, f"{state}: {missing} and spans {sorted(numbers - announced)} were not sent again for {grant}"
            if is_by_message and any(isinstance(each, AuxSent) and each.pointer is not None for each in sent):
                return TAKEN, f"the aux record was asked for in a message, and that is forgotten with {grant}"
            if not record.writes and _has(sent, Confirmed, grant.key):
                return NEEDLESS, f"confirmed, although nothing was asked by {grant}"
            if record.lease_until != lease_until:
                return LEFT_ALONE, f"the lease is extended by {grant}, which agents repeat whatever their engine does"
            return None

        return check

    def _on_confirm_ask(self, sender: Incarnation, ask: ConfirmAsk) -> Check:
        record = self._owned(sender, ask.key, ask.grant)
        if record is None:
            unchanged = self._unchanged(ask.key, ask)

            def answered(sent: list[Message]) -> Broken:
                if foreign := _of_other_grants(sent, ask.key, ask.grant):
                    return LEFT_ALONE, f"{foreign} is no answer to {ask}"
                return unchanged(sent) if _has(sent, Over, ask.key) else (TAKEN, f"not answered: {ask}")

            return answered
        if record.generation != ask.generation:
            return lambda sent: None if _has(sent, Retracted, ask.key) else (TAKEN, f"not answered: {ask}")
        everything = self._ranks * len(record.spans)
        is_summed = record.integrity is Integrity.OFF or len(record.sums) == everything
        is_moved = is_summed and sum(map(len, record.moved.values())) == everything
        if record.state is not SourceState.SERVING or (record.writes and not is_moved):
            return _nothing

        def check(sent: list[Message]) -> Broken:
            is_taken = _has(sent, Confirmed, ask.key) if is_summed else record.is_asked
            if is_taken and record.lease_until < self._clock() + self._limits.defer_timeout - _SMALL_S:
                return TAKEN, f"the lease is not extended by {ask}"
            return None if is_taken else (TAKEN, f"not answered, and not kept until all is summed: {ask}")

        return check

    def _on_release(self, sender: Incarnation, release: Release) -> Check:
        record = self._owned(sender, release.key, release.grant)
        has_seen = record is not None and record.stamp is not None and record.stamp.value == release.stamp
        if record is None or not (record.is_confirmed or has_seen):
            return self._unchanged(release.key, release)
        is_serving = record.state is SourceState.SERVING
        is_again, late = record.is_released, self._source.late_total["release"]

        def check(sent: list[Message]) -> Broken:
            del sent
            if is_again and self._source.late_total["release"] == late:
                return TAKEN, f"for the second time, and not counted as late: {release}"
            # One whose own copies were not acknowledged yet ends when they are.
            is_kept = is_serving and self._source.live.get(release.key) is record and not record.is_released
            return (TAKEN, f"still {record.state} after {release}") if is_kept else None

        return check

    def _on_stop(self, sender: Incarnation, stop: Stop) -> Check:
        """What holds the grant ends, or what has none yet. Whatever it was about, it is answered when all is quiet."""
        record = self._source.live.get(stop.key)
        if not stop.grant or (record is not None and record.state is SourceState.PARKED):
            self._declined.add(stop.key.transfer_id)
        is_ours = record is not None and record.target in (None, sender)
        is_meant = is_ours and record is not None and self._is_meant(record, stop)
        # Without a grant in hand: the stop may have overtaken the very grant, or come again after it was used up.
        is_open = is_ours and record is not None and record.grant is None and stop.grant > 0
        windows = vars(self._source_windows)["_windows"]
        has_window = sender in windows
        used_up_to, reach = self._source_windows.used_up_to(sender), self._source_windows.reach
        is_seen = (sender, stop.sequence) in self._numbers
        is_overtaking = is_open and not is_seen and used_up_to < stop.sequence <= used_up_to + reach
        # Where few targets are remembered, the numbers of one may have been forgotten, and count once more.
        is_repeated = is_open and is_seen and has_window and len(windows) < vars(windows)["_limit"]
        self._numbers |= {(sender, stop.sequence)} if stop.grant else set()
        unchanged = _nothing if is_meant or (is_open and not is_repeated) else self._unchanged(stop.key, stop)
        declined = self._declines_of(stop.key)
        is_new = is_meant and record is not None and record.state is not SourceState.STOPPING
        # Of a grant that is parked the engine's own request is yet to come, unless that is over already.
        ends = self._source.ends()
        is_to_come = is_new and record is not None and not record.is_expected
        is_past = (sender, stop.key, 0) in ends or (None, stop.key, 0) in ends
        is_to_come = is_to_come and not is_past
        is_past = is_past and (record is None or record.state is SourceState.PARKED)

        def check(sent: list[Message]) -> Broken:
            if is_new and record is not None and record.verdict is not _ended_by(stop):
                return "named end", f"it ends as {record.verdict} because of {stop}"
            if not stop.grant and not has_window and sender in windows:
                return LEFT_ALONE, f"a peer that has granted nothing is remembered because of {stop}"
            if record is not None and not is_meant and not is_open and self._declines_of(stop.key) != declined:
                return LEFT_ALONE, f"it goes on, and the next one would end because of {stop}"
            if is_past and self._declines_of(stop.key) != declined:
                return LEFT_ALONE, f"it has ended here before, and the next one would end because of {stop}"
            now = self._source.live.get(stop.key)
            is_ending = now is not None and now.state is SourceState.STOPPING
            if is_meant and now is record and not is_ending:
                return TAKEN, f"still live after {stop}"
            if is_overtaking and now is record and not is_ending:
                return TAKEN, f"its grant is on its way, and void: it waits for that in spite of {stop}"
            is_ahead = stop.sequence > self._source_windows.used_up_to(sender)
            if not _has(sent, Stopped, stop.key) and not is_ending and not is_ahead:
                return TAKEN, f"not answered: {stop}"
            if _has(sent, Stopped, stop.key) and is_ahead and not is_meant:
                return LEFT_ALONE, f"answered, although the grant of that number could still be taken: {stop}"
            if is_to_come and not self._is_declined(stop.key):
                return TAKEN, f"what is yet to come would wait for a target in spite of {stop}"
            return unchanged(sent)

        return check

    def _is_meant(self, record: SourceRecord, stop: Stop) -> bool:
        if stop.grant:
            return record.grant_number == stop.grant
        return record.state in _EARLY and stop.prompt in ("", record.prompt)

    def _on_whole(self, sender: Incarnation, stop: Stop) -> Check:
        """Whatever of the transfer id has no grant yet ends; what has one goes on."""
        self._declined.add(stop.key.transfer_id)
        alike = [record for key, record in self._source.live.items() if key.transfer_id == stop.key.transfer_id]
        ended = [each for each in alike if each.target in (None, sender) and self._is_meant(each, stop)]
        going_on = [each.key for each in self._source.live.values() if all(each is not other for other in ended)]
        unchanged = [self._unchanged(key, stop) for key in going_on]
        # What ends now has had its turn. Of a grant that is parked the engine's own request is yet to come.
        used_up = {each.key for each in ended if each.is_expected}
        used_up |= {key for _, key, _ in self._source.ends() if key.transfer_id == stop.key.transfer_id}
        # A notice that is repeated spares what an earlier one has ended, or what was asked for since.
        earlier = self._declines_of(stop.key)[1]
        spared = frozenset() if earlier is None else frozenset(earlier.except_for)
        to_come = {each.key for each in ended if not each.is_expected} - used_up - spared

        def check(sent: list[Message]) -> Broken:
            if not _has(sent, Stopped, stop.key):
                return TAKEN, f"not answered: {stop}"
            kept = self._declines_of(stop.key)[1]
            if kept is not None and any(key.transfer_id != stop.key.transfer_id for key in kept.except_for):
                return LEFT_ALONE, f"what is remembered of {stop} is about other requests: {kept}"
            if any(map(self._is_declined, used_up)):
                return LEFT_ALONE, f"of {used_up} what comes next would end because of {stop}"
            if not all(map(self._is_declined, to_come)) and (kept is None or self._has_room(kept)):
                return TAKEN, f"of {to_come} what is yet to come would wait for a target in spite of {stop}"
            for each in ended:
                if each.verdict is not _ended_by(stop):
                    return "named end", f"{each.key} ends as {each.verdict} because of {stop}"
                if self._source.live.get(each.key) is each and each.state is not SourceState.STOPPING:
                    return TAKEN, f"{each.key} is still {each.state} after {stop}"
            return next(filter(None, (each(sent) for each in unchanged)), None)

        return check

    def _on_target_beat(self, sender: Incarnation, beat: Heartbeat) -> Check:
        """What the target waits for lives on, what another one has is not touched, and an end is notified again.

        Without a grant, a target has only claimed it: then every target that waits keeps it alive, and its owner stays.
        """
        others: list[Check] = []
        claimed: list[tuple[SourceRecord, Incarnation | None]] = []
        over: list[HandoffKey] = []
        renewed: list[SourceRecord] = []
        ends = set(self._source.ends())
        going_on = [key for key, _ in beat.live if key in self._source.live]
        declined = [key for key, _ in beat.live if key not in self._source.live and any(self._declines_of(key))]
        for key, grant in beat.live:
            record = self._source.live.get(key)
            if record is None:
                # What has ended before any target was known has ended for each of them that has granted nothing.
                is_over = (sender, key, grant) in ends or (not grant and (None, key, 0) in ends)
                is_over = is_over and key.transfer_id not in self._declined
                over += [key] if is_over else []
            elif record.target not in (None, sender):
                if record.grant is None:
                    claimed.append((record, record.target))
                else:
                    others.append(self._unchanged(key, beat))
            elif record.grant is not None and grant not in (0, record.grant_number):
                others.append(self._unchanged(key, beat))
            elif record.state is not SourceState.STOPPING:
                renewed.append(record)
        until = self._clock() - beat.step_age_s + self._limits.defer_timeout

        def check(sent: list[Message]) -> Broken:
            for key in over:
                if not _has(sent, Over, key):
                    return TAKEN, f"{key} is over here, and that is not sent again: {beat}"
            for key, _ in beat.live:
                if key not in going_on and self._is_declined(key):
                    return TAKEN, f"{key} is waited for, and still counts as declined: {beat}"
            for key, grant in beat.live:
                if foreign := _of_other_grants(sent, key, grant):
                    return LEFT_ALONE, f"{foreign} is no answer to {beat}"
            if anew := [key for key in declined if _has(sent, Over, key)]:
                return LEFT_ALONE, f"{anew} were declined and are asked for anew: how earlier ones ended is no answer to {beat}"
            if over_now := [key for key in going_on if _has(sent, Over, key)]:
                return LEFT_ALONE, f"{over_now} go on, and are reported as over to {sender}"
            for record in renewed:
                if record.lease_until < until - _SMALL_S or record.target != sender:
                    return TAKEN, f"{record.key}: the lease is not extended by {beat}"
            for record, owner in claimed:
                if record.lease_until < until - _SMALL_S:
                    return TAKEN, f"{record.key}: the lease is not extended by {beat}"
                if record.target != owner:
                    return LEFT_ALONE, f"{record.key} was claimed by {owner}, and now by {record.target}"
            return next(filter(None, (each(sent) for each in others)), None)

        return check

    # At a target.

    def _on_source_beat(self, sender: Incarnation, beat: Heartbeat) -> Check:
        others: list[Check] = []
        over: list[HandoffKey] = []
        renewed: list[TargetRecord] = []
        kept: list[tuple[TargetRecord, float]] = []
        now, late, ending = self._clock(), self._target.late_total[TargetEvent.PEER_ALIVE], 0
        for key, grant in beat.live:
            record = self._target.live.get(key)
            if record is not None and record.source == sender and grant == record.grant:
                renewed += [record] if record.state in _RENEWED else []
                kept += [(record, record.give_up_at)] if record.state in _OVERDUE else []
                ending += record.state in _CLOSING
                continue
            others += [] if record is None else [self._unchanged(key, beat)]
            is_meant = record is not None and record.source == sender and not grant
            end = vars(self._target)["_ended"].get((key, grant))
            if grant and not is_meant and (end is None or now - end.at >= self._limits.retry):
                over.append(key)
        until = now - beat.step_age_s + self._limits.transfer_timeout

        def check(sent: list[Message]) -> Broken:
            for key in over:
                if not _has(sent, Release, key) and not _has(sent, Stop, key):
                    return TAKEN, f"{key} is over here, and that is not sent again: {beat}"
            for record in renewed:
                if record.give_up_at < until - _SMALL_S:
                    return TAKEN, f"{record.key}: the deadline is not renewed by {beat}"
            for record, give_up_at in kept:
                if record.give_up_at != give_up_at:
                    return LEFT_ALONE, f"{record.key} is {record.state}, and the deadline is renewed by {beat}"
            if self._target.late_total[TargetEvent.PEER_ALIVE] - late < ending:
                return "counted", f"{ending} that are ending are listed, and not counted as late: {beat}"
            return next(filter(None, (each(sent) for each in others)), None)

        return check

    def _on_source_message(self, sender: Incarnation, message: SourceMessage) -> Check:
        key = message.key
        if key is None:
            return _nothing
        notices = vars(self._target.decline_notices)["_waiting"]
        if isinstance(message, Stopped) and not message.grant and (notice := notices.get(key)) is not None:
            return self._on_notice_answered(notices, notice, sender, message)
        record = self._target.live.get(key)
        if isinstance(message, Confirmed) and record is not None and self._is_early(sender, record, message):
            return lambda _: None if record.early_confirmed == message else (TAKEN, f"{message} is not kept")
        if record is None or record.source != sender or not self._is_current(record, message):
            return self._unchanged(key, message)
        state, is_reading, early = record.state, record.executor is Executor.TARGET_READS, record.early_confirmed
        is_by_message = isinstance(message, AuxSent) and message.aux is None and record.aux_channel is AuxChannel.CONTROL
        last = vars(self._target)["_last_sequence"].get(sender, 0)
        is_number = isinstance(message, Refused) and message.stale
        is_number = is_number and next_sequence(last, getattr(message, "used_up_to", 0)) <= MAX_NUMBER
        stands, is_new = _stands(record), record.span_count is None
        # Up to so many grants are refused before it is given up. Where the source writes, it has to name the number that it
        # refuses, unless it cannot have taken that: else the true one may be written to, and no other is made.
        is_about = is_reading or (isinstance(message, Refused) and _is_proof(message, record.sequence))
        is_number = is_number and is_about and state is TargetState.GRANTED and record.stale_grants < _MOST_STALE
        is_fenced = isinstance(message, Over | Stopped) and message.may_land and not is_reading
        is_fenced = is_fenced and vars(self._target)["_ranks"].fences_writers
        generation, blocks, give_up_at = record.generation, sum(map(len, record.source_blocks)), record.give_up_at

        def check(sent: list[Message]) -> Broken:
            is_live = self._target.live.get(key) is record
            if isinstance(message, Refused) and not is_about and _has(sent, Grant, key):
                return LEFT_ALONE, f"its blocks are granted again, although the source may write there: {message}"
            if is_number and not _has(sent, Grant, key):
                return TAKEN, f"a number was refused, and no other is taken: {message}"
            if is_fenced and not is_live:
                return LEFT_ALONE, f"what may still land was not waited for: {message}"
            if not is_live or (record.state in _CLOSING and state not in _CLOSING):
                if is_live and isinstance(message, Refused) and is_about and not is_reading and not record.peer_is_quiet:
                    return TAKEN, f"it is waited for a source that has refused the grant: {message}"
                return None
            if _stands(record) == stands and record.give_up_at != give_up_at:
                return LEFT_ALONE, f"nothing has moved, and the deadline is renewed by {message}"
            if isinstance(message, Announced) and record.state not in _CLOSING:
                known = max(blocks if generation == record.generation else 0, sum(map(len, message.blocks)))
                if sum(map(len, record.source_blocks)) != known:
                    return TAKEN, f"of the {known} blocks that are known {record.source_blocks} are left by {message}"
            match message:
                case Announced():
                    is_taken = record.generation == message.generation and all(
                        record.spans.get(span.number) == span for span in message.spans
                    )
                case Prefilled():
                    is_taken = record.generation == message.generation and record.span_count is not None
                    # One of another length is not what was asked for, and ends it.
                    is_taken = is_taken and record.allocation is not None and record.allocation.tokens == message.tokens
                    if (
                        is_new
                        and state not in _CLOSING
                        and record.give_up_at < self._clock() + self._limits.transfer_timeout - _SMALL_S
                    ):
                        return TAKEN, f"the prefill is complete, and that is no progress: {message}"
                    if early is not None and (early.generation, early.span_count) == (message.generation, message.span_count):
                        is_taken = is_taken and record.is_confirmed
                case AuxSent():
                    has_aux = record.aux is not None or record.aux_pointer is not None
                    is_empty = message.aux is None and message.pointer is None
                    is_taken = has_aux or is_by_message or is_empty or _has(sent, Grant, key)
                case Retracted():
                    is_taken = record.generation >= message.generation
                case Confirmed():
                    is_taken = record.is_confirmed if not is_reading else state is not TargetState.CONFIRMING
                case Refused():
                    # A number alone is replaced by another; a hand-off that is refused ends. Without the number that it is
                    # about, a refusal is no proof that the source is quiet.
                    is_unproven = message.stale and not message.sequence and not is_reading and record.state in _CLOSING
                    is_taken = record.peer_is_quiet or is_unproven or (message.stale and record.grant != message.grant)
                case Over() | Stopped():
                    # What may still land is fenced, where that can be, and not waited for.
                    is_quiet = record.state is not TargetState.STOPPING if is_fenced else record.peer_is_quiet
                    is_taken = state in _CLOSING and (is_quiet or message.grant != record.grant)
            is_taken = is_taken or (state in _CLOSING and not isinstance(message, Refused | Over | Stopped))
            return None if is_taken else (TAKEN, f"{state}: {message} has no effect")

        return check

    def _on_notice_answered(self, notices: dict[HandoffKey, Any], notice: Any, sender: Incarnation, stopped: Stopped) -> Check:
        """The source that was notified of a decline answers, and then it is not notified again; or another one does."""
        unchanged = self._unchanged(stopped.key, stopped)

        def check(sent: list[Message]) -> Broken:
            is_waiting = notices.get(stopped.key) is notice
            if notice.source == sender and is_waiting:
                return TAKEN, f"the notice is answered, and still repeated: {stopped}"
            if notice.source != sender and not is_waiting:
                return LEFT_ALONE, f"{notice.source} was notified, and has not answered: {stopped}"
            return unchanged(sent)

        return check

    def _is_early(self, sender: Incarnation, record: TargetRecord, confirmed: Confirmed) -> bool:
        """Whether a source that writes confirms what its target does not know to be complete yet."""
        is_ours = record.source == sender and record.grant == confirmed.grant
        return is_ours and record.executor is Executor.SOURCE_WRITES and record.span_count is None

    def _is_current(self, record: TargetRecord, message: SourceMessage) -> bool:
        """Whether a message of the source is about the grant and the generation in hand, or a later generation."""
        if not message.grant:
            return isinstance(message, Over) and record.state in _UNANSWERED
        if record.grant != message.grant:
            return False
        match message:
            case Announced() | Prefilled() | Retracted():
                return message.generation >= record.generation
            case Confirmed():
                return (record.generation, record.span_count) == (message.generation, message.span_count)
            case Refused():
                return not message.stale or message.sequence in (0, record.sequence)
            case Stopped():
                return record.state in _CLOSING
            case _:
                return True
