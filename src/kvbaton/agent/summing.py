"""Checksums of a rank's own memory: a list of spans to sum, worked off a bounded piece at a time, so that nobody waits."""

from __future__ import annotations

import zlib
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvbaton.agent.ports import LegId, LegSummed, Memory, SumAsk
from kvbaton.core.checks import Pieces, plan_pieces
from kvbaton.core.handoff import HandoffKey
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
        """Go on with the CRC-32 `value` over these pieces, in order."""
        view = self._view
        for offset, size in pieces.tolist():
            value = zlib.crc32(view[offset : offset + size], value)
        return value

    def read(self, offset: int, size_bytes: int) -> bytes:
        """A copy of what lies there."""
        return bytes(self._view[offset : offset + size_bytes])

    def write(self, offset: int, data: bytes) -> None:
        """Let `data` lie there."""
        self._view[offset : offset + len(data)] = data


@dataclass(slots=True)
class _Job:
    leg: LegId
    span: int
    pieces: Pieces
    done: int = 0
    value: int = 0


class Summer:
    """The sums that one rank was asked for. Each turn goes on with one hand-off, then it is the turn of the next one."""

    def __init__(self, rank: int, layout: Layout, memory: Memory | None, report: Callable[[LegSummed], None]) -> None:
        self._rank = rank
        self._layout = layout
        self._memory = memory
        self._report = report
        self._jobs: OrderedDict[tuple[Side, HandoffKey], deque[_Job]] = OrderedDict()

    @property
    def has_work(self) -> bool:
        """Whether `work` has something to do."""
        return bool(self._jobs)

    def ask(self, ask: SumAsk) -> None:
        """Put spans on the list; what cannot be summed is reported at once."""
        jobs = deque[_Job]()
        for span in ask.spans:
            try:
                if self._memory is None:
                    raise ConfigError("this rank was given no memory to sum; switch checksums off or give it one")
                tokens = (span, ask.cached_tokens, ask.integrity, ask.total_tokens)
                pieces = plan_pieces(self._layout, ask.blocks, ask.leg.key, *tokens)
            except KVBatonError as error:
                self._report(LegSummed(ask.leg, ask.side, self._rank, span.number, 0, f"checksum: {error}"))
            else:
                jobs.append(_Job(ask.leg, span.number, pieces))
        if jobs:
            self._jobs.setdefault((ask.side, ask.leg.key), deque()).extend(jobs)

    def drop(self, side: Side, key: HandoffKey) -> None:
        """Forget what one side of a hand-off asked for."""
        self._jobs.pop((side, key), None)

    def work(self) -> None:
        """Sum a few MiB at most, and report the spans that are through."""
        left = _TURN_BYTES
        while self._jobs and left > 0:
            (side, key), jobs = next(iter(self._jobs.items()))
            while jobs and left > 0:
                left -= self._go_on(side, jobs, left)
            if jobs:
                self._jobs.move_to_end((side, key))
            else:
                del self._jobs[side, key]

    def _go_on(self, side: Side, jobs: deque[_Job], budget: int) -> int:
        """Go on with the first job, and report it when it is through, or when it cannot be done; returns the bytes."""
        job, summed, error = jobs[0], 0, ""
        try:
            summed = self._sum(job, budget)
        except Exception as problem:
            error = f"checksum: {type(problem).__name__}: {problem}"
            raise
        finally:
            if error or job.done == len(job.pieces):
                jobs.popleft()
                self._report(LegSummed(job.leg, side, self._rank, job.span, job.value, error))
        return summed

    def _sum(self, job: _Job, budget: int) -> int:
        """Sum pieces of about `budget` bytes, one at least; returns the bytes."""
        if self._memory is None or job.done == len(job.pieces):
            return 0
        sizes = np.cumsum(job.pieces[job.done : job.done + budget, 1])
        count = max(1, int(np.searchsorted(sizes, budget, side="right")))
        job.value = self._memory.sum(job.pieces[job.done : job.done + count], job.value)
        job.done += count
        return int(sizes[count - 1])
