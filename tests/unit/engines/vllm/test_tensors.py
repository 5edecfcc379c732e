"""Layouts of registered tensors: found byte by byte, moved by a plan, and refused by name where they are not understood."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from kvbaton.core.layout import HeadRange, Layout
from kvbaton.core.plan import pair_layouts, plan_runs
from kvbaton.core.topology import Shape
from kvbaton.engines.vllm.device import device_of
from kvbaton.engines.vllm.tensors import CacheTensor, LayerSpec, RegisteredCache, instance_caches, read_tensors
from kvbaton.errors import ConfigError

HEADS, BLOCK_TOKENS, CHANNELS, BLOCKS = 3, 4, 6, 5
SPEC = LayerSpec(BLOCK_TOKENS, (HeadRange(0, HEADS),), HEADS)
Array = npt.NDArray[np.float32]


class Tensor:
    """As much of a torch tensor as is read."""

    def __init__(self, array: npt.NDArray[Any], device: str = "cpu") -> None:
        self.array, self.shape, self.dtype = array, array.shape, f"torch.{array.dtype}"
        self.device = type("Device", (), {"type": device, "__str__": lambda _: device})()

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def element_size(self) -> int:
        return self.array.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)


def one_storage(layers: int = 2) -> list[Array]:
    return list(np.zeros((layers, BLOCKS, HEADS, BLOCK_TOKENS, CHANNELS), np.float32))


def blocks_outside(layers: int = 2) -> list[Array]:
    """Every block holds all layers."""
    storage = np.zeros((BLOCKS, layers, HEADS, BLOCK_TOKENS, CHANNELS), np.float32)
    return [storage[:, layer] for layer in range(layers)]


def own_storages(layers: int = 2) -> list[Array]:
    """One allocation per layer, the last one first in memory."""
    storage = np.zeros((2 * layers, BLOCKS, HEADS, BLOCK_TOKENS, CHANNELS), np.float32)
    return [storage[2 * layer] for layer in reversed(range(layers))]


def registered(arrays: list[Array], spec: LayerSpec = SPEC) -> RegisteredCache:
    tensors = read_tensors({f"layer.{index}": Tensor(array) for index, array in enumerate(arrays)})
    return RegisteredCache(tensors, {tensor.layer: spec for tensor in tensors})


def layout_of(cache: RegisteredCache) -> Layout:
    return instance_caches(Shape(), [cache.caches]).layouts[0]


KINDS = {"one storage": one_storage, "blocks outside": blocks_outside, "own storages": own_storages}


@pytest.mark.parametrize("source_kind", KINDS)
@pytest.mark.parametrize("target_kind", KINDS)
def test_blocks_arrive_whole_whatever_lies_where(source_kind: str, target_kind: str) -> None:
    rng = np.random.default_rng(1)
    sources, targets = KINDS[source_kind](), KINDS[target_kind]()
    for array in sources:
        array[:] = rng.random(array.shape)
    source, target = registered(sources), registered(targets)
    runs = plan_runs(pair_layouts(layout_of(source), layout_of(target)), ((4, 1),), ((0, 3),), 0, 6)
    there, here = source.region.view, target.region.view
    for source_at, target_at, count in runs.tolist():
        here[target_at : target_at + count] = there[source_at : source_at + count]
    for before, after in zip(sources, targets, strict=True):
        assert np.array_equal(after[[0, 3]], before[[4, 1]])
        assert not after[[1, 2, 4]].any()


def test_only_the_named_blocks_are_poisoned() -> None:
    arrays = blocks_outside()
    cache = registered(arrays)
    cache.poison(layout_of(cache), ((0, 1, 3),), BLOCK_TOKENS)
    for array in arrays:
        assert (array[[1, 3]].view(np.uint8) == 0x4B).all()
        assert not array[[0, 2, 4]].any()


def test_the_description() -> None:
    cache = registered(one_storage(3))
    (group,) = layout_of(cache).groups
    (plane,) = group.planes
    assert (group.blocks, group.block_tokens, plane.head_count, plane.head_size) == (BLOCKS, BLOCK_TOKENS, HEADS, CHANNELS)
    assert (plane.dtype, group.whole_blocks, group.layers) == ("float32", True, (0, 1, 2))
    assert instance_caches(Shape(), [cache.caches]).numbers == {"layer.0": 0, "layer.1": 1, "layer.2": 2}
    assert layout_of(cache).problem() == ""


def test_what_lies_outside_the_tensors_is_not_described() -> None:
    storage = np.zeros((BLOCKS + 2, HEADS, BLOCK_TOKENS, CHANNELS), np.float32)
    cache = registered([storage[1:-1]])
    assert layout_of(cache).region_bytes == storage[1:-1].nbytes
    assert cache.address == storage[1:].ctypes.data


REFUSED: dict[str, tuple[list[Array], LayerSpec, str]] = {
    "none": ([], SPEC, "registered no KV cache"),
    "other heads": (one_storage(), LayerSpec(BLOCK_TOKENS, (HeadRange(0, HEADS + 1),), HEADS + 1), "has the shape"),
    "kernel blocks": (one_storage(), LayerSpec(BLOCK_TOKENS * 2, (HeadRange(0, HEADS),), HEADS), "has the shape"),
    "five axes": ([np.zeros((2, BLOCKS, HEADS, BLOCK_TOKENS, CHANNELS), np.float32)], SPEC, "has the shape"),
    "unlike layers": ([one_storage(1)[0], np.zeros((9, HEADS, BLOCK_TOKENS, CHANNELS), np.float32)], SPEC, "differ in blocks"),
    "in pieces": ([np.zeros((BLOCKS, 2 * HEADS, BLOCK_TOKENS, CHANNELS), np.float32)[:, ::2]], SPEC, "in pieces"),
    "aliases": ([one_storage(1)[0]] * 2, SPEC, "share memory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_by_name(name: str) -> None:
    arrays, spec, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        layout_of(registered(arrays, spec))


def test_layers_that_share_some_bytes_are_refused() -> None:
    storage = np.zeros((BLOCKS + 1, HEADS, BLOCK_TOKENS, CHANNELS), np.float32)
    with pytest.raises(ConfigError, match="share memory"):
        registered([storage[:-1], storage[1:]])


def test_a_cache_on_an_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="lie on xpu; main memory and NVIDIA GPUs"):
        device_of([Tensor(one_storage(1)[0], "xpu")])


def test_caches_on_two_devices_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="lie on cpu, cuda; a worker has one device"):
        device_of([Tensor(one_storage(1)[0], "cpu"), Tensor(one_storage(1)[0], "cuda")])


def test_what_is_no_tensor_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="registered a tuple"):
        read_tensors({"layer.0": (1, 2)})


def test_blocks_of_another_size_do_not_fit_together() -> None:
    layout = layout_of(registered(one_storage()))
    other = msgspec.structs.replace(layout.groups[0], block_tokens=8)
    with pytest.raises(Exception, match="block_tokens"):
        pair_layouts(layout, msgspec.structs.replace(layout, groups=(other,)))


def test_strides_are_counted_in_bytes() -> None:
    (tensor,) = read_tensors({"a": Tensor(one_storage(1)[0])})
    assert tensor.strides == (288, 96, 24, 4)
    assert tensor == CacheTensor("a", tensor.address, (5, 3, 4, 6), (288, 96, 24, 4), "float32", 4)
    assert tensor.end - tensor.address == 5 * 288
