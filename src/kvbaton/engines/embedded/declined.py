"""Requests that are refused before they can be read in full: which hand-offs their sources should not wait for."""

from __future__ import annotations

from itertools import islice, product
from typing import Any

import msgspec

from kvbaton.core.handoff import RequestId
from kvbaton.engines.embedded.request import GenerationRequest, Sampling, handoff_of
from kvbaton.engines.handoff_params import KVTransferParams, TargetParams, read_params
from kvbaton.errors import BadRequest

__all__ = ["declined_requests"]

_MAX_CHOICES = 1024


class _Body(msgspec.Struct, frozen=True):
    kv_transfer_params: KVTransferParams | None = None
    prompt: Any = None
    n: Any = None


def declined_requests(raw: bytes, request_id: str | None) -> list[GenerationRequest]:
    """The requests that a body stands for which was refused, without prompts; only those whose cache waits at a source."""
    try:
        body = msgspec.json.decode(raw, type=_Body)
        wish = read_params(body.kv_transfer_params, request_id)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, BadRequest):
        return []
    if not isinstance(wish, TargetParams):
        return []
    indices = islice(product(range(_prompts(body.prompt)), range(_samples(body.n))), _MAX_CHOICES)
    return [
        GenerationRequest(RequestId(f"declined-{prompt}-{sample}"), (), Sampling(1), handoff_of(wish, prompt, sample))
        for prompt, sample in indices
    ]


def _prompts(prompt: object) -> int:
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def _samples(n: object) -> int:
    return min(n, _MAX_CHOICES) if isinstance(n, int) and n > 0 else 1
