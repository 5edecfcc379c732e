"""Requests that are refused before they are read in full: which hand-offs their sources have to release."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice, product
from typing import Any

import msgspec

from kvbaton.core.handoff import RequestId
from kvbaton.engines.embedded.request import GenerationRequest, Sampling, handoff_of
from kvbaton.engines.handoff_params import KVTransferParams, TargetParams, read_params
from kvbaton.errors import BadRequest

__all__ = ["declined_requests"]


class _DeclinedParams(msgspec.Struct, frozen=True):
    kv_transfer_params: KVTransferParams | None = None


class _DeclinedBody(msgspec.Struct, frozen=True):
    prompt: Any = None
    n: Any = None


def declined_requests(
    raw: bytes, request_id: str | None, most: int, may_dial: Callable[[TargetParams], bool]
) -> list[GenerationRequest]:
    """The requests of a refused body, without prompts and at most `most`; only those whose cache a source holds.

    `may_dial` decides whether that source may be notified.
    """
    try:
        # The prompt is decoded only for a body that has a source: most refused bodies have none, and some are very large.
        params = read_params(msgspec.json.decode(raw, type=_DeclinedParams).kv_transfer_params, request_id)
        if not isinstance(params, TargetParams) or not may_dial(params):
            return []
        body = msgspec.json.decode(raw, type=_DeclinedBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, BadRequest):
        return []
    indices = islice(product(range(_prompts(body.prompt)), range(_samples(body.n, most))), most)
    return [
        GenerationRequest(RequestId(f"declined-{prompt}-{sample}"), (), Sampling(1), handoff_of(params, prompt, sample))
        for prompt, sample in indices
    ]


def _prompts(prompt: object) -> int:
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def _samples(n: object, most: int) -> int:
    return min(n, most) if isinstance(n, int) and n > 0 else 1
