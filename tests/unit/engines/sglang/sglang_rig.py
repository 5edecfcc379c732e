"""Stand-ins for the agents and for SGLang's metadata rows, around the real halves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbaton.agent.engine_port import Allocation, EngineEvent, HandoffPort, Offer, SourceRequest, SpansReady
from kvbaton.core.handoff import Aux, BlockLists, HandoffKey, Mode, Span, room_transfer_id
from kvbaton.core.timeline import Note, Side
from kvbaton.engines.sglang.halves import HalfSettings, Halves, SourceHalf, TargetHalf
from kvbaton.errors import LocalError, ProtocolError

__all__ = ["ADDRESS", "PAGE", "PROMPT", "ROOM", "Rig", "ScriptedAgents", "key_of"]

PAGE = 4
ROOM = 77
PROMPT = tuple(range(10))
ADDRESS = "127.0.0.1:7001"
AUX = Aux(5, -0.5, opaque=b"row")


def key_of(room: int = ROOM) -> HandoffKey:
    """The key of the hand-off under a room."""
    return HandoffKey(room_transfer_id(room))


@dataclass
class ScriptedAgents(HandoffPort):
    """Records every call; events are what a test pushes."""

    calls: list[tuple[str, object]] = field(default_factory=list)
    waiting: list[EngineEvent] = field(default_factory=list)
    refuses: bool = False

    def push(self, *events: EngineEvent) -> None:
        """Events that are taken next."""
        self.waiting += events

    def events(self) -> list[EngineEvent]:
        events, self.waiting = self.waiting, []
        return events

    def named(self, name: str) -> list[object]:
        """The arguments of all calls of one method."""
        return [argument for call, argument in self.calls if call == name]

    def expect_target(self, key: HandoffKey, prompt: str) -> None:
        if self.refuses:
            raise LocalError("the agents have stopped")
        self.calls.append(("expect_target", (key, prompt)))

    def spans_ready(self, key: HandoffKey, blocks: BlockLists, spans: tuple[Span, ...]) -> None:
        del key
        self.calls.append(("spans_ready", (blocks, spans)))

    def spans_ready_all(self, ready: Sequence[SpansReady]) -> None:
        self.calls.append(("spans_ready_all", ready))

    def retract(self, key: HandoffKey) -> None:
        self.calls.append(("retract", key))

    def offer(self, offer: Offer) -> None:
        self.calls.append(("offer", offer))

    def expect_source(self, request: SourceRequest) -> None:
        self.calls.append(("expect_source", request))

    def allocated(self, allocation: Allocation) -> None:
        self.calls.append(("allocated", allocation))

    def decline(self, request: SourceRequest, reason: str) -> None:
        self.calls.append(("decline", (request, reason)))

    def refuse(self, key: HandoffKey, reason: str) -> None:
        self.calls.append(("refuse", (key, reason)))

    def cancel(self, key: HandoffKey, side: Side | None = None) -> None:
        self.calls.append(("cancel", (key, side)))


class Rig:
    """One rank's halves over scripted agents."""

    def __init__(self, mode: Mode = Mode.PUSH, follows: bool = False, prefill_dp_size: int = 1) -> None:
        self.agents = ScriptedAgents()
        self.rows: dict[int, tuple[Aux, int]] = {}
        self.poisoned: list[int] = []
        self.notes: list[Note] = []
        self.row_problem = ""
        announces = mode is Mode.PUSH
        settings = HalfSettings(PAGE, (0, 2), announces=announces, follows=follows, prefill_dp_size=prefill_dp_size)
        self.halves = Halves(
            self.agents, settings, lambda _: AUX, self._write, lambda lists: self.poisoned.extend(lists[0]), self.notes.append
        )

    def source(self, room: object = ROOM, prompt: Sequence[int] = PROMPT) -> SourceHalf:
        """What SGLang's sender is made of."""
        return SourceHalf(self.halves, room, prompt)

    def target(self, room: object = ROOM, address: str = ADDRESS, prompt: Sequence[int] = PROMPT) -> TargetHalf:
        """What SGLang's receiver is made of."""
        return TargetHalf(self.halves, room, address, prompt)

    def _write(self, row: int, aux: Aux, room: int) -> None:
        if self.row_problem:
            raise ProtocolError(self.row_problem)
        self.rows[row] = (aux, room)
