"""What the card of a peer, or its refusal, has to bring about at once: for what waits for it, and for nothing else.

A card may be late, and its process dead. So it counts for a hand-off that names another incarnation, or in place of another one
that has answered at the same address, only if it answers a question that was sent later. All of that is worked out here from
the records and the numbers of the questions, without the guards of the product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.target import TargetRecord
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import HandoffKey, Incarnation
from kvbaton.core.lifecycle import TargetState
from kvbaton.core.messages import Hello, Message, Refused, Stop

__all__ = ["LEFT_ALONE", "TAKEN", "Broken", "CardReactions", "Check"]

TAKEN, LEFT_ALONE = "taken", "left alone"

Broken = tuple[str, str] | None
"""The rule that did not hold, and what was seen."""

Check = Callable[[list[Message]], Broken]
"""Called when the message was handled, with what was sent to its sender meanwhile."""

_WAITING = frozenset({TargetState.QUEUED, TargetState.HANDSHAKING})
_CLOSING = frozenset({TargetState.STOPPING, TargetState.REVOKING, TargetState.ISOLATED})
_ASKING = _CLOSING | {TargetState.GRANTED, TargetState.CONFIRMING}
"""States in which a target with a grant waits for an answer, whatever it has."""


class CardReactions:
    """What one instance has to make of cards.

    `asked_back` has when it last asked each unknown peer for its own, `everything_sent` all that it sends meanwhile.
    """

    def __init__(
        self, coordinator: Coordinator, asked_back: dict[Incarnation, float], everything_sent: list[tuple[str, Message]]
    ) -> None:
        self._everything_sent = everything_sent
        self._coordinator = coordinator
        self._target = coordinator.target
        self._asked_back = asked_back
        self._notices = vars(coordinator.target.decline_notices)["_waiting"]
        self._dialled = vars(coordinator.target.card_requests)["_dialled"]

    def on_card(self, sender: Incarnation, hello: Hello, via: ControlAddress | None) -> Check:
        """A card that was sent by its own process."""
        peers = vars(self._coordinator)["_peers"]
        resident: Any = None if via is None else vars(peers)["_at"].get(via)
        is_other = resident is not None and resident.incarnation != sender
        is_late = is_other and hello.answers is not None and hello.answers <= resident.asked
        waiting = self._waiting_at(via)
        asking = [each for each in self._target.live.values() if each.source == sender and self._is_asking(each)]
        unsent = [each for each in self._notices.values() if each.source is None and each.request.source == via]
        notified = [key for key, each in self._notices.items() if each.source == sender]
        met = {sender, resident.incarnation} if is_other else {sender}
        untouched = self._untouched(via, met)

        def check(sent: list[Message]) -> Broken:
            is_known = sender in vars(peers)["_cards"]
            if is_known:
                self._asked_back.pop(sender, None)
            if is_late:
                return self._after_late(via, resident)
            if not is_known:
                declined = [each.key for each in waiting] + [each.request.key for each in unsent]
                problem = self._after_refusal(waiting, via, sender, sent, declined)
                is_refused = any(isinstance(each, Refused) and each.key is None for each in sent)
                return problem or (None if is_refused or not hello.wants_answer else (TAKEN, f"{sender} does not learn of it"))
            if via is not None and (now := vars(peers)["_at"].get(via)) is not None and now.incarnation != sender:
                return TAKEN, f"{sender} has answered at {via}, where {now} is remembered"
            if via is not None and now is None:
                return TAKEN, f"{sender} has answered at {via}, and is to be asked for again"
            keys = {getattr(each, "key", None) for each in sent}
            if hello.wants_answer:
                answers = [each.answers for each in sent if isinstance(each, Hello)]
                missing = [each.key for each in asking if self._is_live(each) and each.key not in keys]
                missing += [key for key in notified if key in self._notices and key not in keys]
                if answers != [hello.question] or missing:
                    return TAKEN, f"{sender} asks for our card, gets {answers}, and {missing} are not sent again"
            elif again := {each.key for each in sent if isinstance(each, Stop) and not each.grant}.intersection(notified):
                return "no needless message", f"{sender} is notified about {again} again, although it has not asked for that"
            problems = (self._problem(each, sender, hello, via) for each in waiting)
            of_notices = (self._notice_problem(each, sender, hello, via, keys) for each in unsent)
            if wrong := next(filter(None, (*problems, *of_notices)), ""):
                return TAKEN, f"{wrong}: {sender} at {via} answers {hello.answers}"
            others = [
                each for peer, each in self._everything_sent if peer not in met and getattr(each, "key", None) is not None
            ]
            if others:
                return "no needless message", f"by the card of {sender} other peers are notified again: {others}"
            if via is not None and via in self._dialled and not self._is_waited_for(via):
                return "no needless message", f"{via} has answered, and is asked again although nothing waits for that"
            return untouched()

        return check

    def on_card_of_another(self, sender: Incarnation, hello: Hello) -> Check:
        """A card in the name of a process that is not its sender: dropped."""
        peers = vars(self._coordinator)["_peers"]
        before = hello.card.incarnation in vars(peers)["_cards"]

        def check(sent: list[Message]) -> Broken:
            is_taken = bool(sent) or (hello.card.incarnation in vars(peers)["_cards"]) is not before
            return (LEFT_ALONE, f"{sender} has sent the card of {hello.card.incarnation}") if is_taken else None

        return check

    def on_refusal(self, via: ControlAddress | None, sender: Incarnation) -> Check:
        """The peer at an address is none of ours, or takes us for none of its own."""
        waiting, untouched = self._waiting_at(via), self._untouched(via, set())
        declined = [each.key for each in waiting]
        declined += [key for key, each in self._notices.items() if each.source is None and each.request.source == via]

        def check(sent: list[Message]) -> Broken:
            return self._after_refusal(waiting, via, sender, sent, declined) or untouched()

        return check

    def _waiting_at(self, via: ControlAddress | None) -> list[TargetRecord]:
        records = () if via is None else self._target.live.values()
        return [each for each in records if each.source is None and each.request.source == via and each.state in _WAITING]

    def _is_waited_for(self, via: ControlAddress) -> bool:
        is_declined = any(each.source is None and each.request.source == via for each in self._notices.values())
        return bool(self._waiting_at(via)) or is_declined

    def _is_asking(self, record: TargetRecord) -> bool:
        return record.grant > 0 and (record.state in _ASKING or (record.state is TargetState.FILLING and not record.aux))

    def _is_live(self, record: TargetRecord) -> bool:
        return self._target.live.get(record.key) is record

    def _untouched(self, via: ControlAddress | None, meant: set[Incarnation]) -> Callable[[], Broken]:
        """Notices to other peers, and at other addresses, go on as they were."""
        others = {
            key: (each, each.source)
            for key, each in self._notices.items()
            if (each.source not in meant if each.source is not None else each.request.source != via)
        }

        def check() -> Broken:
            lost = [
                key for key, (each, source) in others.items() if self._notices.get(key) is not each or each.source != source
            ]
            return ("left alone", f"notices about {lost} were for others") if lost else None

        return check

    def _after_late(self, via: ControlAddress | None, resident: object) -> Broken:
        """A later question is under way, and the one who answered last still counts."""
        peers, dial = vars(self._coordinator)["_peers"], self._dialled.get(via)
        if vars(peers)["_at"].get(via) is not resident:
            return "left alone", f"{resident} gave way at {via} to a card that may be late"
        if dial is None or dial.question <= getattr(resident, "asked", 0):
            return TAKEN, f"a card at {via} may be late, and no later question was sent: {dial}"
        return None

    def _after_refusal(
        self,
        waiting: list[TargetRecord],
        via: ControlAddress | None,
        sender: Incarnation,
        sent: list[Message],
        expected: list[HandoffKey],
    ) -> Broken:
        """What waited for the peer ends, and its source is notified of that, once; nothing is asked of it any more."""
        declined = [each.key for each in sent if isinstance(each, Stop) and not each.grant]
        live = [each.key for each in waiting if self._is_live(each) and each.state not in _CLOSING]
        if live or Counter(declined) != Counter(expected):
            return TAKEN, f"{live} wait for {sender}, which was refused; it was sent declines of {declined}, not {expected}"
        notices = [key for key, each in self._notices.items() if each.source is None and each.request.source == via]
        if via is not None and (notices or via in self._dialled):
            return TAKEN, f"notices about {notices} wait for {via}, where no peer of ours is"
        return None

    def _problem(self, record: TargetRecord, sender: Incarnation, hello: Hello, via: ControlAddress | None) -> str:
        is_meant = record.request.source_incarnation in (None, sender)
        is_over = not self._is_live(record) or record.state in _CLOSING
        if is_meant:
            return "" if record.source == sender or is_over else f"{record.key} still waits for the card"
        if hello.answers is None or hello.answers > record.asked_before:
            notice = self._notices.get(record.key)
            if notice is not None and notice.request is record.request:
                return f"{record.key} was for {record.request.source_incarnation}, which is gone, and is declined all the same"
            return "" if is_over else f"{record.key} waits for {record.request.source_incarnation}, which is gone"
        if is_over or record.source is not None:
            return f"{record.key} was for {record.request.source_incarnation}, and this card may be late"
        return self._question_problem(record.key, via, record.asked_before)

    def _notice_problem(
        self, notice: Any, sender: Incarnation, hello: Hello, via: ControlAddress | None, keys: set[HandoffKey | None]
    ) -> str:
        key, is_kept = notice.request.key, self._notices.get(notice.request.key) is notice
        if notice.request.source_incarnation in (None, sender):
            return "" if is_kept and notice.source == sender and key in keys else f"{key} is declined, and that is not sent"
        if hello.answers is None or hello.answers > notice.asked_before:
            return f"{key} was declined at one that is gone, and that is repeated" if is_kept else ""
        if not is_kept or notice.source is not None:
            return f"{key} was declined at {notice.request.source_incarnation}, and this card may be late"
        return self._question_problem(key, via, notice.asked_before)

    def _question_problem(self, key: HandoffKey, via: ControlAddress | None, after: int) -> str:
        dial = self._dialled.get(via)
        return "" if dial is not None and dial.question > after else f"{key}: no question was sent after {after}: {dial}"
