"""A prefill and a decode server, and a client that is its own router: it names the hand-off, and can leave either side."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from vllm_servers import MODEL, Server

from kvbaton.config import OnFailure
from kvbaton.core.addresses import ControlAddress, make_request_id
from kvbaton.core.handoff import Mode
from kvbaton.errors import PeerError
from kvbaton.verify.compare import TokenAnswer, Verdict, compare

__all__ = ["Client", "Given", "Pair", "assert_equal", "is_near_tie", "prompt_of", "together"]

_REQUEST_S = 600.0
_T = TypeVar("_T")


def prompt_of(length: int, seed: object = 0) -> list[int]:
    """A prompt of so many tokens; another one for each seed."""
    generator = random.Random(f"{seed} {length}")
    return [generator.randrange(1000, 40_000) for _ in range(length)]


@dataclass(frozen=True)
class Given:
    """What a server answered: tokens, and what it recorded of the hand-off."""

    answer: TokenAnswer
    record: dict[str, Any]
    params: dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """The two servers, and one that is neither, for comparison; waits until that one is there.

    `policy` is what the decode server does with a request whose load failed.
    """

    mode: Mode
    prefill: Server
    decode: Server
    single: Server
    policy: OnFailure = OnFailure.FAIL
    vocabulary: int = 40_000
    """Token ids of prompts are taken modulo this: small models have few."""

    def __post_init__(self) -> None:
        self.single.wait()

    def wait_idle(self, timeout_s: float = 90.0) -> None:
        """Wait until neither side holds a block or a request."""
        for server in (self.prefill, self.decode):
            server.wait_idle(timeout_s)

    def server(self, side: str) -> Server:
        """The server of the `source`, or of the `target`."""
        return {"source": self.prefill, "target": self.decode}[side]

    def assert_alive(self) -> None:
        """Neither engine has ended."""
        for server in (self.prefill, self.decode):
            assert server.is_alive(), server.log()[-3000:]


class Client:
    """Sends requests to the two servers of a pair."""

    def __init__(self, session: aiohttp.ClientSession, pair: Pair) -> None:
        self._session = session
        self.pair = pair

    def with_pair(self, pair: Pair) -> Client:
        """The same client for another pair."""
        return Client(self._session, pair)

    async def alone(self, prompt: Sequence[int], tokens: int = 8, url: str | None = None) -> Given:
        """A plain request, to the single server unless another is given."""
        return await self._post(url or self.pair.single.url, self._body(prompt, tokens), {})

    async def prefill(self, prompt: Sequence[int], transfer_id: str, header: str) -> Given:
        """The prefill half of a hand-off."""
        return await self._post(self.pair.prefill.url, self._source_body(prompt, transfer_id, 1), {"X-Request-Id": header})

    async def decode(
        self, prompt: Sequence[int], transfer_id: str, header: str, tokens: int, params: dict[str, Any] | None = None
    ) -> Given:
        """The decode half; `params` are those that the prefill answered with."""
        body = self._target_body(prompt, transfer_id, tokens, params)
        return await self._post(self.pair.decode.url, body, {"X-Request-Id": header})

    async def stream_prefill(
        self, prompt: Sequence[int], transfer_id: str, header: str, tokens: int, begun: asyncio.Event
    ) -> None:
        """The prefill half, for a client that asks for more tokens than the first; `begun` is set when that one is here."""
        await self._stream(self.pair.prefill.url, self._source_body(prompt, transfer_id, tokens), header, begun)

    async def stream_decode(
        self,
        prompt: Sequence[int],
        transfer_id: str,
        header: str,
        tokens: int,
        begun: asyncio.Event,
        params: dict[str, Any] | None = None,
    ) -> None:
        """The decode half, read as it streams; `begun` is set when the first token is here."""
        await self._stream(self.pair.decode.url, self._target_body(prompt, transfer_id, tokens, params), header, begun)

    async def send(self, url: str, prompt: Sequence[int], tokens: int, params: object) -> Given:
        """A request with any `kv_transfer_params`."""
        return await self._post(url, self._body(prompt, tokens) | {"kv_transfer_params": params}, {})

    def header(self) -> str:
        """An id for one request, with both addresses in it."""
        ends = [str(ControlAddress.of("127.0.0.1", each.control_port)) for each in (self.pair.prefill, self.pair.decode)]
        return make_request_id(ends[0], ends[1], uuid.uuid4().hex)

    async def hand_off(self, prompt: Sequence[int], tokens: int = 8, transfer_id: str = "") -> Given:
        """A whole request, as a router sends it; raises PeerError when either half fails."""
        transfer_id, header = transfer_id or f"tx-{uuid.uuid4().hex}", self.header()
        if self.pair.mode is Mode.PULL:
            first = await self.prefill(prompt, transfer_id, header)
            return await self.decode(prompt, transfer_id, header, tokens, first.params)
        prefill = asyncio.create_task(self.prefill(prompt, transfer_id, header))
        try:
            return await self.decode(prompt, transfer_id, header, tokens)
        finally:
            await asyncio.gather(prefill, return_exceptions=True)

    async def alone_with(self, prompt: Sequence[int], fields: dict[str, Any]) -> list[str]:
        """The texts of a request with more fields, from the single server."""
        return await self._texts(self.pair.single.url, self._body(prompt, 8) | fields, {})

    async def hand_off_with(self, prompt: Sequence[int], fields: dict[str, Any]) -> list[str]:
        """The texts of a whole request with more fields. Both halves have them, as a router sends them."""
        transfer_id, headers = f"tx-{uuid.uuid4().hex}", {"X-Request-Id": self.header()}
        source = self._source_body(prompt, transfer_id, 1) | fields | {"max_tokens": 1}
        target = self._target_body(prompt, transfer_id, 8, None) | fields
        prefill = asyncio.create_task(self._texts(self.pair.prefill.url, source, headers))
        if self.pair.mode is Mode.PULL:
            await prefill
        try:
            return await self._texts(self.pair.decode.url, target, headers)
        finally:
            await asyncio.gather(prefill, return_exceptions=True)

    async def assert_serves(self, *prompts: Sequence[int], tokens: int = 8) -> None:
        """Hand these over now, all at once, and compare each answer with that of the single server."""
        given = await asyncio.gather(*(self.hand_off(prompt, tokens) for prompt in prompts))
        for prompt, each in zip(prompts, given, strict=True):
            assert each.record["handed_off"], each.record
            assert each.record["bytes_moved"] == each.record["bytes_planned"]
            assert_equal(await self.alone(prompt, tokens), each)

    async def write_to_blocks(self, server: Server, blocks: int) -> None:
        """Let plain requests write to every block of a server that has so many."""
        prompts = [prompt_of(3, f"filler {index}") for index in range(2 * blocks)]
        await asyncio.gather(*(self.alone(prompt, 2, server.url) for prompt in prompts))

    async def expired(self) -> dict[str, float]:
        """How many hand-offs have expired, by side. vLLM publishes with its next step, so a plain request makes each step."""
        found = {}
        for side in ("source", "target"):
            server = self.pair.server(side)
            await self.alone(prompt_of(3), 2, server.url)
            name = f'vllm:kvbaton_handoffs_total{{outcome="expired",side="{side}"}}'
            found[side] = (await asyncio.to_thread(server.metrics)).get(name, 0.0)
        return found

    async def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
        """Wait, while requests go on."""
        give_up_at = asyncio.get_running_loop().time() + timeout_s
        while not await asyncio.to_thread(condition):
            assert asyncio.get_running_loop().time() < give_up_at, f"not within {timeout_s:g} s: {what}"
            await asyncio.sleep(0.02)

    def _body(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        return {
            "model": MODEL,
            "prompt": [token % self.pair.vocabulary for token in prompt],
            "max_tokens": tokens,
            "temperature": 0,
            "logprobs": 2,
            "return_tokens_as_token_ids": True,
            "ignore_eos": True,
        }

    def _source_body(self, prompt: Sequence[int], transfer_id: str, tokens: int) -> dict[str, Any]:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        return self._body(prompt, tokens) | {"kv_transfer_params": params}

    def _target_body(
        self, prompt: Sequence[int], transfer_id: str, tokens: int, params: dict[str, Any] | None
    ) -> dict[str, Any]:
        params = params or {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer_id}
        return self._body(prompt, tokens) | {"kv_transfer_params": params}

    async def _post(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> Given:
        try:
            async with self._session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
                if response.status != 200:
                    raise PeerError(f"HTTP {response.status}: {(await response.text())[:500]}")
                return _given(await response.json())
        except aiohttp.ClientError as error:
            raise PeerError(f"{url}: {error!r}") from error

    async def _texts(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> list[str]:
        async with self._session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            if response.status != 200:
                raise PeerError(f"HTTP {response.status}: {(await response.text())[:500]}")
            return [choice["text"] for choice in (await response.json())["choices"]]

    async def _stream(self, url: str, body: dict[str, Any], header: str, begun: asyncio.Event) -> None:
        try:
            async with self._session.post(
                f"{url}/v1/completions", json=body | {"stream": True}, headers={"X-Request-Id": header}
            ) as response:
                async for line in response.content:
                    if response.status != 200 or line.startswith(b'data: {"error"'):
                        raise PeerError(f"HTTP {response.status}: {line.decode()[:500]}")
                    if line.startswith(b"data: {"):
                        begun.set()
        except aiohttp.ClientError as error:
            raise PeerError(f"{url}: {error!r}") from error


def assert_equal(single: Given, given: Given) -> None:
    """The same tokens with the same logprobs."""
    assert not is_near_tie(single, given), (single.answer.tokens, given.answer.tokens)


def is_near_tie(single: Given, given: Given) -> bool:
    """Whether the two part where the best candidates are as good as equal; fails where they differ otherwise."""
    compared = compare(single.answer, given.answer)
    assert compared.verdict is not Verdict.DIFFERENT, (compared, single.answer.tokens, given.answer.tokens)
    return compared.verdict is Verdict.NEAR_TIE


def together(pair: Pair, work: Callable[[Client], Awaitable[_T]]) -> _T:
    """Run something with a client."""

    async def run() -> _T:
        async with _session() as session:
            return await work(Client(session, pair))

    return asyncio.run(run())


@asynccontextmanager
async def _session() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)) as opened:
        yield opened


def _given(document: dict[str, Any]) -> Given:
    choice = document["choices"][0]
    logprobs = choice["logprobs"]
    tokens = tuple(int(token.removeprefix("token_id:")) for token in logprobs["tokens"])
    gaps = [sorted(candidates.values(), reverse=True) for candidates in logprobs["top_logprobs"]]
    answer = TokenAnswer(
        tokens,
        tuple(float(value) for value in logprobs["token_logprobs"]),
        tuple(each[0] - each[1] if len(each) > 1 else float("inf") for each in gaps),
        str(choice["finish_reason"]),
    )
    params = document.get("kv_transfer_params") or {}
    return Given(answer, dict(params.get("kvbaton") or {}), params)
