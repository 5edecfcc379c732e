"""Many requests at once, and many one after another with clients that leave: what must become of them, whatever the pair."""

from __future__ import annotations

import asyncio
import json
import random

from vllm_handing import Client, Given, Pair, is_near_tie, prompt_of, together

from watching import wait_until

__all__ = ["assert_control_shows_at_load", "assert_many_at_once", "assert_nothing_grows"]

NEAR_TIES = 0.02


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


def assert_nothing_grows(pair: Pair) -> None:
    """After 300 requests, of which a tenth is aborted, no table is larger, and the engines rest."""
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


def assert_many_at_once(pair: Pair, count: int) -> None:
    """So many at once are all handed over, and answered as by the single server."""

    async def send(client: Client) -> None:
        prompts = [prompt_of(3 + index % 12, f"{count} {index}") for index in range(count)]
        given = await asyncio.gather(*(client.hand_off(prompt, 2) for prompt in prompts))
        alone = await asyncio.gather(*(client.alone(prompt, 2) for prompt in prompts))
        assert all(each.record["handed_off"] for each in given)
        assert sum(map(is_near_tie, alone, given)) <= NEAR_TIES * count

    together(pair, send)
    pair.wait_idle()


def assert_control_shows_at_load(pair: Pair) -> None:
    """With nothing copied, most of 64 answers at once are wrong."""

    async def send(client: Client) -> None:
        prompts = [prompt_of(3 + index % 12, f"control {index}") for index in range(64)]
        with pair.decode.holding("drop"):
            given = await asyncio.gather(*(client.hand_off(prompt, 2) for prompt in prompts))
        alone = await asyncio.gather(*(client.alone(prompt, 2) for prompt in prompts))
        different = [one.answer.tokens != other.answer.tokens for one, other in zip(alone, given, strict=True)]
        assert sum(different) > len(prompts) / 2

    together(pair, send)
    pair.wait_idle()
