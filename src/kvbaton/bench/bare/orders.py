"""What a bare instance and the process that started it exchange: orders to the instance, reports from it, one per frame."""

from __future__ import annotations

import msgspec

from kvbaton.bench.bare.pages import SMALL, CacheShape
from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings, Limits
from kvbaton.core.handoff import Incarnation, Mode

__all__ = [
    "CHECK_ALL",
    "NO_HOLD",
    "Ask",
    "BareSettings",
    "Begin",
    "CancelTask",
    "Check",
    "HandoffEnd",
    "Ended",
    "Free",
    "Gauges",
    "Halt",
    "Here",
    "Hold",
    "Lift",
    "Offered",
    "Order",
    "Report",
    "SetFaults",
    "Task",
]


class BareSettings(msgspec.Struct, frozen=True):
    """Everything that a bare instance is started with."""

    blocks: int
    most_tokens: int
    shape: CacheShape = SMALL
    transport: str = "local"
    limits: Limits = Limits()
    handoff: HandoffSettings = DEFAULT_HANDOFF
    can_hold: bool = False
    """Whether hand-offs can be held and copies go wrong; that takes a wrapper round transport and sockets, which costs time."""


class Hold(msgspec.Struct, frozen=True):
    """Where the hand-offs of a task stand still until the hold is lifted.

    spans:  a source announces so many spans and then pauses (None: it goes on to the offer)
    pulls:  whether a target goes on from expecting a source to asking for the cache
    muted:  messages of these kinds (their tags) are swallowed before they leave
    stalls: copies that a target posts do not complete
    """

    spans: int | None = None
    pulls: bool = True
    muted: tuple[str, ...] = ()
    stalls: bool = False


NO_HOLD = Hold()
"""Nothing stands still."""


class Check(msgspec.Struct, frozen=True):
    """How a target looks at what has landed: every byte or a sample; and whether it keeps the blocks, to look again later."""

    every_byte: bool = True
    keeps: bool = False


CHECK_ALL = Check()
"""Every byte, once."""


class Task(msgspec.Struct, frozen=True):
    """Hand-offs `name`-0 to `name`-(count-1) of `tokens` tokens each, at most `in_flight` at a time.

    A source with `waits` announces nothing of a push before it has the grant. `source` is the control address that a target
    dials.
    """

    name: str
    side: str
    """`source` or `target`."""
    mode: Mode
    count: int
    in_flight: int
    tokens: int
    chunk_tokens: int
    source: str = ""
    waits: bool = True
    hold: Hold = NO_HOLD
    check: Check = CHECK_ALL


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Start a task."""

    task: Task


class Offered(msgspec.Struct, frozen=True, tag="offered"):
    """The first `count` hand-offs of a task are offered. A source reports it; in pull its target waits for it."""

    task: str
    count: int


class Lift(msgspec.Struct, frozen=True, tag="lift"):
    """Let a task's hand-offs go on from where they are held."""

    task: str


class CancelTask(msgspec.Struct, frozen=True, tag="cancel"):
    """Give all live hand-offs of a task up."""

    task: str


class Halt(msgspec.Struct, frozen=True, tag="halt"):
    """Begin no more hand-offs of a task; those that are live go on."""

    task: str


class Free(msgspec.Struct, frozen=True, tag="free"):
    """Look once more at every byte that a task has kept, then free it."""

    task: str


class SetFaults(msgspec.Struct, frozen=True, tag="set_faults"):
    """What goes wrong with copies from now on; see `kvbaton.transport.faulty`."""

    drop_writes: bool = False
    corrupt: bool = False


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Report the gauges; the answer has the same number."""

    number: int


Order = Begin | Offered | Lift | CancelTask | Halt | Free | SetFaults | Ask


class Here(msgspec.Struct, frozen=True, tag="here"):
    """The instance runs."""

    address: str
    incarnation: Incarnation
    pid: int


class HandoffEnd(msgspec.Struct, frozen=True, array_like=True):
    """One side of one hand-off is over: how, why, when by its own clock, and how long after it was begun."""

    index: int
    outcome: str
    reason: str
    at: float
    seconds: float


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Hand-offs that are over since the last report, and the blocks that are still in use in the whole instance."""

    task: str
    ends: list[HandoffEnd]
    blocks_in_use: int


class Gauges(msgspec.Struct, frozen=True, tag="gauges"):
    """The instance as it stands.

    `live` counts the hand-offs of its tasks and those that its agents have; `held`, per task, those that stand still.
    """

    number: int
    blocks_in_use: int
    live: int
    quarantined_blocks: int
    landed_total: int
    foreign_bytes: int
    errors_total: int
    held: dict[str, int]


Report = Here | Offered | Ended | Gauges
