"""Planted bugs of the embedded engine of production: one known mistake each, in its core, its scheduler or its block pool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvbaton.agent.engine_port import Landed, SourceEnded, TargetEnded
from kvbaton.engines.embedded.engine_core import EngineCore
from kvbaton.engines.embedded.pool import BlockPool
from kvbaton.engines.embedded.request import FinishReason
from kvbaton.engines.embedded.scheduler import Scheduler, StepPlan
from kvbaton.engines.embedded.sequence import Sequence as EngineSequence
from kvbaton.engines.embedded.sequence import SequenceStatus
from kvbaton.sim.embedded_engine import EmbeddedClasses

__all__ = ["engine_plants"]


class _PublishedEarly(Scheduler):
    """Offers a prefix to other requests when its blocks are allocated, not when they have landed."""

    def _allocate(self, sequence: EngineSequence) -> bool:
        is_allocated = super()._allocate(sequence)
        if is_allocated and sequence.awaits_source:
            digests = sequence.digests(sequence.prompt_tokens)
            self.pool.register(sequence.blocks[: len(digests)], digests)
        return is_allocated


class _NoReserve(Scheduler):
    """Lets prefills without a grant take the last blocks: two full instances wait for each other for ever."""

    def _leaves(self, sequence: EngineSequence) -> int:
        return 0 if sequence.is_source else super()._leaves(sequence)


class _NoReserveInPull(Scheduler):
    """Lets prefills of an instance with both roles take the last blocks: two of these wait for each other's targets."""

    def _leaves(self, sequence: EngineSequence) -> int:
        return super()._leaves(sequence) if self.reserve.has_grants else 0


class _NoReserveForGrants(Scheduler):
    """Lets targets of an instance with both roles take the last blocks: two of these wait for each other's sources."""

    def _leaves(self, sequence: EngineSequence) -> int:
        return 0 if sequence.awaits_source else super()._leaves(sequence)


class _NotRetracted(Scheduler):
    """Frees the blocks of a preempted source as those of any request, although it has announced what lies in them."""

    def _preempt(self, sequence: EngineSequence, plan: StepPlan) -> None:
        sequence.spans_announced = 0
        super()._preempt(sequence, plan)


class _BlocksNotReturned(EngineCore):
    """Forgets the blocks of a target whose hand-off ended without landing."""

    def _take_end(self, event: SourceEnded | Landed | TargetEnded) -> None:
        sequence = self._targets.get(event.key)
        if isinstance(event, TargetEnded) and sequence is not None:
            sequence.blocks = []
        super()._take_end(event)


class _FreedTwice(EngineCore):
    """Frees the blocks of a target when its hand-off fails, and again when its request ends."""

    def _take_end(self, event: SourceEnded | Landed | TargetEnded) -> None:
        sequence = self._targets.get(event.key)
        if isinstance(event, TargetEnded) and sequence is not None and sequence.is_held:
            self._scheduler.pool.release(sequence.blocks, held=True)
        super()._take_end(event)


class _FreedWhileFilled(EngineCore):
    """Frees the blocks of a target when its client leaves, while they are still being filled."""

    def _abort(self, sequence: EngineSequence, reason: FinishReason, error: str) -> None:
        is_filled = sequence.status is SequenceStatus.FETCHING
        super()._abort(sequence, reason, error)
        if is_filled:
            self._drop(sequence)


class _FreedWhenOffered(BlockPool):
    """Frees the blocks of a source when its prefill is complete, not when the hand-off is over."""

    def hold(self, blocks: Iterable[int]) -> None:
        self.release(list(blocks))

    def release(self, blocks: Sequence[int], *, held: bool = False) -> None:
        super().release([block for block in blocks if not held or self._holds[block]], held=held)


def engine_plants() -> Iterator[tuple[str, str, str, EmbeddedClasses]]:
    """Name, mistake, the rule that it breaks, and the classes that make it."""
    early = EmbeddedClasses(scheduler=_PublishedEarly)
    yield "published-early", "prefix published before landed", "half-landed prefix", early
    yield "no-reserve", "last blocks held without a grant", "spurious failure", EmbeddedClasses(scheduler=_NoReserve)
    pulled = EmbeddedClasses(scheduler=_NoReserveInPull)
    yield "no-reserve-in-pull", "last blocks taken by prefills, with both roles in pull", "spurious failure", pulled
    granted = EmbeddedClasses(scheduler=_NoReserveForGrants)
    yield "no-reserve-for-grants", "last blocks taken by targets, with both roles in push", "spurious failure", granted
    lost = EmbeddedClasses(core=_BlocksNotReturned)
    yield "blocks-not-returned", "blocks of a failed request forgotten", "every block is back", lost
    yield "freed-twice", "blocks of a failed request freed twice", "blocks conserved", EmbeddedClasses(core=_FreedTwice)
    filled = EmbeddedClasses(core=_FreedWhileFilled)
    yield "freed-while-filled", "blocks of a cancelled target freed at once", "epoch", filled
    offered = EmbeddedClasses(pool=_FreedWhenOffered)
    yield "freed-when-offered", "blocks of a complete prefill freed at once", "foreign byte", offered
    kept = EmbeddedClasses(scheduler=_NotRetracted)
    yield "not-retracted", "announcements of a preempted prefill not taken back", "spurious failure", kept
