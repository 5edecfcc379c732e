"""Between engines: the embedded engine's cache and SGLang's hold the same numbers in other orders."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import pytest
from sglang_instances import CHANNELS, HEADS, LAYERS, ArrayPool, Instance, Request, instances, wait_for

from kvbaton.agent.engine_port import Allocation, Granted, Landed, Offer, SourceRequest
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Aux, HandoffKey, Mode, room_transfer_id
from kvbaton.core.layout import Layout
from kvbaton.engines.embedded.cache import PagedCache
from kvbaton.engines.embedded.config import ModelConfig
from kvbaton.engines.instance import AgentSettings, ModelIdentity, new_incarnation, open_driver
from kvbaton.engines.sglang.halves import Poll, prompt_digest
from kvbaton.launch.ports import PortPicker

TOKENS = 10
PROMPT = tuple(range(TOKENS))
ROOM = 31


def _cache() -> PagedCache:
    sizes = {"layers": LAYERS, "hidden_size": 64, "heads": HEADS, "kv_heads": HEADS, "head_size": CHANNELS, "ffn_size": 64}
    others = {"architecture": "llama", "vocab_size": 64, "context_tokens": 64, "rope_theta": 1e4, "norm_epsilon": 1e-5}
    config = ModelConfig(**sizes, **others, tied_head=True)  # type: ignore[arg-type]
    return PagedCache(config, blocks=12, block_tokens=8)


def _in_halves(keys: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Channels as SGLang keeps them: the first of every two that rotate together, then the second ones."""
    return np.concatenate([keys[..., 0::2], keys[..., 1::2]], axis=-1)


def _driver(cache: PagedCache, layout: Layout, port: int):  # type: ignore[no-untyped-def]
    agents = AgentSettings(control_port=port)
    driver = open_driver(agents, new_incarnation(), ModelIdentity("m", "one"), layout, cache.region, lambda: None)
    driver.start()
    return driver


def _events(driver, kind: type):  # type: ignore[no-untyped-def]
    until = time.monotonic() + 20
    while True:
        for event in driver.events():
            if isinstance(event, kind):
                return event
        assert time.monotonic() < until, f"no {kind.__name__}"
        time.sleep(0.002)


@pytest.mark.parametrize("common", [True, False], ids=["common order", "control: own order"])
def test_embedded_to_sglang(common: bool) -> None:
    ports, cache = PortPicker(), _cache()
    cache.data[:] = np.random.default_rng(3).normal(size=cache.data.shape)
    decode = Instance("decode", ports, page=4, poison=True)
    port = ports.pick()
    driver = _driver(cache, cache.common_layout() if common else cache.layout(), port)
    key = HandoffKey(room_transfer_id(ROOM))
    try:
        with instances(decode):
            driver.expect_target(key, prompt_digest(PROMPT))
            target = Request(decode, ROOM, PROMPT, f"127.0.0.1:{port}")
            target.each("ready")
            target.each("allocated", [1, 2, 3], 2, 0)
            _events(driver, Granted)
            driver.offer(Offer(key, ((5, 9),), TOKENS, Aux(7, -0.5)))
            assert wait_for(target, Poll.SUCCESS, Poll.FAILED) is Poll.SUCCESS, target.reason
            assert decode.rows[0]["output_ids"][2].view(np.int32)[0] == 7
            pool = decode.pools[0]
            assert isinstance(pool, ArrayPool)
            for layer in range(LAYERS):
                source = np.concatenate([cache.data[layer, :, 5], cache.data[layer, :, 9]], axis=1)[:, :TOKENS]
                is_same = (pool.k_buffer[layer].array[4 : 4 + TOKENS] == _in_halves(source[0])).all()
                assert bool(is_same) == common
                assert (pool.v_buffer[layer].array[4 : 4 + TOKENS] == source[1]).all()
    finally:
        driver.close()


def test_sglang_to_embedded() -> None:
    ports, cache = PortPicker(), _cache()
    prefill = Instance("prefill", ports, page=4)
    driver = _driver(cache, cache.common_layout(), ports.pick())
    key = HandoffKey(room_transfer_id(ROOM))
    try:
        with instances(prefill):
            prefill.fill([3, 1, 6], TOKENS, seed=2)
            prefill.rows[0]["output_ids"][1].view(np.int32)[0] = 11
            source = Request(prefill, ROOM, PROMPT)
            host, _, port = prefill.address.partition(":")
            request = SourceRequest(key, prompt_digest(PROMPT), ControlAddress.of(host, int(port)), None, Mode.PUSH)
            driver.expect_source(request)
            driver.allocated(Allocation(request, ((2, 4),), TOKENS, 0))
            wait_for(source, Poll.WAITING)
            source.each("begin", 3, 1)
            source.each("send", [3, 1])
            source.each("send", [6])
            landed = _events(driver, Landed)
            assert landed.aux.token_id == 11
            assert wait_for(source, Poll.SUCCESS, Poll.FAILED) is Poll.SUCCESS
            pool = prefill.pools[0]
            slots = [page * 4 + token for page in (3, 1, 6) for token in range(4)][:TOKENS]
            for layer in range(LAYERS):
                found = np.concatenate([cache.data[layer, :, 2], cache.data[layer, :, 4]], axis=1)[:, :TOKENS]
                assert (_in_halves(found[0]) == pool.k_buffer[layer].array[slots]).all()
                assert (found[1] == pool.v_buffer[layer].array[slots]).all()
    finally:
        driver.close()
