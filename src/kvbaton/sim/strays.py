"""Messages about something else: of a grant, a generation or a count that no side has, asked too early, or of a third instance.

A peer of another release, a frame of an earlier life: whatever sends them, a hand-off must go on as if they had not come. The
rules in `reactions` look at every one of them, and so do all others: nothing of this excuses a failure.
"""

from __future__ import annotations

import random

from msgspec import structs

from kvbaton.core.handoff import Aux, Executor, Incarnation, Mode, Outcome
from kvbaton.core.messages import (
    Announced,
    AuxSent,
    ConfirmAsk,
    Confirmed,
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

__all__ = ["asked_anyhow", "before_its_grant", "may_come_from_others", "of_another_release", "over_of_another", "stray_of"]

_ELSEWHERE = 1000
"""How far off the number of a grant is that no target of a run has made."""


def stray_of(message: Message, rng: random.Random) -> Message | None:
    """A message like this one, from the same sender, that has to change nothing; None where there is none."""
    match message:
        case Announced() | Prefilled() | Retracted() | ConfirmAsk() if rng.random() < 0.5 and message.generation > 1:
            return structs.replace(message, generation=message.generation - 1)
        case Confirmed() if rng.random() < 0.7:
            return rng.choice(
                (
                    structs.replace(message, span_count=message.span_count + 1),
                    structs.replace(message, generation=message.generation + 1),
                    structs.replace(message, generation=max(1, message.generation - 1), span_count=message.span_count),
                )
            )
        case AuxSent():
            return structs.replace(message, grant=message.grant + _ELSEWHERE, aux=Aux(token_id=-1, logprob=0.0), pointer=None)
        case Grant():
            # Another prompt under the same transfer id, which clients choose: refused, and the real one goes on.
            numbers = {"grant": message.grant + _ELSEWHERE, "sequence": message.sequence + 1}
            return structs.replace(message, prompt=f"not {message.prompt}", **numbers)
        case Refused() if message.key is not None and message.stale and rng.random() < 0.5:
            return structs.replace(message, sequence=message.sequence + 1)
        case Hello():
            # The card of another process, in the name of this one: it would get that one's hand-offs.
            card = structs.replace(message.card, incarnation=Incarnation(f"not {message.card.incarnation}"))
            return structs.replace(message, card=card)
        case Heartbeat():
            return structs.replace(message, live=tuple((key, number + _ELSEWHERE) for key, number in message.live))
        case Stop() | Refused() if not message.grant:
            return None
        case Stop() if message.grant % 2:
            # Of a grant so far ahead that it cannot be used up: there is nothing to promise.
            return structs.replace(message, grant=message.grant + _ELSEWHERE, sequence=1 << 40)
        case Announced() | Prefilled() | Retracted() | ConfirmAsk() | Confirmed() | Release() | Stop() | Stopped() | Over():
            return structs.replace(message, grant=message.grant + _ELSEWHERE)
        case Refused():
            return structs.replace(message, grant=message.grant + _ELSEWHERE)


def asked_anyhow(message: Message, rng: random.Random) -> ConfirmAsk | Release | None:
    """What a target might ask although it cannot have read everything yet, or need not ask because the source writes; or that
    it releases what is not confirmed.
    """
    if isinstance(message, Announced | Prefilled | Confirmed) and message.grant:
        step = rng.choice((-1, 0, 0, 1, 2))
        if step > 1:
            # With the number of a stamp that no source ever shows, as with none.
            return None if isinstance(message, Confirmed) else Release(message.key, message.grant, message.generation)
        generation = message.generation + step
        return ConfirmAsk(message.key, message.grant, generation) if generation > 0 else None
    return None


def before_its_grant(beat: Heartbeat, sequence: int, rng: random.Random) -> Message | None:
    """What a target has no grant for yet: a grant for another prompt in its name, a question, a release, or the stop of a grant
    that would follow the one that it has.
    """
    keys = [key for key, number in beat.live if not number]
    granted = [(key, number) for key, number in beat.live if number]
    if not beat.from_source and granted and (not keys or rng.random() < 0.5):
        key, number = granted[0]
        return Stop(key, number + _ELSEWHERE, outcome=Outcome.CANCELLED, sequence=sequence)
    if beat.from_source or not keys:
        return None
    if rng.random() < 0.5:
        return rng.choice((ConfirmAsk(keys[0], 0, rng.randint(1, 2)), Release(keys[0], 0)))
    return Grant(
        key=keys[0],
        grant=_ELSEWHERE,
        prompt="another one",
        mode=Mode.PUSH,
        executor=Executor.TARGET_READS,
        epoch=1,
        blocks=(),
        cached_tokens=0,
        sequence=sequence,
    )


def over_of_another(beat: Heartbeat) -> Over | None:
    """An end without a grant of what the heartbeat of a source names, as another source could send it: it has none to end."""
    if not beat.from_source or not beat.live:
        return None
    return Over(beat.live[0][0], 0, Outcome.FAILED, "another source has ended it")


def of_another_release(message: Message) -> Message:
    """The same, as a release could send it that numbers fewer answers, or more, does not count the tokens that it grants
    blocks for, claims that what it stops was delivered, or fears that bytes of what has ended are still on their way.
    """
    match message:
        case Refused() if message.key is not None:
            return structs.replace(message, sequence=0 if message.stale else message.grant + _ELSEWHERE)
        case Hello() if not message.wants_answer:
            return structs.replace(message, answers=None)
        case Grant():
            return structs.replace(message, tokens=0)
        case Stop():
            return structs.replace(message, outcome=Outcome.DELIVERED)
        case Stopped() | Over():
            return structs.replace(message, may_land=True)
        case _:
            return message


def may_come_from_others(message: Message) -> bool:
    """Whether the same message of another instance, which has nothing to do with the hand-off, has to change nothing."""
    match message:
        case Heartbeat():
            # Of a target without a grant one would be believed: that it has the transfer id is all that is known by then.
            return all(number for _, number in message.live)
        case Grant() | Refused():
            return False
        case Stopped():
            return True
        case Announced() | Prefilled() | AuxSent() | Retracted() | ConfirmAsk() | Confirmed() | Release() | Stop() | Over():
            return message.grant > 0
        case _:
            return False
