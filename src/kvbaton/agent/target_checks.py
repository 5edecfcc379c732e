"""What the target half of a coordinator checks before it lets decode start: spans that are the whole cache, and checksums."""

from __future__ import annotations

from collections.abc import Collection

from kvbaton.agent.ports import SumAsk
from kvbaton.agent.records import TargetRecord, sums_by_leg
from kvbaton.agent.target_effects import TargetEffects
from kvbaton.core.checks import sums_problem
from kvbaton.core.handoff import Executor, Integrity, Span, span_problem
from kvbaton.core.timeline import Side

__all__ = ["TargetChecks"]


class TargetChecks(TargetEffects):
    """Answers from the counts and sums of a record; asks the ranks for sums, and waits for nothing."""

    @property
    def sums_wanted(self) -> bool:
        """Whether what was moved has to be compared with what the source sums."""
        return self._settings.integrity is not Integrity.OFF

    def sum_moved(self, record: TargetRecord, rank: int, number: int) -> None:
        """A span has arrived on a rank: let it be summed there, if sums are wanted."""
        span = record.spans.get(number)
        if self.sums_wanted and span is not None:
            record.summing.add(number)
            self._ask_for_sums(record, (rank,), (span,))

    def sum_written(self, record: TargetRecord) -> None:
        """Once a source that writes has confirmed it, let every rank sum what lies in our blocks, if sums are wanted."""
        is_known = record.is_confirmed and len(record.spans) == record.span_count
        if self.sums_wanted and is_known and not record.summing and record.executor is Executor.SOURCE_WRITES:
            record.summing |= record.spans.keys()
            self._ask_for_sums(record, [rank.rank for rank in self._card.ranks], tuple(record.spans.values()))

    def _ask_for_sums(self, record: TargetRecord, ranks: Collection[int], spans: tuple[Span, ...]) -> None:
        if record.allocation is not None:
            pull, integrity = record.allocation, self._settings.integrity
            how = (pull.cached_tokens, integrity, pull.tokens, record.source)
            ask = SumAsk(record.leg, Side.TARGET, pull.blocks, spans, *how)
            for rank in ranks:
                self._ranks.sum_spans(rank, ask)

    def is_summed(self, record: TargetRecord) -> bool:
        """Whether every span of every rank was summed here, or need not be."""
        return not self.sums_wanted or len(record.sums) == len(self._card.ranks) * (record.span_count or 0)

    def sums_problem(self, record: TargetRecord) -> str:
        """Why what lies in our blocks is not what the source summed; empty when it is, or nobody wants to know."""
        if not self.sums_wanted:
            return ""
        return sums_problem(record.spans.values(), sums_by_leg(record.sums), record.source_sums)

    def span_problem(self, record: TargetRecord) -> str:
        """Why the spans are not the whole cache, each part once; empty when they are.

        A source that writes knows itself what it has written, unless its spans are to be summed.
        """
        if record.allocation is None or (record.executor is Executor.SOURCE_WRITES and not self.sums_wanted):
            return ""
        layers = self._card.layers
        whole = Span(0, 0, record.allocation.tokens, layers.start, layers.stop)
        return span_problem(record.spans.values(), whole)

    def is_complete(self, record: TargetRecord) -> bool:
        """Whether every span of every rank is in and summed, and the aux record is in."""
        if record.span_count is None or not self.has_aux(record) or not self.is_summed(record):
            return False
        if record.executor is Executor.SOURCE_WRITES:
            return record.is_confirmed
        return all(len(record.moved.get(rank.rank, ())) == record.span_count for rank in self._card.ranks)

    def has_aux(self, record: TargetRecord) -> bool:
        """Whether the aux record is in."""
        return record.aux is not None

    def is_quiet(self, record: TargetRecord) -> bool:
        """Whether nobody, here or there, can write to the blocks of this hand-off any more."""
        if record.open_legs:
            return False
        return record.executor is Executor.TARGET_READS or record.peer_is_quiet or not record.grant
