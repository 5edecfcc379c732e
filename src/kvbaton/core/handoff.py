"""What a hand-off is named by, how it can end, what is announced of it, and the small record that travels with it."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Annotated, NewType

import msgspec
from msgspec import Meta

__all__ = [
    "LEGAL_PAIRS",
    "MAX_OPAQUE_BYTES",
    "MAX_TRANSFER_ID",
    "Aux",
    "AuxChannel",
    "BlockLists",
    "Confirmation",
    "Executor",
    "HandoffKey",
    "Incarnation",
    "Integrity",
    "Mode",
    "Outcome",
    "RequestId",
    "Span",
    "TransferId",
    "key_problem",
    "room_transfer_id",
    "span_problem",
    "span_rows",
]

TransferId = NewType("TransferId", str)
"""Joins the two sides of a hand-off; made by the router or the client, which may use it twice."""

RequestId = NewType("RequestId", str)
"""An engine's own id of a request; never leaves its process as a key, because the two engines choose theirs independently."""

Incarnation = NewType("Incarnation", str)
"""Random id of one process; a restarted peer is a different peer, and inherits nothing of the earlier one."""

BlockLists = tuple[tuple[int, ...], ...]
"""Block ids of one request, one tuple per group of the layout, in token order."""

MAX_TRANSFER_ID = 256
"""Characters of a transfer id; longer ones are refused where they enter."""

MAX_OPAQUE_BYTES = 1 << 20
"""Bytes of an aux record that only the engines read; a frame has room for them."""


class HandoffKey(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """The name of one hand-off in every message and every log line."""

    transfer_id: Annotated[TransferId, Meta(min_length=1, max_length=MAX_TRANSFER_ID)]
    prompt_index: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    sample_index: Annotated[int, Meta(ge=0, le=1 << 62)] = 0

    def __str__(self) -> str:
        return f"{self.transfer_id}/{self.prompt_index}.{self.sample_index}"


class Mode(enum.StrEnum):
    """Which side decides when: the source streams while it computes (push), or the target fetches what is complete (pull)."""

    PUSH = "push"
    PULL = "pull"


class Executor(enum.StrEnum):
    """Which side executes the copy: the owner of the target memory reads, or the source writes into it remotely."""

    TARGET_READS = "target reads"
    SOURCE_WRITES = "source writes"


class Integrity(enum.StrEnum):
    """How much of what was moved is checked against the source's checksums before it counts as landed."""

    OFF = "off"
    SAMPLED = "sampled"
    FULL = "full"


class AuxChannel(enum.StrEnum):
    """How the aux record travels: in a message, or through the data transport (and in a message where that fails)."""

    CONTROL = "control"
    DATA = "data"


class Confirmation(enum.StrEnum):
    """How a target that has read everything learns that its source's blocks have not changed meanwhile."""

    STAMP = "stamp"
    """It looks at the source's stamp, where it can (core/stamps.py); else it asks."""
    MESSAGE = "message"
    """It asks."""


class Outcome(enum.StrEnum):
    """How a side of a hand-off ends; exactly one of these, and final."""

    DELIVERED = "delivered"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


LEGAL_PAIRS: frozenset[tuple[Outcome, Outcome]] = frozenset(
    {
        (Outcome.DELIVERED, Outcome.DELIVERED),
        # The source confirmed; then the release of the target was lost, or the source was taken down before it came.
        (Outcome.EXPIRED, Outcome.DELIVERED),
        (Outcome.CANCELLED, Outcome.DELIVERED),
        (Outcome.FAILED, Outcome.DELIVERED),
        *((source, target) for source in Outcome for target in Outcome if Outcome.DELIVERED not in (source, target)),
    }
)
"""(source, target) outcomes that are possible together. A source that ends as delivered has a target that did."""


class Span(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """Tokens `first_token` up to `end_token` of layers `first_layer` up to `end_layer`; `number` counts within a generation."""

    number: Annotated[int, Meta(ge=0, le=1 << 62)]
    first_token: Annotated[int, Meta(ge=0, le=1 << 62)]
    end_token: Annotated[int, Meta(ge=0, le=1 << 62)]
    first_layer: Annotated[int, Meta(ge=0, le=1 << 62)]
    end_layer: Annotated[int, Meta(ge=0, le=1 << 62)]


def span_rows(spans: tuple[Span, ...]) -> Iterator[tuple[Span, ...]]:
    """Spans in rows that follow each other in layers and have the same tokens."""
    first = 0
    for index, (span, after) in enumerate(itertools.pairwise(spans), 1):
        if after.first_layer != span.end_layer or after.first_token != span.first_token or after.end_token != span.end_token:
            yield spans[first:index]
            first = index
    if spans:
        yield spans[first:]


def room_transfer_id(room: int) -> TransferId:
    """The transfer id of a request that SGLang knows by its room: so other engines and routers name it alike."""
    return TransferId(f"tx-{room:032x}")


def key_problem(key: HandoffKey) -> str:
    """Why nothing can be handed off under this key; empty when it is valid."""
    length = len(key.transfer_id)
    if not 1 <= length <= MAX_TRANSFER_ID:
        return f"the transfer id has {length} characters; 1 to {MAX_TRANSFER_ID} are possible"
    if min(key.prompt_index, key.sample_index) < 0:
        return f"prompt index {key.prompt_index} and sample index {key.sample_index} must not be negative"
    return ""


def span_problem(spans: Iterable[Span], whole: Span) -> str:
    """Why `spans` are not every token of every layer of `whole` exactly once; empty when they are."""
    spans = tuple(spans)
    if _is_row_by_row(spans, whole):
        return ""
    reached = dict.fromkeys(range(whole.first_layer, whole.end_layer), whole.first_token)
    for span in sorted(spans, key=attrgetter("first_token")):
        if span.first_layer > span.end_layer or span.first_token > span.end_token:
            # It covers nothing, and joined with a neighbour it would hide what that one covers.
            return f"span {span.number} ends before it starts: {span}"
        for layer in range(span.first_layer, span.end_layer):
            if reached.get(layer) != span.first_token:
                found = "no such layer" if layer not in reached else f"token {reached[layer]} to come next"
                return f"span {span.number} starts at token {span.first_token} of layer {layer}, where there is {found}"
            reached[layer] = span.end_token
    short = [layer for layer, end in reached.items() if end != whole.end_token]
    if short:
        return f"layer {short[0]} ends at token {reached[short[0]]} of {whole.end_token}"
    return ""


def _is_row_by_row(spans: Sequence[Span], whole: Span) -> bool:
    """Whether spans are `whole` chunk by chunk, and layer by layer within each: as nearly every engine computes them."""
    token, layer, end = whole.first_token, whole.first_layer, -1
    for span in spans:
        if span.first_token != token or span.first_layer != layer or (end >= 0 and span.end_token != end):
            return False
        if span.end_token < token or not layer < span.end_layer <= whole.end_layer:
            return False
        layer, end = span.end_layer, span.end_token
        if layer == whole.end_layer:
            token, layer, end = end, whole.first_layer, -1
    return end < 0 and token == whole.end_token


class Aux(msgspec.Struct, frozen=True, gc=False):
    """Small per-request data sent once beside the cache: the first token, so that the target need not compute it again."""

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()
    queue_s: float = 0.0
    prefill_s: float = 0.0
    opaque: Annotated[bytes, Meta(max_length=MAX_OPAQUE_BYTES)] = b""
    """What only the source's engine can read: SGLang's metadata row, with its logprobs, hidden states and draft tokens."""
