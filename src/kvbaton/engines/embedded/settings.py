"""The settings of an embedded engine: how much it runs at once, how it hands over, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass

from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings
from kvbaton.errors import ConfigError

__all__ = ["EngineSettings"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How much an engine runs at once. `step_tokens` bounds a step, so that prefill does not starve decode."""

    step_tokens: int = 256
    max_sequences: int = 64
    max_waiting: int = 4096
    poison: bool = False
    """Whether to fill the blocks of a target with a pattern before they are granted, so that a missing write shows."""
    handoff: HandoffSettings = DEFAULT_HANDOFF
    defer_timeout_s: float = 60.0
    """How long a source that may not start without a grant waits for it."""
    idle_wait_s: float = 0.5
    """How long an idle engine sleeps when nothing wakes it."""
    close_s: float = 30.0
    """How long `close` waits for the step under way."""

    def __post_init__(self) -> None:
        for name in ("step_tokens", "max_sequences", "max_waiting", "defer_timeout_s", "idle_wait_s", "close_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
