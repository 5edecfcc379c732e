"""SGLang's own mori backend, unchanged, on the drop-in for MoRI: every answer is that of one plain SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
import pytest
from sglang_stand import SglangStand, StandSpec, different, prompt, run, stand
from test_sglang_verify import verify

from kvbaton.launch.router_peers import ensure_router_peers, sglang_router_part
from kvbaton.verify.stored import StoredCounts

pytestmark = [pytest.mark.sglang_full, pytest.mark.timeout(1800)]

_COUNTS = StoredCounts()


@pytest.fixture(scope="module")
def pair() -> Iterator[SglangStand]:
    with stand(StandSpec(connector="mori", counts_directory=_COUNTS.directory)) as running:
        yield running
    _COUNTS.close()


def test_twenty_answers_are_the_same() -> None:
    code, document = verify("--connector", "mori", "--requests", "20", "--longest-prompt", "600", "--max-tokens", "8")
    assert code == 0, document["problems"]
    assert document["equal"] + document["near_ties"] == document["handed_off"] == 20


def test_a_control_that_stores_nothing_is_noticed() -> None:
    code, document = verify("--connector", "mori", "--requests", "8", "--longest-prompt", "300", "--drop-writes")
    assert code == 1
    assert document["different"] > 0


def test_sglangs_own_balancer_is_in_front_of_it(pair: SglangStand) -> None:
    port, metrics = pair.ports.pick(), pair.ports.pick()
    prefill, decode = (int(part.base_url.rpartition(":")[2]) for part in (pair.prefill, pair.decode))
    peers = ensure_router_peers(print)
    pair.fleet.start(sglang_router_part(peers, port, prefill, decode, metrics, bootstrap_port=pair.bootstrap_port))
    pair.fleet.wait_healthy(120)
    before = _COUNTS.totals()[1]

    async def work(session: aiohttp.ClientSession) -> None:
        for seed in range(8):
            ids = prompt(seed, 20 + 40 * seed)
            single = await pair.generate(session, pair.single.base_url, ids)
            assert different(single, await pair.generate(session, f"http://127.0.0.1:{port}", ids)) == ""

    run(work)
    assert _COUNTS.totals()[1] >= before + 8, "every request stored something through the drop-in"


@pytest.mark.parametrize("count", [64, 256])
def test_many_at_once(pair: SglangStand, count: int) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        prompts = [prompt(1000 * count + index, 3 + index % 90) for index in range(count)]
        answers = await asyncio.gather(*(pair.pair(session, ids) for ids in prompts))
        alone = await asyncio.gather(*(pair.generate(session, pair.single.base_url, ids) for ids in prompts))
        assert [different(single, decode) for single, (_, decode) in zip(alone, answers, strict=True)] == [""] * count

    run(work)
