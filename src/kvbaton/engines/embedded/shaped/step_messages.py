"""What the leader of an instance and its rank processes say to each other about steps."""

from __future__ import annotations

import msgspec
import numpy as np

from kvbaton.core.card import Endpoint
from kvbaton.core.handoff import Executor
from kvbaton.core.layout import Layout
from kvbaton.engines.embedded.model import Span

__all__ = [
    "Answer",
    "Ask",
    "LayerWritten",
    "Poison",
    "Poisoned",
    "RankReady",
    "StepAsk",
    "StepDone",
    "StepFailed",
    "WireSpan",
    "decode_answer",
    "decode_ask",
    "from_wire",
    "to_wire",
]


class WireSpan(msgspec.Struct, frozen=True, array_like=True):
    """A span of the model, as it travels."""

    token_ids: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]


class StepAsk(msgspec.Struct, frozen=True, tag=True):
    """Run these spans. With `tells_layers`, say of each layer when what it remembers is in the cache."""

    spans: tuple[WireSpan, ...]
    tells_layers: bool


class Poison(msgspec.Struct, frozen=True, tag=True):
    """Fill these blocks with the poison pattern."""

    blocks: tuple[int, ...]


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """A rank has its weights and its cache, and can be reached."""

    layout: Layout
    endpoint: Endpoint
    executor: Executor
    fingerprint: str


class LayerWritten(msgspec.Struct, frozen=True, tag=True):
    """This rank's part of a layer is in its cache."""

    layer: int


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """A rank has run a step; `logits` (float32, span after span) come from the first rank of the last stage only."""

    logits: bytes = b""


class StepFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank could not run a step, and ends."""

    reason: str


class Poisoned(msgspec.Struct, frozen=True, tag=True):
    """The blocks are filled."""


Ask = StepAsk | Poison
Answer = RankReady | LayerWritten | StepDone | StepFailed | Poisoned

_ask_decoder = msgspec.msgpack.Decoder(Ask)
_answer_decoder = msgspec.msgpack.Decoder(Answer)


def decode_ask(frame: bytes | bytearray) -> Ask:
    """Read what the leader says."""
    ask: Ask = _ask_decoder.decode(frame)
    return ask


def decode_answer(frame: bytes | bytearray) -> Answer:
    """Read what a rank says."""
    answer: Answer = _answer_decoder.decode(frame)
    return answer


def to_wire(span: Span) -> WireSpan:
    """A span on its way to the ranks."""
    return WireSpan(tuple(span.token_ids.tolist()), span.start, tuple(span.blocks.tolist()))


def from_wire(span: WireSpan) -> Span:
    """A span that has arrived."""
    return Span(np.array(span.token_ids, np.int32), span.start, np.array(span.blocks, np.int32))
