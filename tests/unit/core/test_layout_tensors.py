"""Layouts from real tensors: the shapes of the field, read by the names of their axes, byte for byte as NumPy has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from caches import element_offset

from kvbaton.core.layout import Group, HeadRange, Layout
from kvbaton.core.pair import pair_layouts
from kvbaton.core.plan import plan_runs
from kvbaton.core.tensors import LayerTensor, dense_tensor, read_axes, split_layers, tensor_group
from kvbaton.errors import ConfigError

B, T, H, D = 5, 4, 2, 6
HEADS = (HeadRange(0, H),)

FIELD: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, int]]] = {
    "halves of the whole": ((2, B, T, H, D), ("plane", "block", "token", "head", "channel"), {}),
    "halves of a block": ((B, 2, T, H, D), ("block", "plane", "token", "head", "channel"), {}),
    "heads-major": ((B, 2, H, T, D), ("block", "plane", "head", "token", "channel"), {}),
    "fused in the last axis": ((B, H, T, 2 * D), ("block", "head", "token", "plane*channel"), {"channel": D}),
    "kernel pages": ((B * 2, 2, H, T // 2, D), ("block*page", "plane", "head", "token", "channel"), {"page": 2}),
    "packed channels": ((2, B, H, D // 2, T, 2), ("plane", "block", "head", "channel", "token", "channel"), {}),
    "channels before tokens": ((2, B, H, D, T), ("plane", "block", "head", "channel", "token"), {}),
}


def described(array: np.ndarray[Any, Any], axes: tuple[str, ...], sizes: dict[str, int]) -> Group:
    tensor = LayerTensor(0, array.shape, array.strides, str(array.dtype), array.itemsize)
    return tensor_group("full", [0], [tensor], axes, heads=HEADS, total_heads=H, sizes=sizes)


@pytest.mark.parametrize("name", FIELD)
def test_every_element_is_found_where_the_tensor_has_it(name: str) -> None:
    shape, axes, sizes = FIELD[name]
    array = np.arange(int(np.prod(shape)), dtype=np.uint16).reshape(shape)
    group = described(array, axes, sizes)
    assert (group.blocks, group.block_tokens) == (B, T)
    assert Layout(array.nbytes, (group,)).problem() == ""
    seen = {
        element_offset(group, plane, 0, block, token, head, channel)
        for plane in range(2)
        for block in range(B)
        for token in range(T)
        for head in range(H)
        for channel in range(D)
    }
    assert seen == set(range(0, array.nbytes, 2))


@pytest.mark.parametrize("source", FIELD)
@pytest.mark.parametrize("target", FIELD)
def test_any_tensor_of_the_field_to_any_other(source: str, target: str) -> None:
    """Content is written and read through the tensors themselves, not through the description."""
    content = np.random.default_rng(1).integers(1, 60_000, (2, B * T, H, D), np.uint16)
    arrays, groups = [], []
    for name in (source, target):
        shape, axes, sizes = FIELD[name]
        arrays.append(np.zeros(shape, np.uint16))
        groups.append(described(arrays[-1], axes, sizes))
    order = (3, 0, 4, 1)
    _view(arrays[0], source)[:, list(order)] = content[:, : 4 * T].reshape(2, 4, T, H, D)
    pair = pair_layouts(Layout(arrays[0].nbytes, (groups[0],)), Layout(arrays[1].nbytes, (groups[1],)))
    bytes_of = [array.reshape(-1).view(np.uint8) for array in arrays]
    for source_at, target_at, count in plan_runs(pair, (order,), ((1, 2, 0, 3),), 0, 4 * T).tolist():
        bytes_of[1][target_at : target_at + count] = bytes_of[0][source_at : source_at + count]
    found = _view(arrays[1], target)
    assert (found[:, [1, 2, 0, 3]].reshape(2, 4 * T, H, D) == content[:, : 4 * T]).all()
    assert not found[:, 4].any()


def _view(array: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """The same memory as (plane, block, token, head, channel), by hand."""
    match name:
        case "halves of the whole":
            return array
        case "halves of a block":
            return array.transpose(1, 0, 2, 3, 4)
        case "heads-major":
            return array.transpose(1, 0, 3, 2, 4)
        case "fused in the last axis":
            return array.reshape(B, H, T, 2, D).transpose(3, 0, 2, 1, 4)
        case "kernel pages":
            return _Pages(array)  # type: ignore[return-value]
        case "packed channels":
            return _Packed(array)  # type: ignore[return-value]
        case _:
            return array.transpose(0, 1, 4, 2, 3)


class _Copied:
    """What cannot be one view of five axes: reads and writes go through a copy."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def _read(self) -> np.ndarray[Any, Any]:
        raise NotImplementedError

    def _write(self, whole: np.ndarray[Any, Any]) -> None:
        raise NotImplementedError

    def __getitem__(self, key: Any) -> Any:
        return self._read()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        whole = self._read()
        whole[key] = value
        self._write(whole)


class _Pages(_Copied):
    def _read(self) -> np.ndarray[Any, Any]:
        pages = self._array.reshape(B, 2, 2, H, T // 2, D).transpose(2, 0, 1, 4, 3, 5)
        return pages.reshape(2, B, T, H, D).copy()

    def _write(self, whole: np.ndarray[Any, Any]) -> None:
        pages = whole.reshape(2, B, 2, T // 2, H, D).transpose(1, 2, 0, 4, 3, 5)
        self._array[:] = pages.reshape(self._array.shape)


class _Packed(_Copied):
    def _read(self) -> np.ndarray[Any, Any]:
        return self._array.transpose(0, 1, 4, 2, 3, 5).reshape(2, B, T, H, D).copy()

    def _write(self, whole: np.ndarray[Any, Any]) -> None:
        self._array[:] = whole.reshape(2, B, T, H, D // 2, 2).transpose(0, 1, 3, 4, 2, 5)


def test_a_state_has_no_tokens() -> None:
    tensor = LayerTensor(64, (7, 12, 3), (72, 6, 2), "float16", 2)
    ranges = (HeadRange(0, 4), HeadRange(16, 8))
    group = tensor_group("conv", [2], [tensor], ("block", "head", "channel"), heads=ranges, total_heads=32, planes=("conv",))
    assert group.is_state
    assert (group.blocks, group.planes[0].head_size, group.planes[0].layer_offsets) == (7, 3, (64,))
    assert group.problem(64 + 7 * 72) == ""


REFUSED: dict[str, tuple[tuple[str, ...], dict[str, int], str]] = {
    "too few axes": (("block", "token"), {}, "which is not 2 axes"),
    "unknown": (("block", "token", "horse", "channel"), {}, "'horse'"),
    "twice": (("block", "token", "token", "channel"), {}, "'token'"),
    "parts": (("block", "head", "token", "plane*channel"), {"channel": 5}, "not whole parts"),
    "parts without a size": (("block", "head", "token", "plane*channel"), {}, "not whole parts"),
    "other heads": (("block", "token", "head", "plane*channel"), {"channel": D}, "2 planes and 4 heads"),
    "no blocks": (("token", "head", "page", "plane*channel"), {"channel": D}, "in blocks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_tensor_is_not_is_refused(name: str) -> None:
    axes, sizes, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        described(np.zeros((B, H, T, 2 * D), np.uint16), axes, sizes)


def test_tensors_that_differ_are_refused_with_both() -> None:
    one = LayerTensor(0, (4, 2), (4, 2), "float16", 2)
    other = LayerTensor(64, (5, 2), (4, 2), "float16", 2)
    with pytest.raises(ConfigError, match=r"tensors 0 and 1 of a group differ in shape: \(4, 2\) and \(5, 2\)"):
        tensor_group(
            "full", [0, 1], [one, other], ("block", "channel"), heads=(HeadRange(0, 1),), total_heads=1, planes=("kv",)
        )
    with pytest.raises(ConfigError, match="has no tensors"):
        tensor_group("full", [], [], ("block",), heads=HEADS, total_heads=H)


def test_axes_are_read_from_the_outside_in() -> None:
    tensor = LayerTensor(0, (6, 8), (16, 2), "float16", 2)
    found = read_axes(tensor, ("block*page", "plane*channel"), {"page": 3, "channel": 4})
    assert {name: (axis.count, axis.stride) for name, (axis,) in found.items()} == {
        "block": (2, 48),
        "page": (3, 16),
        "plane": (2, 8),
        "channel": (4, 2),
    }


@pytest.mark.parametrize("shape", [(3, 2, 4), (1, 5), (2, 0, 3)])
def test_a_dense_tensor_has_the_strides_of_numpy(shape: tuple[int, ...]) -> None:
    tensor = dense_tensor(shape, "float16", 2)
    if 0 not in shape:
        assert tensor.strides == np.zeros(shape, np.float16).strides
    assert (tensor.offset, tensor.shape, tensor.element_bytes) == (0, shape, 2)


def test_layers_of_one_tensor_are_the_slices_of_numpy() -> None:
    whole = np.zeros((3, 2, 4), np.float32)
    layers = split_layers(LayerTensor(64, whole.shape, whole.strides, "float32", 4))
    assert [(each.offset, each.shape, each.strides) for each in layers] == [
        (64 + layer * whole.strides[0], whole[layer].shape, whole[layer].strides) for layer in range(3)
    ]
