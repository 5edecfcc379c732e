"""How servers are asked for an answer: one alone, prefill and then decode, or both at once. Times are the client's.

The client is its own router, the same for every connector: what differs between two pairs is the servers alone.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from kvbaton.core.addresses import ControlAddress
from kvbaton.core.auth import MAX_ROOM_NUMBER, AddressProof, RoomProof
from kvbaton.core.handoff import room_transfer_id
from kvbaton.errors import PeerLost, ProtocolError

__all__ = [
    "Alone",
    "Answered",
    "AskedPrompt",
    "Asking",
    "AtOnce",
    "InOneRoom",
    "OneAfterTheOther",
    "post",
    "stream",
    "token_times",
]

_FIRST = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
_FIRST_OF_NIXL = {"remote_host": None, "remote_port": None}


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """What is asked: the same tokens of every variant. Without a name of a model the server's only one answers."""

    model: str
    tokens: tuple[int, ...]
    max_tokens: int

    def body(self, **more: Any) -> dict[str, Any]:
        """As an OpenAI completion request."""
        model = {"model": self.model} if self.model else {}
        body = {"prompt": list(self.tokens), "max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True}
        return {**model, **body, **more}


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer: seconds from asking to the first token and to the end, and of the prefill request where there is one."""

    text: str
    first_token_s: float
    total_s: float
    prefill_s: float = 0.0
    transfer_id: str = ""


class Asking(Protocol):
    """How a variant is asked."""

    async def ask(self, session: aiohttp.ClientSession, prompt: AskedPrompt) -> Answered:
        """Ask, and read the whole answer. Raises PeerError when there is none."""


@dataclass(frozen=True, slots=True)
class Alone:
    """One server does everything."""

    url: str

    async def ask(self, session: aiohttp.ClientSession, prompt: AskedPrompt) -> Answered:
        return await stream(session, self.url, prompt.body(), time.perf_counter())


@dataclass(frozen=True, slots=True)
class OneAfterTheOther:
    """Prefill first; what it answers in `kv_transfer_params` goes to decode. Pull, and NIXL's own protocol.

    `proof`, where the servers have a cluster key, proves to the decode server who its source is.
    """

    prefill: str
    decode: str
    proof: AddressProof | None = None

    async def ask(self, session: aiohttp.ClientSession, prompt: AskedPrompt) -> Answered:
        began = time.perf_counter()
        transfer_id = f"tx-{uuid.uuid4().hex}"
        order = {**_FIRST, **_FIRST_OF_NIXL, "transfer_id": transfer_id}
        answer = await post(session, self.prefill, prompt.body(max_tokens=1, kv_transfer_params=order))
        prefill_s = time.perf_counter() - began
        params = answer.get("kv_transfer_params")
        if not isinstance(params, dict):
            raise ProtocolError(f"{self.prefill} answered without kv_transfer_params")
        params = {**params, **_proved(self.proof, transfer_id)}
        answered = await stream(session, self.decode, prompt.body(kv_transfer_params=params), began)
        return Answered(answered.text, answered.first_token_s, answered.total_s, prefill_s, transfer_id)


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Both at the same time: push. `source` names the prefill server to the decode server."""

    prefill: str
    decode: str
    source: Mapping[str, Any] = field(default_factory=dict)
    proof: AddressProof | None = None

    async def ask(self, session: aiohttp.ClientSession, prompt: AskedPrompt) -> Answered:
        began = time.perf_counter()
        transfer_id = f"tx-{uuid.uuid4().hex}"
        first = prompt.body(max_tokens=1, kv_transfer_params={**_FIRST, "transfer_id": transfer_id})
        second = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer_id, **self.source}
        second |= _proved(self.proof, transfer_id)
        prefill_s, answered = await asyncio.gather(
            _timed_post(session, self.prefill, first, began),
            stream(session, self.decode, prompt.body(kv_transfer_params=second), began),
        )
        return Answered(answered.text, answered.first_token_s, answered.total_s, prefill_s, transfer_id)


@dataclass(frozen=True, slots=True)
class InOneRoom:
    """Both at the same time, under one room: SGLang's protocol, with any backend. `source` is the bootstrap address."""

    prefill: str
    decode: str
    source: ControlAddress
    rooms: RoomProof

    async def ask(self, session: aiohttp.ClientSession, prompt: AskedPrompt) -> Answered:
        began = time.perf_counter()
        room = self.rooms.room(secrets.randbelow(MAX_ROOM_NUMBER) + 1)
        where = {"bootstrap_host": self.source.host, "bootstrap_port": self.source.handshake, "bootstrap_room": room}
        prefill_s, answered = await asyncio.gather(
            _timed_post(session, self.prefill, prompt.body(**where), began),
            stream(session, self.decode, prompt.body(**where), began),
        )
        return Answered(answered.text, answered.first_token_s, answered.total_s, prefill_s, room_transfer_id(room))


def _proved(proof: AddressProof | None, transfer_id: str) -> dict[str, str]:
    return {} if proof is None else {"address_proof": proof.of(transfer_id)}


async def _timed_post(session: aiohttp.ClientSession, url: str, body: dict[str, Any], began: float) -> float:
    await post(session, url, body)
    return time.perf_counter() - began


async def post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer to a completion request. Raises PeerError when there is none."""
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            content = await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise PeerLost(f"{url}: {error or type(error).__name__}") from error
    _check(url, response.status, content)
    answer: dict[str, Any] = json.loads(content)
    return answer


async def stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any], began: float) -> Answered:
    """A completion request, answered token by token; seconds count from `began`. Raises PeerError when there is no token."""
    text, first_s = "", 0.0
    async for at, part in _parts(session, url, body):
        first_s = first_s or at - began
        text += part
    if not first_s:
        raise ProtocolError(f"{url} answered without a token")
    return Answered(text, first_s, time.perf_counter() - began)


async def token_times(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[float]:
    """When each part of an answer with text came, by `time.perf_counter`. Raises PeerError when there is none."""
    times = [at async for at, part in _parts(session, url, body) if part]
    if not times:
        raise ProtocolError(f"{url} answered without a token")
    return times


async def _parts(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> AsyncIterator[tuple[float, str]]:
    """The parts of a streamed answer, and when each came."""
    try:
        async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as response:
            if response.status != 200:
                _check(url, response.status, await response.read())
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield time.perf_counter(), _text(url, line)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise PeerLost(f"{url}: {error or type(error).__name__}") from error


def _text(url: str, line: bytes) -> str:
    document = json.loads(line[len(b"data: ") :])
    if "error" in document:
        raise ProtocolError(f"{url} broke off: {str(document['error'])[:300]}")
    return "".join(str(choice["text"]) for choice in document["choices"])


def _check(url: str, status: int, content: bytes) -> None:
    if status != 200:
        raise ProtocolError(f"{url} answered {status}: {content[:300].decode(errors='replace')}")
