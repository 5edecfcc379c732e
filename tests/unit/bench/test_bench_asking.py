"""How servers are asked: what each is sent, in which order, and that failures are told as what they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvbaton.bench.asking import Alone, Answered, AskedPrompt, Asking, AtOnce, InOneRoom, OneAfterTheOther, token_times
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.auth import AddressProof, RoomProof
from kvbaton.errors import PeerLost, ProtocolError
from kvbaton.launch.ports import PortPicker

PROMPT = AskedPrompt("m", (1, 2, 3), 4)
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e"}


@dataclass
class Server:
    """Answers like vLLM: a stream where one is wanted, else with `kv_transfer_params`."""

    status: int = 200
    params: dict[str, Any] | None = field(default_factory=lambda: dict(PARAMS))
    events: tuple[str, ...] = ('{"choices": [{"text": "a"}]}', '{"choices": [{"text": "b"}]}', "[DONE]")
    seen: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(body)
        if self.status != 200:
            return web.Response(status=self.status, text="no")
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "a"}], "kv_transfer_params": self.params})
        return web.Response(text="".join(f"data: {event}\n\n" for event in self.events), content_type="text/event-stream")


@asynccontextmanager
async def serving(*servers: Server) -> AsyncIterator[aiohttp.ClientSession]:
    runners = []
    for server in servers:
        app = web.Application()
        app.router.add_post("/v1/completions", server.answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        port = PortPicker().pick()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        server.url = f"http://127.0.0.1:{port}"
        runners.append(runner)
    async with aiohttp.ClientSession() as session:
        yield session
    for runner in runners:
        await runner.cleanup()


def asked(make: Callable[[], Asking], *servers: Server) -> Answered:
    async def run() -> Answered:
        async with serving(*servers) as session:
            return await make().ask(session, PROMPT)

    return asyncio.run(run())


def test_alone() -> None:
    server = Server()
    answered = asked(lambda: Alone(server.url), server)
    assert (answered.text, answered.prefill_s) == ("ab", 0.0)
    assert 0 < answered.first_token_s <= answered.total_s
    assert (server.seen[0]["prompt"], server.seen[0]["max_tokens"]) == ([1, 2, 3], 4)


def test_what_prefill_answers_goes_to_decode() -> None:
    prefill, decode = Server(), Server()
    answered = asked(lambda: OneAfterTheOther(prefill.url, decode.url), prefill, decode)
    assert (prefill.seen[0]["max_tokens"], prefill.seen[0]["kv_transfer_params"]["do_remote_decode"]) == (1, True)
    assert decode.seen[0]["kv_transfer_params"] == PARAMS
    assert 0 < answered.prefill_s < answered.first_token_s
    assert prefill.seen[0]["kv_transfer_params"]["transfer_id"] == answered.transfer_id


def test_both_at_once_know_the_same_transfer() -> None:
    prefill, decode = Server(), Server()
    answered = asked(lambda: AtOnce(prefill.url, decode.url, {"remote_host": "h", "remote_port": 7}), prefill, decode)
    sent = decode.seen[0]["kv_transfer_params"]
    assert (sent["remote_host"], sent["remote_port"], sent["do_remote_prefill"]) == ("h", 7, True)
    assert sent["transfer_id"] == prefill.seen[0]["kv_transfer_params"]["transfer_id"] == answered.transfer_id


def test_servers_of_sglang_meet_in_one_room() -> None:
    prefill, decode = Server(), Server()
    source = ControlAddress.of("h", 7)
    rooms = RoomProof(b"a key of the cluster", source, ControlAddress.of("h", 8))
    answered = asked(lambda: InOneRoom(prefill.url, decode.url, source, rooms), prefill, decode)
    (first,), (second,) = prefill.seen, decode.seen
    assert (
        (first["bootstrap_host"], first["bootstrap_port"]) == (second["bootstrap_host"], second["bootstrap_port"]) == ("h", 7)
    )
    assert answered.transfer_id == f"tx-{first['bootstrap_room']:032x}" == f"tx-{second['bootstrap_room']:032x}"
    assert rooms.fits(first["bootstrap_room"])


@pytest.mark.parametrize("at_once", [True, False])
def test_a_client_that_is_its_own_router_proves_the_source(at_once: bool) -> None:
    """Instances with a cluster key dial no other."""
    prefill, decode = Server(), Server()
    proof = AddressProof(b"a key of the cluster", ControlAddress.of("h", 7), ControlAddress.of("h", 8))
    make = (
        (lambda: AtOnce(prefill.url, decode.url, {"remote_host": "h"}, proof))
        if at_once
        else (lambda: OneAfterTheOther(prefill.url, decode.url, proof))
    )
    answered = asked(make, prefill, decode)
    assert decode.seen[0]["kv_transfer_params"]["address_proof"] == proof.of(answered.transfer_id)


FAILURES: dict[str, tuple[Server, Server, str]] = {
    "prefill refuses": (Server(status=500), Server(), "answered 500"),
    "decode refuses": (Server(), Server(status=400), "answered 400"),
    "prefill has no connector": (Server(params=None), Server(), "without kv_transfer_params"),
    "decode says nothing": (Server(), Server(events=("[DONE]",)), "without a token"),
    "decode breaks off": (Server(), Server(events=(json.dumps({"error": {"message": "lost"}}),)), "broke off"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_told(name: str) -> None:
    prefill, decode, words = FAILURES[name]
    with pytest.raises(ProtocolError, match=words):
        asked(lambda: OneAfterTheOther(prefill.url, decode.url), prefill, decode)


def test_nobody_there() -> None:
    async def run() -> Answered:
        async with aiohttp.ClientSession() as session:
            ask: Awaitable[Answered] = Alone(f"http://127.0.0.1:{PortPicker().pick()}").ask(session, PROMPT)
            return await ask

    with pytest.raises(PeerLost):
        asyncio.run(run())


def test_the_times_of_an_answer_are_those_of_its_parts_with_text() -> None:
    async def run() -> list[float]:
        server = Server(
            events=('{"choices": [{"text": "a"}]}', '{"choices": [{"text": ""}]}', '{"choices": [{"text": "b"}]}', "[DONE]")
        )
        async with serving(server) as session:
            return await token_times(session, server.url, PROMPT.body())

    first, second = asyncio.run(run())
    assert first <= second


@pytest.mark.parametrize("server", [Server(events=("[DONE]",)), Server(status=503)], ids=["no token", "refused"])
def test_an_answer_without_a_token_has_no_times(server: Server) -> None:
    async def run() -> None:
        async with serving(server) as session:
            await token_times(session, server.url, PROMPT.body())

    with pytest.raises(ProtocolError, match=r"without a token|answered 503"):
        asyncio.run(run())
