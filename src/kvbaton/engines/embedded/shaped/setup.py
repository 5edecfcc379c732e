"""What a rank process is told at its start, and how it is called in messages."""

from __future__ import annotations

import msgspec

from kvbaton.core.handoff import Incarnation
from kvbaton.engines.embedded.shaped.cut import Cut

__all__ = ["Links", "RankSetup", "RankTransport", "rank_name"]


class Links(msgspec.Struct, frozen=True):
    """File descriptors of the sockets of one rank: to its leader twice, within its stage, and to the stages beside it."""

    steps: int
    agent: int
    stage: tuple[int, ...] = ()
    before: int | None = None
    after: int | None = None

    def numbers(self) -> tuple[int, ...]:
        """All of them."""
        beside = (number for number in (self.before, self.after) if number is not None)
        return (self.steps, self.agent, *self.stage, *beside)


class RankTransport(msgspec.Struct, frozen=True):
    """How a rank moves bytes. `drop` names what is not to be moved, for controls; see `drops.py`.

    `unfenced_writes` lets peers write into its memory, and it into theirs.
    """

    name: str
    incarnation: Incarnation
    timeout_s: float
    host: str
    advertise_host: str
    drop: str = ""
    unfenced_writes: bool = False


class RankSetup(msgspec.Struct, frozen=True):
    """One rank: its model and part of it, its cache, its transport and its links."""

    model: str
    cut: Cut
    blocks: int
    block_tokens: int
    dtype: str
    transport: RankTransport
    links: Links
    step_s: float


def rank_name(cut: Cut) -> str:
    """How a rank is called in messages: by its coordinates."""
    return f"rank pp{cut.pp_rank},tp{cut.tp_rank}"
