"""Between engines: the caches of the embedded engine, of vLLM and of SGLang hold the same numbers in other orders."""

from __future__ import annotations

import itertools
import time

import numpy as np
import numpy.typing as npt
import pytest
from sglang_instances import CHANNELS, HEADS, LAYERS, ArrayPool, Instance, Request, instances, wait_for

from kvbaton.agent.engine_port import Allocation, Granted, Landed, Offer, SourceRequest
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Aux, HandoffKey, Mode, room_transfer_id
from kvbaton.core.layout import HeadRange, Layout
from kvbaton.core.topology import Shape
from kvbaton.engines.embedded.cache import PagedCache
from kvbaton.engines.embedded.config import ModelConfig
from kvbaton.engines.instance import AgentSettings, ModelIdentity, new_incarnation, open_driver
from kvbaton.engines.sglang.halves import Poll, prompt_digest
from kvbaton.engines.vllm.device import HostDevice
from kvbaton.engines.vllm.tensors import CacheTensor, LayerSpec, RegisteredCache, instance_caches
from kvbaton.launch.ports import PortPicker
from kvbaton.transport.base import Region

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


def _driver(cache: PagedCache | _VllmCache, layout: Layout, port: int):  # type: ignore[no-untyped-def]
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


class _AsOnGpus(HostDevice):
    """Main memory whose blocks are in the order of their tensor."""

    reorders_blocks = False


class _VllmCache:
    """A cache as vLLM registers it: (blocks, heads, tokens, channels), keys and values in the channels of a head.

    On GPUs the shape is the truth, with the axes in either order in memory. On CPUs it is not: `reorders` is what its
    kernels do there.
    """

    def __init__(self, order: str = "heads first", reorders: bool = False) -> None:
        shape = (LAYERS, 12, HEADS, 8, 2 * CHANNELS) if order == "heads first" else (LAYERS, 12, 8, HEADS, 2 * CHANNELS)
        self.memory = np.zeros(shape, np.float32)
        self.data = self.memory if order == "heads first" else self.memory.swapaxes(2, 3)
        self.reorders = reorders
        self.region = Region.of(self.memory.reshape(-1).view(np.uint8))

    def layout(self) -> Layout:
        """What the connector makes of tensors that vLLM registers."""
        shape, strides = self.data.shape[1:], self.data.strides[1:]
        addresses = [self.data[layer].ctypes.data for layer in range(LAYERS)]
        tensors = [CacheTensor(f"layers.{layer}.attn", at, shape, strides, "float32", 4) for layer, at in enumerate(addresses)]
        specs = {each.layer: LayerSpec(8, (HeadRange(0, HEADS),), HEADS) for each in tensors}
        registered = RegisteredCache(tensors, specs, HostDevice() if self.reorders else _AsOnGpus())
        return instance_caches(Shape(), [registered.caches]).layouts[0]

    def of(self, layer: int, plane: int) -> npt.NDArray[np.float32]:
        """The keys or values of blocks 5 and 9, as (tokens, heads, channels)."""
        blocks = self.data[layer, [5, 9], :, :, plane * CHANNELS : (plane + 1) * CHANNELS]
        return blocks.transpose(0, 2, 1, 3).reshape(-1, HEADS, CHANNELS)[:TOKENS]


@pytest.mark.parametrize(
    ("order", "tp", "drops"),
    [("heads first", 1, False), ("tokens first", 1, False), ("tokens first", 2, False), ("tokens first", 2, True)],
    ids=["heads first", "tokens first", "two ranks", "control: no byte is moved"],
)
def test_vllm_to_sglang_on_the_layouts_that_gpus_have(order: str, tp: int, drops: bool) -> None:
    ports, cache = PortPicker(), _VllmCache(order)
    cache.data[:] = np.random.default_rng(3).normal(size=cache.data.shape)
    decode = Instance("decode", ports, tp, page=4, poison=True, drop_writes=drops)
    port, key = ports.pick(), HandoffKey(room_transfer_id(ROOM))
    driver = _driver(cache, cache.layout(), port)
    try:
        with instances(decode):
            driver.expect_target(key, prompt_digest(PROMPT))
            target = Request(decode, ROOM, PROMPT, f"127.0.0.1:{port}")
            target.each("ready")
            target.each("allocated", [1, 2, 3], 2, 0)
            _events(driver, Granted)
            driver.offer(Offer(key, ((5, 9),), TOKENS, Aux(7, -0.5)))
            assert wait_for(target, Poll.SUCCESS, Poll.FAILED) is Poll.SUCCESS, target.reason
            for plane, layer in itertools.product(range(2), range(LAYERS)):
                held = [pool.planes[plane][layer].array[4 : 4 + TOKENS] for pool in decode.pools]
                assert (np.concatenate(held, axis=1) == cache.of(layer, plane)).all() != drops
    finally:
        driver.close()


@pytest.mark.parametrize("order", ["heads first", "tokens first"])
def test_sglang_to_vllm_on_the_layouts_that_gpus_have(order: str) -> None:
    ports, cache = PortPicker(), _VllmCache(order)
    prefill, key = Instance("prefill", ports, 2, page=4), HandoffKey(room_transfer_id(ROOM))
    driver = _driver(cache, cache.layout(), ports.pick())
    try:
        with instances(prefill):
            prefill.fill([3, 1, 6], TOKENS, seed=2)
            source = Request(prefill, ROOM, PROMPT)
            host, _, port = prefill.address.partition(":")
            request = SourceRequest(key, prompt_digest(PROMPT), ControlAddress.of(host, int(port)), None, Mode.PUSH)
            driver.expect_source(request)
            driver.allocated(Allocation(request, ((5, 9),), TOKENS, 0))
            wait_for(source, Poll.WAITING)
            source.each("begin", 3, 1)
            source.each("send", [3, 1, 6])
            _events(driver, Landed)
            slots = [page * 4 + token for page in (3, 1, 6) for token in range(4)][:TOKENS]
            for plane, layer in itertools.product(range(2), range(LAYERS)):
                held = [pool.planes[plane][layer].array[slots] for pool in prefill.pools]
                assert (np.concatenate(held, axis=1) == cache.of(layer, plane)).all()
            untouched = [block for block in range(12) if block not in (5, 9)]
            assert not cache.data[:, untouched].any()
    finally:
        driver.close()


def test_vllm_on_cpus_is_refused_by_name() -> None:
    """Its kernels keep a block in an order that only they can read; so a request fails, and no byte is moved."""
    ports, cache = PortPicker(), _VllmCache(reorders=True)
    decode, port = Instance("decode", ports, page=4), ports.pick()
    driver = _driver(cache, cache.layout(), port)
    try:
        with instances(decode):
            target = Request(decode, ROOM, PROMPT, f"127.0.0.1:{port}")
            assert wait_for(target, Poll.FAILED) is Poll.FAILED
            assert "incompatible peer" in target.reason
            assert "whole_blocks is True here and False there" in target.reason
            assert not any(tensor.array.any() for tensors in decode.pools[0].planes for tensor in tensors)
    finally:
        driver.close()
