"""Many requests at once, and many one after another with clients that leave, on real vLLM: right answers, and nothing grows."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator

import pytest
from vllm_handing import Client, Given, Pair, is_near_tie, prompt_of, together
from vllm_servers import Server, ServerSpec, servers

from kvbaton.core.handoff import Mode
from kvbaton.errors import PeerError
from watching import wait_until

pytest_plugins = ["vllm_fixtures"]
pytestmark = [pytest.mark.vllm_full, pytest.mark.timeout(2400)]

LIMITS = {"transfer_timeout": 30, "defer_timeout": 40}
NEAR_TIES = 0.02


@pytest.fixture(scope="module", params=[Mode.PUSH, Mode.PULL], ids=str)
def pair(request: pytest.FixtureRequest, single: Server) -> Iterator[Pair]:
    sides = [ServerSpec(role, role, request.param, settings=LIMITS, holds=True) for role in ("prefill", "decode")]
    with servers(*sides) as (prefill, decode):
        yield Pair(request.param, prefill, decode, single)


def sizes(pair: Pair) -> dict[str, int]:
    """How large every table of the connector is, on both sides; a plain request to each makes its engine step."""
    pair.wait_idle()
    found: dict[str, int] = {}
    for server in (pair.prefill, pair.decode):
        for half in ("worker", "scheduler"):
            (server.hold / f"measure-{half}").touch()
        together(pair, lambda client, server=server: client.alone(prompt_of(4), 1, server.url))  # type: ignore[misc]
        for half in ("worker", "scheduler"):
            counted = json.loads((server.hold / f"sizes-{half}").read_text())
            found |= {f"{server.name} {half}{path}": size for path, size in counted.items()}
    return found


async def storm(client: Client, count: int, at_once: int, seed: str) -> list[Given | None]:
    """So many requests, every tenth of which is left by its client after a random while; None for those."""
    generator, slots = random.Random(seed), asyncio.Semaphore(at_once)

    async def one(index: int) -> Given | None:
        prompt, timeout_s = prompt_of(generator.choice((3, 40, 130)), f"{seed} {index}"), generator.uniform(0.01, 2.0)
        async with slots:
            try:
                return await asyncio.wait_for(client.hand_off(prompt, 3), timeout_s if index % 10 == 0 else 300)
            except TimeoutError:
                return None

    return await asyncio.gather(*(one(index) for index in range(count)))


def test_after_300_requests_of_which_a_tenth_is_aborted_nothing_has_grown(pair: Pair) -> None:
    together(pair, lambda client: storm(client, 40, 16, "warm-up"))
    before = sizes(pair)
    ends = together(pair, lambda client: storm(client, 300, 16, "storm"))
    assert all(ends[index] is not None for index in range(300) if index % 10), "those that waited were answered"
    assert any(end is None for end in ends), "some were aborted; else this tests nothing"
    after = sizes(pair)
    grown = {path: (before.get(path, 0), size) for path, size in after.items() if size > before.get(path, 0) + 2}
    assert not {path: change for path, change in grown.items() if not is_bounded(path)}
    pair.assert_alive()
    for server in (pair.prefill, pair.decode):
        wait_until(server.rests, f"the engine of {server.name} to take no steps")


def is_bounded(path: str) -> bool:
    """Memories that are meant to remember, up to a bound: ends of hand-offs, and timelines."""
    return any(name in path for name in ("._ends", "._transfers", "._forgotten"))


@pytest.mark.parametrize("count", [256, 512])
def test_many_at_once_are_all_answered_as_by_one_server(pair: Pair, count: int) -> None:
    async def send(client: Client) -> None:
        prompts = [prompt_of(3 + index % 12, f"{count} {index}") for index in range(count)]
        given = await asyncio.gather(*(client.hand_off(prompt, 2) for prompt in prompts))
        alone = await asyncio.gather(*(client.alone(prompt, 2) for prompt in prompts))
        assert all(each.record["handed_off"] for each in given)
        assert sum(map(is_near_tie, alone, given)) <= NEAR_TIES * count

    together(pair, send)
    pair.wait_idle()


def test_the_control_at_this_load_wrong_bytes_show(pair: Pair) -> None:
    async def send(client: Client) -> None:
        prompts = [prompt_of(3 + index % 12, f"control {index}") for index in range(64)]
        with pair.decode.holding("drop"):
            given = await asyncio.gather(*(client.hand_off(prompt, 2) for prompt in prompts))
        alone = await asyncio.gather(*(client.alone(prompt, 2) for prompt in prompts))
        different = [one.answer.tokens != other.answer.tokens for one, other in zip(alone, given, strict=True)]
        assert sum(different) > len(prompts) / 2

    together(pair, send)
    pair.wait_idle()


def test_a_request_that_names_no_living_source_fails_in_time(pair: Pair) -> None:
    async def send(client: Client) -> None:
        params = {"do_remote_prefill": True, "transfer_id": "no-source", "remote_host": "127.0.0.1", "remote_port": 1}
        with pytest.raises(PeerError):
            await asyncio.wait_for(client.send(pair.decode.url, prompt_of(20), 2, params), 90)

    together(pair, send)
    pair.wait_idle()
