"""The notes of a source: what it sends to the target is noted before it is sent, and the first token when it is chosen."""

from __future__ import annotations

from dataclasses import dataclass, field

from agent_rig import AUX, BLOCKS, LIMITS, Clock, Post, ScriptedRanks, key_of

from kvbaton.agent.engine_port import EngineEvent, Offer
from kvbaton.agent.source import SourceSide
from kvbaton.core.handoff import Executor, Incarnation, Mode, Span
from kvbaton.core.messages import Announced, ConfirmAsk, Confirmed, Grant, Message, Prefilled, Retracted
from kvbaton.core.timeline import Note, Stage

KEY = key_of("k")
TARGET = Incarnation("t1")
WHOLE = Span(0, 0, 3, 0, 1)
HALF = Span(0, 0, 2, 0, 1)
GRANT = Grant(KEY, 1, "p", Mode.PUSH, Executor.TARGET_READS, 1, (), 0, 1)


@dataclass
class Log(Post):
    """Notes and messages in the order in which they left the source."""

    left: list[Note | Message] = field(default_factory=list)

    def send(self, peer: Incarnation, message: Message) -> None:
        super().send(peer, message)
        self.left.append(message)

    def place(self, what: Stage | type[Message]) -> int:
        """The first place of a stage or a kind of message."""
        return next(
            place
            for place, entry in enumerate(self.left)
            if (entry.stage is what if isinstance(entry, Note) else type(entry) is what)
        )


def source(log: Log) -> SourceSide:
    events: list[EngineEvent] = []
    side = SourceSide(1, LIMITS, Clock(), log, ScriptedRanks(), events.append, log.left.append)
    side.expect(KEY, "p")
    return side


def test_the_first_token_is_noted_when_it_is_chosen_not_when_a_target_asks() -> None:
    log = Log()
    side = source(log)
    side.offer(Offer(KEY, BLOCKS, 3, AUX), lambda: WHOLE)
    assert [entry.stage for entry in log.left if isinstance(entry, Note)] == [Stage.PREFILLED]
    side.on_grant(TARGET, GRANT)
    side.on_grant(TARGET, GRANT)
    stages = [entry.stage for entry in log.left if isinstance(entry, Note)]
    assert stages.count(Stage.PREFILLED) == 1


def test_what_is_sent_is_noted_before() -> None:
    log = Log()
    side = source(log)
    side.on_grant(TARGET, GRANT)
    side.spans_ready(KEY, BLOCKS, (HALF,))
    side.retract(KEY)
    assert log.place(Stage.GRANTED) < log.place(Stage.ANNOUNCED) < log.place(Announced)
    assert log.place(Stage.RETRACTED) < log.place(Retracted)
    side.offer(Offer(KEY, BLOCKS, 3, AUX), lambda: WHOLE)
    assert log.place(Stage.PREFILLED) < log.place(Prefilled)
    generation = next(entry.generation for entry in log.left if isinstance(entry, Prefilled))
    side.on_confirm_ask(TARGET, ConfirmAsk(KEY, 1, generation))
    assert log.place(Stage.CONFIRMED) < log.place(Confirmed)
