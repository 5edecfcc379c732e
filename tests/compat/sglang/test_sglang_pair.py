"""A real SGLang pair against one plain SGLang: equal answers, chunks, radix hits, load, aborts, bad input, and a control."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from sglang_stand import Answer, SglangStand, StandSpec, different, prompt, run, stand, wait_at_rest

from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import PROTOCOL
from kvbaton.core.handoff import Incarnation, Mode
from kvbaton.core.messages import Heartbeat, Hello, Refused, decode, encode
from kvbaton.launch.fleet import FleetPart
from kvbaton.launch.router_peers import ensure_router_peers, sglang_router_part
from wire_peer import WirePeer

pytestmark = [pytest.mark.sglang_full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", params=[Mode.PUSH, Mode.PULL], ids=str)
def pair(request: pytest.FixtureRequest) -> Iterator[SglangStand]:
    with stand(StandSpec(mode=request.param)) as running:
        yield running


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 300, 1000])
def test_every_answer_is_that_of_one_server(pair: SglangStand, tokens: int) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        for seed in range(2):
            ids = prompt(seed * 1000 + tokens, tokens)
            single, (prefill, decode) = (
                await pair.generate(session, pair.single.base_url, ids),
                await pair.pair(session, ids),
            )
            assert different(single, decode) == ""
            assert prefill.tokens == single.tokens[:1]

    run(work)


def test_radix_hits_on_both_ends_give_the_same_answers(pair: SglangStand) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        ids = prompt(5, 200)
        answers = []
        for end in (200, 200, 150, 199):
            single = await pair.generate(session, pair.single.base_url, ids[:end])
            _, decode = await pair.pair(session, ids[:end])
            assert different(single, decode) == ""
            answers.append(decode)
        longer = (*ids, *prompt(6, 40))
        single = await pair.generate(session, pair.single.base_url, longer)
        prefill, decode = await pair.pair(session, longer)
        assert different(single, decode) == ""
        assert prefill.cached > 100

    run(work)


def test_64_requests_at_once(pair: SglangStand) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        prompts = [prompt(100 + index, 20 + index) for index in range(64)]
        singles = await asyncio.gather(*(pair.generate(session, pair.single.base_url, each) for each in prompts))
        pairs = await asyncio.gather(*(pair.pair(session, each) for each in prompts))
        found = [problem for one, (_, decode) in zip(singles, pairs, strict=True) if (problem := different(one, decode))]
        # Batches of other sizes add numbers in another order, so a near tie may fall the other way.
        assert len(found) <= 1, found

    run(work)


def test_requests_through_our_router_are_explained(pair: SglangStand) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        ids = prompt(8, 120)
        single = await pair.generate(session, pair.single.base_url, ids)
        assert different(single, await pair.generate(session, pair.router_url, ids)) == ""
        async with session.get(f"{pair.router_url}/handoffs") as response:
            newest = (await response.json())["handoffs"][0]["transfer_id"]
        async with session.get(f"{pair.router_url}/handoffs/{newest}") as response:
            report = await response.json()
        (handoff,) = report["handoffs"]
        assert {end["side"]: end["outcome"] for end in handoff["ends"]} == {"source": "delivered", "target": "delivered"}
        assert handoff["wire_bytes"] > 0

    run(work)


def test_sglangs_own_balancer_works_as_it_is(pair: SglangStand) -> None:
    peers = ensure_router_peers(print)
    port, metrics = pair.ports.pick(), pair.ports.pick()
    urls = (pair.prefill.base_url, pair.decode.base_url)
    prefill_port, decode_port = (int(url.rpartition(":")[2]) for url in urls)
    part = sglang_router_part(peers, port, prefill_port, decode_port, metrics, bootstrap_port=pair.bootstrap_port)
    pair.fleet.start(part)
    pair.fleet.wait_healthy(120)

    async def work(session: aiohttp.ClientSession) -> None:
        for seed in range(4):
            ids = prompt(seed, 90)
            single = await pair.generate(session, pair.single.base_url, ids)
            answer = await pair.generate(session, f"http://127.0.0.1:{port}", ids)
            assert different(single, answer) == ""

    try:
        run(work)
    finally:
        pair.fleet.kill("sglang-router")


def test_after_300_requests_with_aborts_nothing_is_held(pair: SglangStand) -> None:
    async def one(session: aiohttp.ClientSession, index: int, gate: asyncio.Semaphore) -> Answer | None:
        async with gate:
            work = pair.pair(session, prompt(index, 30 + index % 200), 4)
            if index % 3:
                return (await work)[1]
            try:
                await asyncio.wait_for(work, 0.02 * (index % 17))
            except TimeoutError:
                return None
            return None

    async def work(session: aiohttp.ClientSession) -> None:
        gate = asyncio.Semaphore(16)
        answers = await asyncio.gather(*(one(session, index, gate) for index in range(300)))
        failed = [answer for answer in answers if answer is not None and answer.status != 200]
        assert not failed, failed[:3]
        ids = prompt(12345, 100)
        single = await pair.generate(session, pair.single.base_url, ids)
        assert different(single, (await pair.pair(session, ids))[1]) == ""

    run(work)
    wait_at_rest(pair.prefill, pair.decode)


def test_a_room_used_twice_at_once_is_refused_by_name_and_the_first_is_served(pair: SglangStand) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        ids, room = prompt(21, 400), 987654321
        first = asyncio.create_task(pair.pair(session, ids, 64, room))
        await asyncio.sleep(0.05)
        second = await pair.generate(
            session,
            pair.decode.base_url,
            ids,
            bootstrap_host="127.0.0.1",
            bootstrap_port=pair.bootstrap_port,
            bootstrap_room=room,
        )
        single = await pair.generate(session, pair.single.base_url, ids, 64)
        assert different(single, (await first)[1]) == ""
        assert second.status == 200 or "in use" in second.text

    run(work)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"bootstrap_room": 0}, "bootstrap_room is 0"),
        ({"bootstrap_room": 1 << 63}, "bootstrap_room"),
        ({"bootstrap_port": 1}, ""),
    ],
    ids=["room 0", "room 2^63", "a port where no instance listens"],
)
def test_bad_input_is_refused_and_the_servers_live(pair: SglangStand, fields: dict[str, int], named: str) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        where: dict[str, Any] = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.bootstrap_port, "bootstrap_room": 3}
        answer = await pair.generate(session, pair.decode.base_url, prompt(2, 20), **{**where, **fields})
        assert answer.status != 200
        assert named in answer.text
        ids = prompt(33, 50)
        single = await pair.generate(session, pair.single.base_url, ids)
        assert different(single, (await pair.pair(session, ids))[1]) == ""

    run(work)
    assert pair.is_alive(pair.prefill)
    assert pair.is_alive(pair.decode)


def test_foreign_bytes_on_the_bootstrap_port_do_no_harm(pair: SglangStand) -> None:
    for content in (b"GET /route HTTP/1.1\r\n\r\n", b"\x00" * 64, b"\xff" * 4096):
        with (
            contextlib.suppress(ConnectionError, TimeoutError),
            socket.create_connection(("127.0.0.1", pair.bootstrap_port), timeout=10) as foreign,
        ):
            foreign.sendall(content)
            while foreign.recv(4096):
                pass
    assert pair.is_alive(pair.prefill)

    async def work(session: aiohttp.ClientSession) -> None:
        ids = prompt(34, 50)
        single = await pair.generate(session, pair.single.base_url, ids)
        assert different(single, (await pair.pair(session, ids))[1]) == ""

    run(work)


def test_a_peer_of_another_protocol_version_is_refused_with_both_numbers(pair: SglangStand) -> None:
    """A newer release may add fields, which are skipped; one with another version is sent the reason, and no more."""
    frame = encode(Incarnation("another"), "", Heartbeat(from_source=False, live=()))
    other = frame.replace(b"\xa7version" + bytes([PROTOCOL]), b"\xa7version\x63")
    assert other != frame
    fields = msgspec.msgpack.decode(frame)
    with WirePeer.dial(pair.bootstrap_port, pair.key.encode()) as peer:
        peer.send(msgspec.msgpack.encode({**fields, "from_the_future": [1, 2, 3]}))
        peer.send(other)
        message = decode(peer.receive()).message
        while isinstance(message, Hello):
            # An unknown peer is asked for its card.
            message = decode(peer.receive()).message
        assert message == Refused(f"protocol version is {PROTOCOL} here and 99 there"), "and nothing about the first one"

    async def work(session: aiohttp.ClientSession) -> None:
        ids = prompt(35, 50)
        single = await pair.generate(session, pair.single.base_url, ids)
        assert different(single, (await pair.pair(session, ids))[1]) == ""

    run(work)


def test_the_first_and_the_last_room_are_served_and_used_again_at_once(pair: SglangStand) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        for number, room in enumerate((1, (1 << 63) - 1, (1 << 63) - 1, 1)):
            ids = prompt(50 + number, 40)
            single = await pair.generate(session, pair.single.base_url, ids)
            assert different(single, (await pair.pair(session, ids, room=room))[1]) == ""

    run(work)


def test_a_bootstrap_host_may_be_a_name(pair: SglangStand) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        ids = prompt(36, 50)
        single = await pair.generate(session, pair.single.base_url, ids)
        assert different(single, (await pair.pair(session, ids, bootstrap_host="localhost"))[1]) == ""

    run(work)


def test_instances_register_again_with_a_router_that_was_started_again(pair: SglangStand) -> None:
    pair.fleet.kill("router")
    until = time.monotonic() + 60
    while all(death.name != "router" for death in pair.fleet.deaths()):
        assert time.monotonic() < until, "the router has not ended"
        time.sleep(0.05)
    pair.fleet.restart("router")
    while not pair.fleet.is_healthy("router"):
        assert time.monotonic() < until + 60, "no instance has registered with the router"
        time.sleep(0.1)

    async def work(session: aiohttp.ClientSession) -> None:
        ids = prompt(37, 50)
        single = await pair.generate(session, pair.single.base_url, ids)
        answer = await pair.generate(session, pair.router_url, ids)
        while answer.status == 503 and time.monotonic() < until + 60:
            # One of the two has registered, and the other one has not.
            await asyncio.sleep(0.2)
            answer = await pair.generate(session, pair.router_url, ids)
        assert different(single, answer) == ""

    run(work)


def test_1000_rooms_at_once_need_no_more_threads_and_files(pair: SglangStand) -> None:
    """Of the schedulers, which have the agents; the HTTP servers have a connection for each request."""
    before = {part.name: _threads_and_files(part) for part in (pair.prefill, pair.decode)}
    largest = dict(before)

    async def work(session: aiohttp.ClientSession) -> None:
        tasks = [asyncio.create_task(pair.pair(session, prompt(index, 6), 2)) for index in range(1000)]
        while not all(task.done() for task in tasks):
            for part in (pair.prefill, pair.decode):
                now = await asyncio.to_thread(_threads_and_files, part)
                largest[part.name] = max(largest[part.name][0], now[0]), max(largest[part.name][1], now[1])
            await asyncio.sleep(1)
        failed = [answer for task in tasks for answer in task.result() if answer.status != 200]
        assert not failed, failed[:3]

    run(work)
    wait_at_rest(pair.prefill, pair.decode)
    for name, (threads, files) in before.items():
        assert largest[name][0] <= threads + 2, name
        assert largest[name][1] <= files + 4, name


def _threads_and_files(part: FleetPart) -> tuple[int, int]:
    """Of the scheduler of a server: the process that listens at its control address."""
    port = f":{ControlAddress.parse(part.control_address).handshake:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {f"socket:[{line[9]}]" for line in lines if line[1].endswith(port) and line[3] == "0A"}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            files = [str(file.readlink()) for file in (process / "fd").iterdir()]
            if listening.intersection(files):
                return len(list((process / "task").iterdir())), len(files)
    raise AssertionError(f"no process listens at the control address of {part.name}")


def test_sglang_reports_the_backend_that_it_runs(pair: SglangStand) -> None:
    with urllib.request.urlopen(f"{pair.prefill.base_url}/server_info", timeout=30) as answer:
        assert json.load(answer)["disaggregation_transfer_backend"] == "kvbaton"


def test_the_check_notices_a_cache_that_never_arrives() -> None:
    with stand(StandSpec(drop_writes=True)) as dropping:

        async def work(session: aiohttp.ClientSession) -> None:
            found = 0
            for seed in range(8):
                ids = prompt(seed, 100)
                single = await dropping.generate(session, dropping.single.base_url, ids)
                found += bool(different(single, (await dropping.pair(session, ids))[1]))
            assert found == 8

        run(work)
