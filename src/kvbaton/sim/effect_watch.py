"""What the effects of a target's table leave behind: nothing of what is void, and one notice where a source has no grant. And
what the calls of its engine do: what is declined is sent at once where the source is known, and what is taken is not declined.
Which question is repeated, and what ends with a source that is gone, or that is fenced: nothing that has no part in that.

A count of an earlier generation that still counts does harm only if the new one differs in it. So it is looked at right after
the effect that has to end it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvbaton.agent.engine_port import SourceRequest
from kvbaton.agent.target import TargetRecord, TargetSide
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import Card
from kvbaton.core.handoff import Executor, Incarnation, key_problem
from kvbaton.core.lifecycle import TargetEffect, TargetState
from kvbaton.core.messages import ConfirmAsk, Grant, Message, Stop

__all__ = ["method_of", "watch_calls", "watch_effects", "watch_losses", "watch_repeats"]

Find = Callable[[str, str], None]

_REPEATED: dict[TargetState, type[Message]] = {
    TargetState.GRANTED: Grant,
    TargetState.FILLING: Grant,
    TargetState.CONFIRMING: ConfirmAsk,
    TargetState.STOPPING: Stop,
    TargetState.REVOKING: Stop,
    TargetState.ISOLATED: Stop,
}
"""What a source that has a grant is sent again, by what is waited for."""


def watch_effects(target: TargetSide, find: Find) -> None:
    """From now on have it looked at what some effects leave behind."""
    effects = target.effects
    drop, new_grant, give_back = (
        effects[each] for each in (TargetEffect.DROP_SPANS, TargetEffect.NEW_GRANT, TargetEffect.RETURN_BLOCKS)
    )
    notices = vars(target.decline_notices)["_waiting"]

    def watched_drop(record: TargetRecord) -> None:
        drop(record)
        for problem in _left(record):
            find("counts agree", f"{record.key} is retracted, and {problem}")

    def watched_grant(record: TargetRecord) -> None:
        new_grant(record)
        for problem in _left(record):
            find("counts agree", f"{record.key} has a new grant, and {problem}")
        if record.generation:
            find("counts agree", f"{record.key} has a new grant, and generation {record.generation} counts for it")

    def watched_end(record: TargetRecord) -> None:
        before = notices.get(record.key)
        give_back(record)
        notice = notices.get(record.key)
        is_notified, is_due = notice is not before, not record.grant and not record.peer_is_quiet
        if is_notified and not is_due:
            find("no needless message", f"{record.key} has ended, its source knows or was asked to stop, and is notified")
        elif is_due and not is_notified:
            find("taken", f"{record.key} has ended without a grant, and its source is not notified")

    effects[TargetEffect.DROP_SPANS] = watched_drop
    effects[TargetEffect.NEW_GRANT] = watched_grant
    effects[TargetEffect.RETURN_BLOCKS] = watched_end


def watch_calls(target: TargetSide, everything_sent: list[tuple[str, Message]], find: Find) -> None:
    """From now on have it looked at what becomes of requests that the engine takes or declines."""
    expect, decline, notices = target.expect, target.decline, vars(target.decline_notices)["_waiting"]

    def check_source(request: SourceRequest, source: Card | None) -> None:
        named = request.source_incarnation
        if source is not None and named not in (None, source.incarnation):
            find("taken", f"{request.key} is to come from {named}, and the card of {source.incarnation} is taken for its own")

    def watched_expect(request: SourceRequest, source: Card | None) -> None:
        check_source(request, source)
        before = target.live.get(request.key)
        expect(request, source)
        record = target.live.get(request.key)
        if record is not None and record is not before and request.key in notices:
            find("nothing kept", f"{request.key} is taken, and its source would be notified that it is declined")

    def watched_decline(request: SourceRequest, source: Card | None, reason: str) -> None:
        check_source(request, source)
        # Without a prompt it is about all others of the transfer id, too, whether this one is live or not.
        is_due = not key_problem(request.key) and not (request.prompt and request.key in target.live)
        before, count = notices.get(request.key), len(everything_sent)
        decline(request, source, reason)
        notice, sent = notices.get(request.key), everything_sent[count:]
        if (notice is not before) is not is_due:
            find("taken", f"{request.key} is declined for {request.prompt!r}, and the notice is {notice}")
        elif is_due and source is not None:
            stops = [each for peer, each in sent if peer == source.incarnation and isinstance(each, Stop)]
            if not any(each.key == request.key and not each.grant for each in stops):
                find("prompt", f"{request.key} is declined, and {source.incarnation}, which is known, is not notified")

    vars(target).update(expect=watched_expect, decline=watched_decline)


def method_of(side: TargetSide, name: str) -> Callable[..., None]:
    """A method of this side, not of its class: a plant may have its own."""
    method: Callable[..., None] = getattr(side, name)
    return method


def watch_repeats(target: TargetSide, everything_sent: list[tuple[str, Message]], find: Find) -> None:
    """From now on have it looked at what is sent again, whenever that is due, and that what is sent has a number of its own."""
    ask_again, send = method_of(target, "_ask_again"), method_of(target, "_send")

    def numbered(record: TargetRecord, message: Message) -> None:
        before = max((each.question for each in target.live.values()), default=0)
        send(record, message)
        if record.source is not None and record.question <= before:
            find("nothing twice", f"{record.key}: question {record.question} after {before}: {message}")

    def watched(record: TargetRecord, now: float) -> None:
        expected, count = _REPEATED.get(record.state) if record.grant else None, len(everything_sent)
        state, grant = record.state, record.grant
        ask_again(record, now)
        sent = [each for peer, each in everything_sent[count:] if peer == record.source]
        about = [type(each) for each in sent if getattr(each, "key", None) == record.key]
        if expected is not None and about != [expected]:
            find("taken", f"{record.key} is {state}, and {sent} is sent again about grant {grant}")

    vars(target).update(_ask_again=watched, _send=numbered)


def watch_losses(target: TargetSide, find: Find) -> None:
    """From now on report what ends with a source that is gone, fenced or refused, and could have gone on."""
    on_peer_gone, on_peer_fenced, on_region_fenced = target.on_peer_gone, target.on_peer_fenced, target.on_region_fenced
    on_refused_peer = target.on_refused_peer

    def looked_at(others: list[TargetRecord], call: Callable[[], None], cause: str) -> None:
        before = [(record, record.state) for record in others]
        call()
        for record, state in before:
            if record.state is not state:
                find("left alone", f"{record.key} of {record.source} was {state} and is {record.state}, because {cause}")

    def gone(source: Incarnation, reason: str) -> None:
        others = [record for record in target.live.values() if record.source != source]
        looked_at(others, lambda: on_peer_gone(source, reason), f"{source} is gone")

    def peer_fenced(source: Incarnation, epoch: int) -> None:
        live = target.live.values()
        others = [record for record in live if record.source != source or not record.grant or record.epoch >= epoch]
        looked_at(others, lambda: on_peer_fenced(source, epoch), f"{source} is fenced up to epoch {epoch}")

    def region_fenced(epoch: int) -> None:
        live = target.live.values()
        is_read = Executor.TARGET_READS
        others = [record for record in live if not record.grant or record.epoch >= epoch or record.executor is is_read]
        looked_at(others, lambda: on_region_fenced(epoch), f"all are fenced up to epoch {epoch}")

    def refused(address: ControlAddress, reason: str, source: Incarnation | None = None) -> None:
        others = [each for each in target.live.values() if each.source is not None or each.request.source != address]
        looked_at(others, lambda: on_refused_peer(address, reason, source), f"{address} was refused")

    vars(target).update(on_peer_gone=gone, on_peer_fenced=peer_fenced, on_region_fenced=region_fenced, on_refused_peer=refused)


def _left(record: TargetRecord) -> Iterator[str]:
    """What still counts, of all that messages and reports about one generation add to."""
    if record.spans or record.unmoved or record.source_blocks:
        yield f"{list(record.spans)} are announced, in {record.source_blocks}, and {list(record.unmoved)} to be moved"
    if record.moved or record.on_wire or record.bytes_planned or record.bytes_moved:
        yield f"{record.moved} are moved, {record.on_wire} on their way, {record.bytes_moved} of {record.bytes_planned} bytes"
    if record.unsummed or record.summing or record.sums or record.source_sums:
        yield f"{record.unsummed}, {record.summing}, {record.sums}, {record.source_sums} are or will be summed"
    if record.span_count is not None or record.aux is not None or record.aux_pointer is not None:
        yield f"{record.span_count} spans are counted, and the aux record is {record.aux or record.aux_pointer}"
    if record.stamp is not None or record.sums_follow:
        yield f"it counts as confirmed by {record.stamp}, or will ({record.sums_follow})"
    if record.is_confirmed or record.written_bytes is not None or record.arrived_bytes:
        yield f"it is confirmed ({record.is_confirmed}), {record.arrived_bytes} of {record.written_bytes} bytes have come"
