"""Settings that few use, on real vLLM: kv_both, transport tcp, checksums, both policies for loads that fail.

Two servers that are source and target alike, so that either can hand over to the other. The second one differs: in push it
checks nothing, in pull it computes what failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from vllm_handing import Client, Pair, assert_equal, prompt_of, together
from vllm_servers import Server, ServerSpec, servers

from kvbaton.config import OnFailure
from kvbaton.core.handoff import Integrity, Mode
from kvbaton.errors import PeerError

pytest_plugins = ["vllm_fixtures"]
pytestmark = [pytest.mark.vllm_full, pytest.mark.timeout(1800)]

LIMITS = {"transfer_timeout": 10, "defer_timeout": 12, "stop_timeout": 2, "retry": 0.5}


@pytest.fixture(scope="module", params=[Mode.PUSH, Mode.PULL], ids=str)
def pair(request: pytest.FixtureRequest, single: Server) -> Iterator[Pair]:
    """From the first to the second; the second differs."""
    first = ServerSpec(
        "first", "prefill", request.param, OnFailure.FAIL, Integrity.FULL, "tcp", LIMITS, holds=True, kv_role="kv_both"
    )
    second = replace(first, name="second")
    if request.param is Mode.PUSH:
        second = replace(second, integrity=Integrity.OFF)
    else:
        second = replace(second, policy=OnFailure.RECOMPUTE)
    with servers(first, second) as (one, other):
        yield Pair(request.param, one, other, single)


def reversed_(pair: Pair) -> Pair:
    return replace(pair, prefill=pair.decode, decode=pair.prefill)


def test_two_that_are_both_hand_over_either_way_at_once(pair: Pair) -> None:
    async def send(client: Client) -> None:
        back = client.with_pair(reversed_(pair))
        await asyncio.gather(
            client.assert_serves(*(prompt_of(length, "there") for length in (5, 128, 300))),
            back.assert_serves(*(prompt_of(length, "back") for length in (7, 129, 256))),
        )

    together(pair, send)
    pair.wait_idle()


def test_bytes_that_changed_on_their_way_fail_the_request_and_are_not_cached(pair: Pair) -> None:
    """With checksums in full. The same prompt is answered rightly afterwards: nothing of it was kept."""

    async def send(client: Client) -> None:
        prompt = prompt_of(300, "corrupt")
        with pair.prefill.holding("corrupt"), pytest.raises(PeerError):
            await client.hand_off(prompt)
        await client.assert_serves(prompt)

    together(reversed_(pair), send)
    pair.wait_idle()
    assert "checksum" in pair.prefill.log()


def test_what_failed_is_computed_where_that_is_the_policy(pair: Pair) -> None:
    if pair.mode is Mode.PUSH:
        pytest.skip("in push the second server checks nothing")

    async def send(client: Client) -> None:
        prompt = prompt_of(300, "computed")
        with pair.decode.holding("corrupt"):
            given = await client.hand_off(prompt)
        assert given.record["recomputed"]
        assert not given.record["handed_off"]
        assert_equal(await client.alone(prompt), given)
        await client.assert_serves(prompt_of(300, "handed over"))

    together(pair, send)
    pair.wait_idle()


def test_the_control_without_checksums_wrong_bytes_are_served(pair: Pair) -> None:
    if pair.mode is Mode.PULL:
        pytest.skip("in pull the second server checks everything")

    async def send(client: Client) -> None:
        prompt = prompt_of(300, "unnoticed")
        with pair.decode.holding("drop"):
            given = await client.hand_off(prompt)
        alone = await client.alone(prompt)
        assert given.record["handed_off"]
        assert given.answer.tokens != alone.answer.tokens

    together(pair, send)
    pair.wait_idle()
