"""Checksums of a rank's own memory: a list of spans to sum, a few MiB at a time, so that no copy waits for them."""

from __future__ import annotations

import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kvbaton.agent.ports import Memory
from kvbaton.agent.rank_orders import CopyId, SpanSummed, SumSpans
from kvbaton.core.checks import LegPart, Pieces, plan_pieces
from kvbaton.core.handoff import HandoffKey, Span
from kvbaton.core.layout import Layout
from kvbaton.core.timeline import Side
from kvbaton.errors import ConfigError, KVBatonError

__all__ = ["RegionMemory", "Summer"]

_TURN_BYTES = 2 << 20


class RegionMemory:
    """The memory that a transport has registered, as one view of bytes."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def sum(self, pieces: Pieces, value: int) -> int:
        """Continue the CRC-32 `value` over these pieces, in order."""
        view = self._view
        for offset, size in pieces.tolist():
            value = zlib.crc32(view[offset : offset + size], value)
        return value

    def read(self, offset: int, size_bytes: int) -> bytes:
        return bytes(self._view[offset : offset + size_bytes])

    def write(self, offset: int, data: bytes) -> None:
        self._view[offset : offset + len(data)] = data


@dataclass(slots=True)
class _SumJob:
    copy: CopyId
    span: int
    parts: deque[tuple[int, Pieces]]
    """By the number of their leg; the first one is being summed."""
    done: int = 0
    value: int = 0
    sums: tuple[tuple[int, int], ...] = ()


class Summer:
    """The sums that one rank was asked for. Each turn continues one hand-off; then it is the turn of the next one."""

    def __init__(self, rank: int, layout: Layout, memory: Memory | None, report: Callable[[SpanSummed], None]) -> None:
        self._rank = rank
        self._layout = layout
        self._memory = memory
        self._report = report
        self._jobs: OrderedDict[tuple[Side, HandoffKey], deque[_SumJob]] = OrderedDict()

    @property
    def has_work(self) -> bool:
        """Whether `work` has something to do."""
        return bool(self._jobs)

    def add(self, order: SumSpans, parts: Mapping[int, LegPart] | None = None) -> None:
        """Put spans on the list, leg by leg of `parts`, or as one; what cannot be summed is reported at once."""
        jobs = deque[_SumJob]()
        of: Mapping[int, LegPart | None] = {self._rank: None} if parts is None else parts
        for span in order.spans:
            try:
                if self._memory is None:
                    raise ConfigError("this rank was given no memory to sum; switch checksums off or give it one")
                pieces = deque((number, self._pieces(order, span, part)) for number, part in of.items())
            except KVBatonError as error:
                self.refuse(order, span, str(error))
            else:
                jobs.append(_SumJob(order.copy, span.number, pieces))
        if jobs:
            self._jobs.setdefault((order.side, order.copy.key), deque()).extend(jobs)

    def refuse(self, order: SumSpans, span: Span, reason: str) -> None:
        """Report that a span is not summed, and why."""
        self._report(SpanSummed(order.copy, order.side, self._rank, span.number, (), f"checksum: {reason}"))

    def _pieces(self, order: SumSpans, span: Span, part: LegPart | None) -> Pieces:
        return plan_pieces(
            self._layout,
            order.blocks,
            order.copy.key,
            span,
            order.cached_tokens,
            order.integrity,
            order.total_tokens,
            part,
        )

    def drop(self, side: Side, key: HandoffKey) -> None:
        """Forget the sums of one side of a hand-off."""
        self._jobs.pop((side, key), None)

    def work(self) -> None:
        """Sum a few MiB at most, and report the spans that are complete."""
        left = _TURN_BYTES
        while self._jobs and left > 0:
            (side, key), jobs = next(iter(self._jobs.items()))
            while jobs and left > 0:
                left -= self._continue(side, jobs, left)
            if jobs:
                self._jobs.move_to_end((side, key))
            else:
                del self._jobs[side, key]

    def _continue(self, side: Side, jobs: deque[_SumJob], budget: int) -> int:
        """Continue the first job, and report it when it is complete, or when it cannot be done; returns the bytes."""
        job, summed, error = jobs[0], 0, ""
        try:
            summed = self._sum(job, budget)
        except Exception as problem:
            error = f"checksum: {type(problem).__name__}: {problem}"
            raise
        finally:
            if error or not job.parts:
                jobs.popleft()
                self._report(SpanSummed(job.copy, side, self._rank, job.span, job.sums, error))
        return summed

    def _sum(self, job: _SumJob, budget: int) -> int:
        """Sum pieces of about `budget` bytes of one leg, one at least; returns the bytes."""
        if self._memory is None or not job.parts:
            return 0
        (number, pieces), summed = job.parts[0], 0
        if job.done < len(pieces):
            sizes = np.cumsum(pieces[job.done : job.done + budget, 1])
            count = max(1, int(np.searchsorted(sizes, budget, side="right")))
            job.value = self._memory.sum(pieces[job.done : job.done + count], job.value)
            job.done += count
            summed = int(sizes[count - 1])
        if job.done == len(pieces):
            job.sums += ((number, job.value),)
            job.done = job.value = 0
            job.parts.popleft()
        return summed
