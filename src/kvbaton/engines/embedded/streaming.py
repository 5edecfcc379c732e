"""Streaming: announces to the agents what the sources of a step have computed, layer by layer, while the next layer runs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from kvbaton.agent.engine_port import HandoffPort, SpansReady
from kvbaton.core.handoff import BlockLists, HandoffKey, Span
from kvbaton.engines.embedded.scheduler import ScheduledChunk
from kvbaton.engines.embedded.sequence import Sequence

__all__ = ["StepStream", "announce_cached"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _SourceChunk:
    """What the spans of one source's chunk have in common."""

    key: HandoffKey
    blocks: BlockLists
    first_span: int
    first_token: int
    end_token: int


class StepStream:
    """One step's listener: called with the number of each layer whose keys and values are in the cache.

    Never raises, because the model calls it in the middle of a step: `failed` is set when the agents refused a call, and then
    no further layer is announced.
    """

    def __init__(self, port: HandoffPort, chunks: Iterable[ScheduledChunk]) -> None:
        self.failed = False
        self._port = port
        self._layers_announced = 0
        self._sequences = [chunk.sequence for chunk in chunks]
        self._parts = [
            _SourceChunk(
                chunk.sequence.key,
                chunk.sequence.block_lists,
                chunk.sequence.spans_announced,
                chunk.sequence.computed,
                chunk.sequence.computed + chunk.count,
            )
            for chunk in chunks
        ]

    def __call__(self, layer: int) -> None:
        """Announce this layer of every source of the step, in one call."""
        if self.failed:
            return
        number, end_layer = self._layers_announced, layer + 1
        self._layers_announced += 1
        for sequence in self._sequences:
            sequence.spans_announced += 1
        try:
            self._port.spans_ready_all(
                [
                    SpansReady(
                        part.key,
                        part.blocks,
                        (Span(part.first_span + number, part.first_token, part.end_token, layer, end_layer),),
                    )
                    for part in self._parts
                ]
            )
        except Exception:
            _logger.exception("the agents refused layer %d of %d hand-offs", layer, len(self._parts))
            self.failed = True


def announce_cached(port: HandoffPort, sequence: Sequence, layers: int) -> None:
    """Announce the part of a prompt that was in the prefix cache when its prefill began: one span over all layers."""
    span = Span(sequence.spans_announced, 0, sequence.computed, 0, layers)
    sequence.spans_announced += 1
    port.spans_ready(sequence.key, sequence.block_lists, (span,))
