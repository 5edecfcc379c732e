"""Which layers of a step every rank has computed: those are announced to the agents, several at a time, and no others.

A chunk is computed by all ranks of all stages, each at its own pace: a rank of the same stage may be a layer ahead, a later
stage may still compute the step before. The first rank counts what each rank reports. Reports can come before the first rank
has begun the step itself, and after the hand-off of a chunk has ended. So layers of an earlier step can be announced after
layers of a later one. The agents believe the block list that comes last, and that must be the longest: all are announced with
the blocks of the newest step that has begun.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvbaton.agent.engine_port import HandoffPort, SpansReady
from kvbaton.core.handoff import BlockLists, HandoffKey, Span
from kvbaton.core.layout import Layout
from kvbaton.engines.vllm.orders import ComputedChunk
from kvbaton.errors import KVBatonError

__all__ = ["ComputedSpans", "LayerGroups", "SpanStep"]

log = logging.getLogger(__name__)

_LEAST_BYTES = 8 << 20
"""What a report holds at least, unless it is the last one of its step."""


class LayerGroups:
    """Which computed layers of a step one rank reports together. Belongs to the thread of its worker.

    A report makes two interpreters work, one of which launches the kernels of the next layers, and asks for a copy of its
    own: on a GPU a report per layer made prefills of 32 layers 12 to 90 % slower. So a report holds half of the layers that
    are not reported yet. Its copy has the time of the other half, and the last report has one layer: as little is left to
    move after the step as with a report per layer.
    """

    def __init__(self, layout: Layout, least_bytes: int = _LEAST_BYTES) -> None:
        self.layers = layout.layers
        """Those of this rank."""
        groups = [group for group in layout.groups if not group.is_state]
        self._token_bytes = sum(group.token_bytes * len(group.layers) for group in groups) / max(1, len(self.layers))
        self._least_bytes = least_bytes
        self._least = 0
        self._size = 0
        self._left: set[int] = set()
        self._computed: list[int] = []

    def begin(self, chunks: Sequence[ComputedChunk]) -> None:
        """A step computes these chunks; without any there is nothing to report."""
        self._computed.clear()
        self._left = set(self.layers if chunks else ())
        layer_bytes = self._token_bytes * sum(chunk.end_token - chunk.first_token for chunk in chunks)
        # Of states nothing can be moved before the prefill is over.
        self._least = math.ceil(self._least_bytes / layer_bytes) if layer_bytes else len(self.layers)
        self._size = self._next_size()

    def computed(self, layer: int) -> Sequence[int]:
        """A layer is computed; returns the layers to report now, mostly none."""
        if layer not in self._left:
            return ()
        self._left.discard(layer)
        self._computed.append(layer)
        return self._take() if len(self._computed) >= self._size else ()

    def rest(self) -> Sequence[int]:
        """The step is over: returns the layers that were not reported, those without a hook too."""
        self._computed += sorted(self._left)
        self._left.clear()
        return self._take()

    def _take(self) -> Sequence[int]:
        taken, self._computed = self._computed, []
        self._size = self._next_size()
        return taken

    def _next_size(self) -> int:
        return max(1, self._least, len(self._left) // 2)


@dataclass(slots=True)
class SpanStep:
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
        self._steps: dict[int, SpanStep] = {}
        self._begun = -1
        self._numbers: dict[HandoffKey, int] = {}
        self._blocks: dict[HandoffKey, BlockLists] = {}
        """Those of each hand-off in the newest step, from its first chunk until it is forgotten."""

    def begin(self, step: int, chunks: Iterable[ComputedChunk]) -> None:
        """A step begins here: announce the layers of it that all of their ranks have reported already."""
        with self._lock:
            self._begun = max(self._begun, step)
            known = self._steps.pop(step, None) or SpanStep()
            known.chunks = {chunk.key: chunk for chunk in chunks}
            self._blocks |= {key: chunk.blocks for key, chunk in known.chunks.items()}
            if known.chunks:
                self._steps[step] = known
                self._announce(step, known, self._reported_by_all(known, known.reports), known.chunks)

    def computed(self, step: int, layers: Iterable[int]) -> None:
        """One rank has computed these layers of a step: announce those that it was the last one for."""
        with self._lock:
            known = self._steps.get(step)
            if known is None:
                if step <= self._begun:
                    return  # Every chunk of it was announced or given up.
                known = self._steps[step] = SpanStep()
            layers = tuple(layers)
            known.reports.update(layers)
            if known.chunks:  # else it has not begun here
                self._announce(step, known, self._reported_by_all(known, layers), known.chunks)

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
            self._blocks.pop(key, None)
            return self._numbers.pop(key, None) is not None

    def _reported_by_all(self, known: SpanStep, layers: Iterable[int]) -> list[int]:
        return [each for each in layers if known.reports[each] == self._holders[each]]

    def _drop(self, step: int, known: SpanStep, key: HandoffKey) -> None:
        if known.chunks.pop(key, None) is not None and not known.chunks:
            self._steps.pop(step, None)

    def _announce(self, step: int, known: SpanStep, layers: list[int], keys: Iterable[HandoffKey]) -> None:
        """Announce layers of these hand-offs, in one call; a step that is wholly announced is forgotten."""
        ranges = _ranges(sorted(layers))
        ready = [SpansReady(key, self._lists(self._blocks[key]), self._spans(known.chunks[key], ranges)) for key in keys]
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
