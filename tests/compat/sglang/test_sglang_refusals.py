"""Bad input on real SGLang: peers that do not fit, rooms used twice, fields missing. Refused by name, and the servers live."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from sglang_stand import Answer, Grid, Trio, different, generate, hand_over, new_room, prompt, run, wait_until_noted

from kvbaton.launch.fleet import FleetPart

pytestmark = [pytest.mark.sglang_full, pytest.mark.timeout(1800)]

WAIT_S = 60.0
LIMITS = {"limits": {"transfer_timeout": 10, "defer_timeout": 20, "queue_timeout": 120}}


@dataclass(frozen=True)
class Servers(Trio):
    """A prefill of two ranks, a decode whose pages are twice as large and whose cache has room for 1,024 tokens, and decode
    servers that do not fit.
    """

    misfits: dict[str, FleetPart]

    def check_all_alive(self) -> None:
        """Every server runs and answers, and the pair serves."""
        self.check_serves(70, *self.misfits.values())


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    grid = Grid()
    with grid.fleet:
        made = Servers(
            grid,
            grid.start("single", "both"),
            grid.start("prefill", "prefill", "tp2", settings=LIMITS, arguments=("--enable-metrics",)),
            grid.start("decode", "decode", settings=LIMITS, arguments=("--page-size", "32"), cache_blocks=8),
            {
                "another model": grid.start("another-model", "decode", settings=LIMITS, kind="mla"),
                "another dtype": grid.start("another-dtype", "decode", settings=LIMITS, cache_dtype="bfloat16"),
            },
        )
        grid.wait_healthy()
        yield made


@pytest.mark.parametrize("tokens", [1, 16, 31, 33, 200])
def test_pages_of_another_size_are_served(servers: Servers, tokens: int) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        ids = prompt(tokens, tokens)
        single = await generate(session, servers.single.base_url, ids)
        assert different(single, (await hand_over(session, servers.prefill, servers.decode, ids))[1]) == ""

    run(work)


@pytest.mark.parametrize("misfit", ["another model", "another dtype"])
def test_a_peer_that_does_not_fit_is_refused_by_name_on_both_sides(servers: Servers, misfit: str) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        asking = hand_over(session, servers.prefill, servers.misfits[misfit], prompt(3, 50))
        for answer in await asyncio.wait_for(asking, WAIT_S):
            assert answer.status == 500
            assert "incompatible peer" in answer.text

    run(work)
    servers.check_all_alive()


def test_a_prompt_that_is_too_long_for_decode_alone_ends_its_prefill_too(servers: Servers) -> None:
    """SGLang refuses it before it has a receiver; the prefill, which waits for pages, must not wait until queue_timeout."""

    async def work(session: aiohttp.ClientSession) -> None:
        asking = hand_over(session, servers.prefill, servers.decode, prompt(8, 1300))
        prefill, decode = await asyncio.wait_for(asking, WAIT_S)
        assert (prefill.status, decode.status) == (500, 400)
        assert "exceeds the maximum allowed length" in decode.text
        assert "decode refused it" in prefill.text

    run(work)
    servers.check_all_alive()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_room_used_twice_is_refused_by_name_and_the_first_request_is_served(servers: Servers, side: str) -> None:
    first, other = (servers.prefill, servers.decode) if side == "prefill" else (servers.decode, servers.prefill)

    async def work(session: aiohttp.ClientSession) -> None:
        ids, where = prompt(5, 80), servers.where()
        single = await generate(session, servers.single.base_url, ids)
        served = asyncio.create_task(generate(session, first.base_url, ids, **where))
        await wait_until_noted(first, where["bootstrap_room"], "arrived")
        second = await asyncio.wait_for(generate(session, first.base_url, ids, **where), WAIT_S)
        assert second.status == 500
        assert f"room {where['bootstrap_room']} is in use" in second.text
        answers = {other.name: await generate(session, other.base_url, ids, **where), first.name: await served}
        assert different(single, answers["decode"]) == ""
        assert answers["prefill"].tokens == single.tokens[:1]

    run(work)
    servers.check_all_alive()


def test_another_prompt_under_a_room_is_refused_and_the_right_one_is_served(servers: Servers) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        ids, where = prompt(6, 80), servers.where()
        served = asyncio.create_task(generate(session, servers.prefill.base_url, ids, **where))
        await wait_until_noted(servers.prefill, where["bootstrap_room"], "arrived")
        wrong = await asyncio.wait_for(generate(session, servers.decode.base_url, prompt(7, 80), **where), WAIT_S)
        assert wrong.status == 500
        assert "prompt" in wrong.text
        single = await generate(session, servers.single.base_url, ids)
        assert different(single, await generate(session, servers.decode.base_url, ids, **where)) == ""
        assert (await served).status == 200

    run(work)
    servers.check_all_alive()


@pytest.mark.parametrize(
    ("side", "fields", "named"),
    [
        ("decode", {"bootstrap_host": None}, "bootstrap_host"),
        ("decode", {"bootstrap_host": ""}, "bootstrap_host"),
        ("decode", {"bootstrap_host": "no-such-host.invalid"}, ""),
        ("decode", {"bootstrap_port": 0}, ""),
        ("decode", {"bootstrap_port": 70000}, "bootstrap_port"),
        ("decode", {"bootstrap_port": 1}, ""),
        ("decode", {"bootstrap_room": None}, "bootstrap"),
        ("decode", {"bootstrap_room": 0}, "bootstrap_room is 0"),
        ("decode", {"bootstrap_room": -5}, "bootstrap_room"),
        ("decode", {"bootstrap_room": 1 << 63}, "bootstrap_room"),
        ("decode", {"bootstrap_room": "seven"}, ""),
        ("decode", {"disagg_prefill_dp_rank": 3}, "disagg_prefill_dp_rank is 3"),
        ("prefill", {"bootstrap_room": None}, "bootstrap"),
        ("prefill", {"bootstrap_room": 0}, "bootstrap_room is 0"),
        ("prefill", {"bootstrap_room": 1 << 63}, "bootstrap_room"),
    ],
    ids=str,
)
def test_a_field_that_is_missing_or_wrong_is_refused(servers: Servers, side: str, fields: dict[str, Any], named: str) -> None:
    part = servers.prefill if side == "prefill" else servers.decode

    async def work(session: aiohttp.ClientSession) -> None:
        body = {name: value for name, value in {**servers.where(), **fields}.items() if value is not None}
        answer: Answer = await asyncio.wait_for(generate(session, part.base_url, prompt(2, 20), **body), WAIT_S)
        assert answer.status != 200
        assert named in answer.text

    run(work)
    assert servers.grid.is_alive(part)


def test_a_batch_has_a_room_for_each_of_its_prompts(servers: Servers) -> None:
    """As balancers send it: lists of hosts, ports and rooms."""
    prompts = [prompt(40 + index, 30 + 20 * index) for index in range(3)]

    async def ask(session: aiohttp.ClientSession, url: str, rooms: list[int]) -> list[tuple[int, ...]]:
        where = servers.where()
        body = {
            "input_ids": [list(each) for each in prompts],
            "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
            "bootstrap_host": [where["bootstrap_host"]] * 3,
            "bootstrap_port": [where["bootstrap_port"]] * 3,
            "bootstrap_room": rooms,
        }
        async with session.post(f"{url}/generate", json=body) as response:
            assert response.status == 200, await response.text()
            return [tuple(each["output_ids"]) for each in await response.json()]

    async def work(session: aiohttp.ClientSession) -> None:
        singles = [(await generate(session, servers.single.base_url, each)).tokens for each in prompts]
        rooms = [new_room() for _ in prompts]
        urls = (servers.prefill.base_url, servers.decode.base_url)
        _, decoded = await asyncio.gather(*(ask(session, url, rooms) for url in urls))
        assert decoded == singles

    run(work)


def test_after_all_that_the_pair_serves_and_sglang_has_counted_it(servers: Servers) -> None:
    servers.check_all_alive()
    with urllib.request.urlopen(f"{servers.prefill.base_url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = dict(re.findall(r"^sglang:(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE))
    for name in ("latency_ms", "alloc_ms", "total_mb", "speed_gb_s"):
        assert float(found[f"kv_transfer_{name}_count"]) > 0, name
    assert float(found["num_bootstrap_failed_reqs_total"]) > 0
