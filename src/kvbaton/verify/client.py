"""Asks one server for one completion and reads the answer token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec

from kvbaton.errors import PeerError, PeerLost, ProtocolError
from kvbaton.verify.compare import TokenAnswer

__all__ = ["ServerReply", "ask"]

_MAX_SHOWN = 500
_TRANSFER_HEADER = "X-KVBaton-Transfer"


@dataclass(frozen=True, slots=True)
class ServerReply:
    """An answer, and what the server recorded about it (empty when it recorded nothing)."""

    answer: TokenAnswer
    record: dict[str, Any]


async def ask(session: aiohttp.ClientSession, url: str, model: str, prompt: tuple[int, ...], max_tokens: int) -> ServerReply:
    """One greedy completion with logprobs; raises PeerError in words when the server does not give one."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    }
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise PeerError(f"HTTP {response.status}: {_error_text(await response.text())[:_MAX_SHOWN]}")
            document = await response.json()
            transfer_id = response.headers.get(_TRANSFER_HEADER, "")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise PeerLost(f"{url}: {error or type(error).__name__}") from error
    except ValueError as error:
        raise ProtocolError(f"{url} answered 200 with something that is no JSON: {error}") from error
    reply = _read(document)
    if reply.record or not transfer_id:
        return reply
    return replace(reply, record=await _timeline_record(session, url, transfer_id))


async def _timeline_record(session: aiohttp.ClientSession, url: str, transfer_id: str) -> dict[str, Any]:
    """What the timeline of a transfer states about it, for engines whose answers have no place for a record."""
    try:
        async with session.get(f"{url}/handoffs/{transfer_id}") as response:
            document = await response.json()
            handoff = document["handoffs"][0] if response.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError):
        return {}
    ends = {end["side"]: end["outcome"] for end in handoff.get("ends", ())}
    moved, exposed = int(handoff.get("wire_bytes") or 0), float(handoff.get("exposed_s") or 0.0)
    return {
        "handed_off": ends.get("target") == "delivered",
        "bytes_planned": moved,
        "bytes_moved": moved,
        "handoff_s": exposed,
        "handover_s": exposed,
    }


def _error_text(text: str) -> str:
    """The text of an error answer: its kind and message, or its text when it has none."""
    try:
        error = msgspec.json.decode(text)["error"]
        return f"{error['type']}: {error['message']}"
    except (msgspec.DecodeError, KeyError, TypeError):
        return text


def _read(document: Any) -> ServerReply:
    try:
        choice = document["choices"][0]
        logprobs = choice["logprobs"]
        tokens = _token_ids(choice)
        values = tuple(float(value) for value in logprobs["token_logprobs"])
        gaps = tuple(_gap(candidates) for candidates in logprobs["top_logprobs"])
        if not len(tokens) == len(values) == len(gaps):
            raise ValueError(f"{len(tokens)} tokens, {len(values)} logprobs, {len(gaps)} lists of candidates")
        answer = TokenAnswer(tokens, values, gaps, str(choice["finish_reason"]))
        return ServerReply(answer, _record(document))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ProtocolError(f"the answer has no logprobs in the expected form: {error!r}") from error


def _token_ids(choice: dict[str, Any]) -> tuple[int, ...]:
    """SGLang writes them beside the answer, the others into the logprobs."""
    if choice.get("token_ids"):
        return tuple(map(int, choice["token_ids"]))
    return tuple(int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"])


def _record(document: dict[str, Any]) -> dict[str, Any]:
    """What an instance recorded of the hand-off; vLLM lets a connector answer in `kv_transfer_params` only."""
    return dict(document.get("kvbaton") or (document.get("kv_transfer_params") or {}).get("kvbaton") or {})


def _gap(candidates: dict[str, float]) -> float:
    best = sorted(candidates.values(), reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")
