"""Many requests at once, and many one after another with clients that leave, on real vLLM: right answers, and nothing grows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from vllm_handing import Client, Pair, prompt_of, together
from vllm_loading import assert_control_shows_at_load, assert_many_at_once, assert_nothing_grows
from vllm_servers import Server, ServerSpec, servers

from kvbaton.core.handoff import Mode
from kvbaton.errors import PeerError

pytest_plugins = ["vllm_fixtures"]
pytestmark = [pytest.mark.vllm_full, pytest.mark.timeout(2400)]

LIMITS = {"transfer_timeout": 30, "defer_timeout": 40}


@pytest.fixture(scope="module", params=[Mode.PUSH, Mode.PULL], ids=str)
def pair(request: pytest.FixtureRequest, single: Server) -> Iterator[Pair]:
    sides = [ServerSpec(role, role, request.param, settings=LIMITS, holds=True) for role in ("prefill", "decode")]
    with servers(*sides) as (prefill, decode):
        yield Pair(request.param, prefill, decode, single)


def test_after_300_requests_of_which_a_tenth_is_aborted_nothing_has_grown(pair: Pair) -> None:
    assert_nothing_grows(pair)


@pytest.mark.parametrize("count", [256, 512])
def test_many_at_once_are_all_answered_as_by_one_server(pair: Pair, count: int) -> None:
    assert_many_at_once(pair, count)


def test_the_control_at_this_load_wrong_bytes_show(pair: Pair) -> None:
    assert_control_shows_at_load(pair)


def test_a_request_that_names_no_living_source_fails_in_time(pair: Pair) -> None:
    async def send(client: Client) -> None:
        params = {"do_remote_prefill": True, "transfer_id": "no-source", "remote_host": "127.0.0.1", "remote_port": 1}
        with pytest.raises(PeerError):
            await asyncio.wait_for(client.send(pair.decode.url, prompt_of(20), 2, params), 90)

    together(pair, send)
    pair.wait_idle()
