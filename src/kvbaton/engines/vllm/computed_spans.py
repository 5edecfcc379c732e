"""Which layers of a step every rank has computed: those are announced to the agents, and no others.

A chunk is computed by all ranks of all stages, each at its own pace: a rank of the same stage may be a layer ahead, a later
stage may still compute the step before. The first rank counts what each rank reports. Reports can come before the first rank
has begun the step itself, and after the hand-off of a chunk has ended.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvbaton.agent.engine_port import HandoffPort, SpansReady
from kvbaton.core.handoff import BlockLists, HandoffKey, Span
from kvbaton.engines.vllm.orders import ComputedChunk
from kvbaton.errors import KVBatonError

__all__ = ["ComputedSpans"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _SpanStep:
    """One step: the chunks whose hand-offs are live, how many ranks have reported each layer, and what was announced."""

    chunks: dict[HandoffKey, ComputedChunk] = field(default_factory=dict)
    reports: Counter[int] = field(default_factory=Counter)
    announced: set[int] = field(default_factory=set)


class ComputedSpans:
    """`holders` states for each layer how many ranks compute it. Safe to call from any thread.

    `lists` turns vLLM's block lists into those of the layout.
    """

    def __init__(self, port: HandoffPort, holders: Mapping[int, int], lists: Callable[[BlockLists], BlockLists]) -> None:
        self._port = port
        self._holders = holders
        self._lists = lists
        self._lock = threading.Lock()
        self._steps: dict[int, _SpanStep] = {}
        self._begun = -1
        self._numbers: dict[HandoffKey, int] = {}

    def begin(self, step: int, chunks: Iterable[ComputedChunk]) -> None:
        """A step begins here; layers of it that other ranks have reported already may be complete only when we report them."""
        with self._lock:
            self._begun = max(self._begun, step)
            known = self._steps.pop(step, None) or _SpanStep()
            known.chunks = {chunk.key: chunk for chunk in chunks}
            if known.chunks:
                self._steps[step] = known

    def computed(self, step: int, layers: Iterable[int]) -> None:
        """One rank has computed these layers of a step: announce those that it was the last one for."""
        with self._lock:
            known = self._steps.get(step)
            if known is None:
                if step <= self._begun:
                    return  # Every chunk of it was announced or given up.
                known = self._steps[step] = _SpanStep()
            layers = tuple(layers)
            known.reports.update(layers)
            # No layer becomes complete by `begin`: a rank of the first stage reports its own layers after that, and later
            # stages begin a step after the first one.
            self._announce(step, known, [each for each in layers if known.reports[each] == self._holders[each]], known.chunks)

    def complete(self, key: HandoffKey) -> None:
        """vLLM has the output of every rank, so all of this hand-off is computed, whatever reports are still on their way."""
        with self._lock:
            for step, known in list(self._steps.items()):
                if key in known.chunks:
                    missing = [layer for layer in self._holders if layer not in known.announced]
                    self._announce(step, known, missing, [key])
                    self._drop(step, known, key)

    def forget(self, key: HandoffKey) -> bool:
        """Announce nothing more of a hand-off; what is computed of it later counts from 0. Returns whether anything was.

        One call: a report that comes between a question and the order would announce what was just retracted.
        """
        with self._lock:
            for step, known in list(self._steps.items()):
                self._drop(step, known, key)
            return self._numbers.pop(key, None) is not None

    def _drop(self, step: int, known: _SpanStep, key: HandoffKey) -> None:
        if known.chunks.pop(key, None) is not None and not known.chunks:
            self._steps.pop(step, None)

    def _announce(self, step: int, known: _SpanStep, layers: list[int], keys: Iterable[HandoffKey]) -> None:
        """Announce layers of these hand-offs, in one call; a step that is wholly announced is forgotten."""
        ranges = _ranges(sorted(layers))
        ready = [SpansReady(key, self._lists(known.chunks[key].blocks), self._spans(known.chunks[key], ranges)) for key in keys]
        if known.chunks.keys() == set(keys):
            known.announced.update(layers)
        if ready and ranges:
            try:
                self._port.spans_ready_all(ready)
            except KVBatonError:
                names = ", ".join(str(each.key) for each in ready)
                log.exception("computed layers could not be announced: hand-offs %s", names)
        if known.chunks and len(known.announced) == len(self._holders):
            self._steps.pop(step, None)

    def _spans(self, chunk: ComputedChunk, ranges: tuple[tuple[int, int], ...]) -> tuple[Span, ...]:
        number = self._numbers.get(chunk.key, 0)
        if ranges:
            self._numbers[chunk.key] = number + len(ranges)
        return tuple(
            Span(number + index, chunk.first_token, chunk.end_token, first, end) for index, (first, end) in enumerate(ranges)
        )


def _ranges(layers: list[int]) -> tuple[tuple[int, int], ...]:
    """Runs of neighbours, as (first, end)."""
    ranges: list[tuple[int, int]] = []
    for layer in layers:
        if ranges and ranges[-1][1] == layer:
            ranges[-1] = (ranges[-1][0], layer + 1)
        else:
            ranges.append((layer, layer + 1))
    return tuple(ranges)
