"""Blocks of a real vLLM that are used again before their target has read them: it reads them, and never serves them.

The source promises to keep its blocks longer than its target waits, and does not: a process that stood still, or a clock
that runs too fast, breaks that promise too. Nothing is cached, so that blocks are used again at once.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest
from vllm_handing import Client, Given, Pair, assert_equal, prompt_of, together
from vllm_servers import Server, ServerSpec, servers

from kvbaton.config import OnFailure
from kvbaton.core.handoff import Mode
from kvbaton.errors import PeerError

pytest_plugins = ["vllm_fixtures"]
pytestmark = [pytest.mark.vllm_full, pytest.mark.timeout(1800)]

LIMITS = {"transfer_timeout": 100, "defer_timeout": 120, "stop_timeout": 2, "retry": 0.5}
LEASE_S = 6.0
DELAY_S = 60.0
BLOCKS = 24


@pytest.fixture(scope="module", params=list(OnFailure), ids=str)
def policy(request: pytest.FixtureRequest) -> OnFailure:
    return OnFailure(request.param)


@pytest.fixture(scope="module")
def pair(policy: OnFailure, single: Server) -> Iterator[Pair]:
    """A source that promises `defer_timeout`, and keeps its blocks for `LEASE_S`."""
    arguments = ("--num-gpu-blocks-override", str(BLOCKS), "--no-enable-prefix-caching")
    sides = [
        ServerSpec("prefill", "prefill", Mode.PULL, settings=LIMITS, arguments=arguments, holds=True, lease_s=LEASE_S),
        ServerSpec("decode", "decode", Mode.PULL, policy, settings=LIMITS, arguments=arguments, holds=True),
    ]
    with servers(*sides) as (prefill, decode):
        yield Pair(Mode.PULL, prefill, decode, single)


async def let_blocks_be_used_again(client: Client) -> None:
    """The source stands still for longer than its lease, goes on, and its blocks go to other requests."""
    prefill = client.pair.prefill
    prefill.signal(signal.SIGSTOP)
    await asyncio.sleep(LEASE_S)
    prefill.signal(signal.SIGCONT)
    await client.until(prefill.is_idle, "the source to free its blocks", DELAY_S / 2)
    await client.write_to_blocks(prefill, BLOCKS)


def test_blocks_that_were_used_again_are_read_and_never_served(pair: Pair, policy: OnFailure) -> None:
    """The target reads the bytes of another request. That is the control: without the check they would be served."""

    async def send(client: Client) -> None:
        prompt = prompt_of(120, "reused")
        with pair.decode.holding("delay", "0.1"):
            single, right = await client.alone(prompt), await client.hand_off(prompt)
        assert_equal(single, right)
        true_bytes, held = pair.decode.read(), len(pair.decode.held())
        with pair.decode.holding("silent"):
            with pair.decode.holding("delay", str(DELAY_S)):
                late = asyncio.create_task(client.hand_off(prompt))
                await client.until(lambda: len(pair.decode.held()) > held, "copies are held up")
            with pair.prefill.holding("mute"):
                await let_blocks_be_used_again(client)
                assert len(pair.decode.read()) == len(true_bytes), "the target has read too early; this tests nothing"
                await client.until(lambda: len(pair.decode.read()) > len(true_bytes), "the target to read", DELAY_S)
        read = pair.decode.read()[len(true_bytes) :]
        assert true_bytes
        assert not set(read) & set(true_bytes), "these are not the bytes of the prompt"
        (end,) = await asyncio.wait_for(asyncio.gather(late, return_exceptions=True), 120)
        if policy is OnFailure.FAIL:
            assert isinstance(end, PeerError), end
        else:
            assert isinstance(end, Given), end
            assert end.record["recomputed"]
            assert_equal(single, end)
        await asyncio.to_thread(pair.wait_idle, 60)
        await client.assert_serves(prompt_of(140, "after blocks were used again"))

    together(pair, send)
