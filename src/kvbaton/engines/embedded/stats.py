"""What an engine has counted: the counters it keeps, and the snapshot that others read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbaton.core.handoff import Outcome
from kvbaton.engines.embedded.request import FinishReason
from kvbaton.engines.embedded.scheduler import Scheduler

__all__ = ["Counters", "EngineStats"]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine as it was after its last step."""

    blocks_total: int
    blocks_free: int
    blocks_in_use: int
    blocks_held: int
    blocks_cached: int
    requests: Mapping[str, int]
    """Live requests by state: waiting, prefilling, fetching, decoding, held, retracting."""
    requests_total: Mapping[str, int]
    """Finished requests by finish reason."""
    handoffs_total: Mapping[tuple[str, str], int]
    """Ended hand-offs by side (`source`, `target`) and outcome."""
    prompt_tokens_total: int
    generated_tokens_total: int
    cached_tokens_total: int
    preemptions_total: int
    steps_total: int
    moved_bytes_total: int = 0
    """Bytes of landed hand-offs."""


@dataclass(slots=True)
class Counters:
    """Counts what has happened; belongs to the engine's thread."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    moved_bytes: int = 0
    finished: Counter[str] = field(default_factory=lambda: Counter({reason.value: 0 for reason in FinishReason}))
    handoffs: Counter[tuple[str, str]] = field(default_factory=Counter)

    def handoff(self, side: str, outcome: Outcome) -> None:
        """Count the end of a hand-off on one side."""
        self.handoffs[side, outcome.value] += 1

    def snapshot(self, scheduler: Scheduler) -> EngineStats:
        """Everything as it is now, in a value that does not change any more."""
        pool = scheduler.pool
        return EngineStats(
            blocks_total=pool.total,
            blocks_free=pool.free,
            blocks_in_use=pool.in_use,
            blocks_held=pool.held,
            blocks_cached=pool.cached,
            requests={phase.value: count for phase, count in scheduler.counts().items()},
            requests_total=dict(self.finished),
            handoffs_total=dict(self.handoffs),
            prompt_tokens_total=self.prompt_tokens,
            generated_tokens_total=self.generated_tokens,
            cached_tokens_total=scheduler.cached_tokens_total,
            preemptions_total=scheduler.preemptions_total,
            steps_total=self.steps,
            moved_bytes_total=self.moved_bytes,
        )
