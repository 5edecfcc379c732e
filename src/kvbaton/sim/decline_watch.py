"""What an instance remembers of declines and of answered questions, and how long it waits: held to plain accounts of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from kvbaton.agent.decline_notices import DeclinedRequests, DeclineNotices
from kvbaton.agent.target import TargetRecord, TargetSide
from kvbaton.agent.timers import Backoff, Questions, Timers
from kvbaton.config import Limits
from kvbaton.core.handoff import HandoffKey, Incarnation, TransferId
from kvbaton.sim.effect_watch import method_of

__all__ = ["notice_problems", "watch_declines", "watch_notice_waits", "watch_questions", "watch_target_waits"]

Find = Callable[[str, str], None]

_SMALL_S = 1e-6

_MOST_EXCEPT = 6
"""How many hand-offs of a request that is declined as a whole may be excepted: few, so that runs get there."""


def watch_declines(declined: DeclinedRequests, find: Find) -> None:
    """From now on report each decline that ends a hand-off twice, or another one, and each that does not end its own."""
    add, add_whole, use_up, withdraw = declined.add, declined.add_whole, declined.use_up, declined.withdraw
    single: dict[HandoffKey, tuple[str, float]] = {}
    whole: dict[TransferId, float] = {}
    spared: dict[TransferId, set[HandoffKey]] = {}
    vars(declined)["_max_used"] = _MOST_EXCEPT

    def has_room(transfer_id: TransferId) -> bool:
        return len(spared.get(transfer_id, ())) < _MOST_EXCEPT

    def check(transfer_id: TransferId) -> None:
        kept = vars(declined)["_whole"].get(transfer_id)
        if kept is not None and kept.except_for != spared[transfer_id]:
            find("taken", f"all of {transfer_id} is declined except for {kept.except_for}, and not {spared[transfer_id]}")

    def added(key: HandoffKey, prompt: str, reason: str, until: float) -> None:
        add(key, prompt, reason, until)
        single[key] = prompt, until

    def whole_added(transfer_id: TransferId, reason: str, until: float, now: float, except_for: Iterable[HandoffKey]) -> None:
        add_whole(transfer_id, reason, until, now, except_for)
        if whole.get(transfer_id, -math.inf) < now:
            spared[transfer_id] = set()
        whole[transfer_id] = until
        spared[transfer_id] |= set(except_for)
        check(transfer_id)

    def used_up(key: HandoffKey, prompt: str, now: float) -> str | None:
        is_single = key in single and single[key][0] == prompt and now <= single[key][1]
        is_new = key.transfer_id in spared and key not in spared[key.transfer_id] and has_room(key.transfer_id)
        is_whole = is_new and now <= whole.get(key.transfer_id, -math.inf)
        reason = use_up(key, prompt, now)
        if is_single:
            del single[key]
        elif is_whole:
            spared[key.transfer_id].add(key)
        if (reason is not None) is not (is_single or is_whole):
            find("taken", f"{key} of {prompt!r} is declined: {is_single}, all of its request: {is_whole}; it ends by {reason}")
        return reason

    def withdrawn(key: HandoffKey) -> bool:
        was_declined = key in single or key.transfer_id in whole
        single.pop(key, None)
        if key.transfer_id in whole and has_room(key.transfer_id):
            spared[key.transfer_id].add(key)
        is_known = withdraw(key)
        check(key.transfer_id)
        if is_known is not was_declined:
            find("taken", f"{key} was declined: {was_declined}, and counts as that: {is_known}")
        return is_known

    vars(declined).update(add=added, add_whole=whole_added, use_up=used_up, withdraw=withdrawn)


def watch_questions(questions: Questions, find: Find) -> None:
    """From now on report numbers that do not grow, and questions that count as lost although later ones have no answer."""
    next_number, answered, lost_at = questions.next_number, questions.answered, questions.lost_at
    latest: dict[Incarnation | None, tuple[int, float]] = {}
    last = 0

    def numbered() -> int:
        nonlocal last
        number = next_number()
        if number <= last:
            find("nothing twice", f"question {number} after {last}")
        last = number
        return number

    def taken(peer: Incarnation, number: int, now: float) -> None:
        answered(peer, number, now)
        times = [each.at for each in vars(questions)["_answered"].values()]
        if times != sorted(times):
            find("nothing kept", f"{peer} has just answered, and would be forgotten before others that answered earlier")
        if number > latest.get(peer, (-1, 0.0))[0]:
            latest[peer] = number, now

    def looked_at(peer: Incarnation | None, number: int, wait_s: float) -> float:
        found, (highest, at) = lost_at(peer, number, wait_s), latest.get(peer, (math.inf, 0.0))
        expected = -math.inf if highest > number else at + wait_s
        if found != expected:
            find("on time", f"question {number} to {peer} counts as lost from {found} on, and not {expected}, by {latest}")
        return found

    vars(questions).update(next_number=numbered, answered=taken, lost_at=looked_at)


def _watch_waits(
    timers: Timers,
    backoff_of: Callable[[HandoffKey], Backoff | None],
    state_of: Callable[[HandoffKey], object],
    limits: Limits,
    find: Find,
    sent: Sequence[object] | None = None,
    put_off_to: Callable[[HandoffKey], float] = lambda _: -math.inf,
) -> None:
    """From now on report each wait for an answer that does not double, up to a beat, when it is over.

    With what is `sent`, nothing is before a wait is over. A wait that is only put off, because the peer is still answering,
    does not double.
    """
    look_at = vars(timers)["_look_at"]

    def watched(key: HandoffKey, now: float) -> None:
        backoff, state, put_off = backoff_of(key), state_of(key), put_off_to(key)
        at, wait_s, count = (backoff.at, backoff.wait_s, len(sent or ())) if backoff is not None else (math.inf, 0.0, 0)
        look_at(key, now)
        if backoff is None or state != state_of(key) or put_off > now:
            return  # what is asked now is something else, and for the first time, or nothing is asked
        if at <= now and abs(backoff.at - now - backoff.wait_s) < _SMALL_S and backoff.wait_s > 0.0:
            expected = max(wait_s, min(2 * wait_s, limits.beat_s))
            if abs(backoff.wait_s - expected) > _SMALL_S:
                find("on time", f"{key} was asked about again, and waits for {backoff.wait_s} s after {wait_s} s")
        elif at > now and sent is not None and len(sent) > count:
            find("no needless message", f"{key}: {sent[count:]} at {now}, and the wait is over at {at}")

    vars(timers)["_look_at"] = watched


def watch_notice_waits(notices: DeclineNotices, limits: Limits, sent: Sequence[object], find: Find) -> None:
    """From now on report each notice that is repeated too early, or as often as before."""
    waiting = vars(notices)["_waiting"]

    def backoff_of(key: HandoffKey) -> Backoff | None:
        notice = waiting.get(key)
        return None if notice is None else notice.retry

    _watch_waits(vars(notices)["_timers"], backoff_of, waiting.__contains__, limits, find, sent)


def watch_target_waits(target: TargetSide, limits: Limits, clock: Callable[[], float], find: Find) -> None:
    """From now on report each question that is repeated as often as before, and not soon after something has come."""

    def backoff_of(key: HandoffKey) -> Backoff | None:
        record = target.live.get(key)
        return None if record is None else record.retry

    def state_of(key: HandoffKey) -> object:
        record = target.live.get(key)
        return None if record is None else record.state

    def put_off_to(key: HandoffKey) -> float:
        record, questions = target.live.get(key), vars(target)["_questions"]
        return -math.inf if record is None else questions.lost_at(record.source, record.question, record.retry.wait_s)

    _watch_waits(vars(target)["_timers"], backoff_of, state_of, limits, find, put_off_to=put_off_to)
    progress = method_of(target, "_progress")

    def watched(record: TargetRecord) -> None:
        progress(record)
        if abs(record.retry.at - clock() - limits.retry) > _SMALL_S or record.retry.wait_s != limits.retry:
            find("on time", f"{record.key} has got further, and its source is asked again after {record.retry.wait_s} s")

    vars(target)["_progress"] = watched


def notice_problems(notices: DeclineNotices) -> Iterable[str]:
    """Notices that are looked at too late, and alarms of those that are gone."""
    waiting, times = vars(notices)["_waiting"], vars(notices)["_timers"].times
    for key, notice in waiting.items():
        due = min(notice.retry.at, notice.give_up_at)
        if times.get(key, math.inf) > due:
            yield f"the notice about {key} is due at {due}, and looked at at {times.get(key)}"
    if lost := times.keys() - waiting.keys():
        yield f"alarms of notices about {lost}, of which there are none"
    unknown = {each.request.source for each in waiting.values() if each.source is None}
    if needless := notices.unanswered() - unknown:
        yield f"{needless} count as unanswered, and all that are notified there are known"
