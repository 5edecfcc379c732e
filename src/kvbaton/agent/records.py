"""What is known of one live hand-off beside its state: the counts and lists of a source side and of a target side."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbaton.agent.engine_port import Allocation, Offer, SourceWanted
from kvbaton.agent.ports import LegId
from kvbaton.core.aux_area import AuxArea, AuxPointer
from kvbaton.core.handoff import Aux, AuxWay, BlockLists, Executor, HandoffKey, Incarnation, Integrity, Outcome, Span
from kvbaton.core.lifecycle import TARGET, SourceState, TargetState
from kvbaton.core.messages import Grant

__all__ = ["Declined", "RankSums", "SourceRecord", "TargetRecord", "sums_by_leg"]

RankSums = dict[tuple[int, int], tuple[tuple[int, int], ...]]
"""(rank, span number) -> (leg number, checksum) of every leg of that rank."""


def sums_by_leg(sums: RankSums) -> dict[tuple[int, int], int]:
    """(leg number, span number) -> checksum."""
    return {(leg, span): value for (_, span), values in sums.items() for leg, value in values}


@dataclass(frozen=True, slots=True)
class Declined:
    """A target's word that it will not come for a hand-off which its source does not know yet, and how long it counts.

    Without a prompt it is about every hand-off of a transfer id, each counted once: `taken` has those that it is not about
    any more.
    """

    prompt: str
    reason: str
    until: float
    taken: set[HandoffKey] = field(default_factory=set)


@dataclass(slots=True)
class SourceRecord:
    """One live hand-off as its source knows it: the state, and the counts and lists beside it."""

    key: HandoffKey
    state: SourceState
    lease_until: float
    generation: int = 0
    prompt: str = ""
    is_expected: bool = True
    blocks: BlockLists = ()
    spans: list[Span] = field(default_factory=list)
    announced: int = 0
    moving: int = 0
    offer: Offer | None = None
    held_since: float = 0.0
    target: Incarnation | None = None
    grant: Grant | None = None
    open_legs: dict[int, LegId] = field(default_factory=dict)
    moved: dict[int, set[int]] = field(default_factory=dict)
    summing: int = 0
    sums: RankSums = field(default_factory=dict)
    is_asked: bool = False
    aux_pointer: AuxPointer | None = None
    is_confirmed: bool = False
    verdict: Outcome = Outcome.FAILED
    reason: str = ""
    stop_asked: bool = False

    @property
    def grant_number(self) -> int:
        """The number of the grant in hand; 0 without one."""
        return 0 if self.grant is None else self.grant.grant

    @property
    def leg(self) -> LegId:
        """What this record's legs are called in this generation."""
        return LegId(self.key, self.grant_number, self.generation)

    @property
    def writes(self) -> bool:
        """Whether this side executes the copies."""
        return self.grant is not None and self.grant.executor is Executor.SOURCE_WRITES

    @property
    def integrity(self) -> Integrity:
        """How much the target wants to be summed."""
        return Integrity.OFF if self.grant is None else self.grant.integrity


@dataclass(slots=True)
class TargetRecord:
    """One live hand-off as its target knows it: the state, and the counts and lists beside it."""

    wanted: SourceWanted
    give_up_at: float
    retry_at: float
    retry_s: float
    asked: int = 0
    """The number of the last thing that the source was told or asked for it; grows with time."""
    state: TargetState = TARGET.start
    allocation: Allocation | None = None
    source: Incarnation | None = None
    grant: int = 0
    epoch: int = 0
    executor: Executor = Executor.TARGET_READS
    generation: int = 0
    source_blocks: BlockLists = ()
    spans: dict[int, Span] = field(default_factory=dict)
    unmoved: dict[int, Span] = field(default_factory=dict)
    moved: dict[int, set[int]] = field(default_factory=dict)
    span_count: int | None = None
    summing: set[int] = field(default_factory=set)
    sums: RankSums = field(default_factory=dict)
    source_sums: dict[tuple[int, int], int] = field(default_factory=dict)
    aux: Aux | None = None
    aux_way: AuxWay = AuxWay.CONTROL
    aux_pointer: AuxPointer | None = None
    source_area: AuxArea | None = None
    is_confirmed: bool = False
    open_legs: dict[int, LegId] = field(default_factory=dict)
    peer_is_quiet: bool = False
    quarantined: int = 0
    stop_until: float = 0.0
    verdict: Outcome = Outcome.FAILED
    reason: str = ""
    held_s: float = 0.0
    prefilled_at: float = 0.0
    on_wire: int = 0
    """Spans of all ranks that are being moved right now."""
    wire_since: float = 0.0
    wire_s: float = 0.0
    """For how long something was being moved."""
    exposed_wire_s: float = 0.0
    """How much of that lay after the source's word that its first token is chosen, and was hidden by no computing."""
    bytes_planned: int = 0
    bytes_moved: int = 0

    @property
    def key(self) -> HandoffKey:
        """The key of the hand-off."""
        return self.wanted.key

    @property
    def leg(self) -> LegId:
        """What this record's legs are called in this generation."""
        return LegId(self.key, self.grant, self.generation)
