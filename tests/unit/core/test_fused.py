"""Keys and values in the channels of a head, beside keys and values that are tensors of their own."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from kvbaton.core.checks import LegPart, PiecePlanner
from kvbaton.core.fused import split_fused
from kvbaton.core.handoff import HandoffKey, Integrity, Span, TransferId
from kvbaton.core.layout import MLA, HeadRange, Layout
from kvbaton.core.legs import assign_legs
from kvbaton.core.pair import pair_layouts
from kvbaton.core.plan import plan_runs
from kvbaton.core.tensors import LayerTensor, tensor_group
from kvbaton.errors import Incompatible

LAYERS, BLOCKS, TOKENS, HEADS = 2, 5, 4, 3
BLOCK_LISTS = ((1, 3),)
NEEDED = 7
ALL = (HeadRange(0, HEADS),)


class Memory:
    """Arrays of float32 in one region, and the layout of them."""

    def __init__(
        self, parts: list[tuple[str, int]], tokens_first: bool, *, kind: str = "full", whole_blocks: bool = False
    ) -> None:
        """`parts`: each plane with its channels; one plane is fused."""
        inner = (TOKENS, HEADS) if tokens_first else (HEADS, TOKENS)
        shapes = [(LAYERS, BLOCKS, *inner, channels) for _, channels in parts]
        sizes = [int(np.prod(shape)) for shape in shapes]
        self.flat = np.zeros(sum(sizes), np.float32)
        starts = itertools.accumulate(sizes, initial=0)
        arrays = [self.flat[at : at + size].reshape(shape) for at, size, shape in zip(starts, sizes, shapes, strict=False)]
        self.arrays = [array.swapaxes(2, 3) if tokens_first else array for array in arrays]
        groups = []
        for (name, _), array in zip(parts, self.arrays, strict=True):
            at = array.ctypes.data - self.flat.ctypes.data
            tensors = [
                LayerTensor(at + layer * array.strides[0], array.shape[1:], array.strides[1:], "float32", 4)
                for layer in range(LAYERS)
            ]
            axes = ("block", "head", "token", "channel")
            groups.append(
                tensor_group(
                    kind, range(LAYERS), tensors, axes, heads=ALL, total_heads=HEADS, planes=(name,), whole_blocks=whole_blocks
                )
            )
        planes = tuple(group.planes[0] for group in groups)
        self.layout = Layout(self.flat.nbytes, (msgspec.structs.replace(groups[0], planes=planes),))

    def tokens(self) -> npt.NDArray[np.float32]:
        """What the first tokens of the blocks hold: keys, then values, in one axis."""
        joined = np.concatenate([array[:, BLOCK_LISTS[0]] for array in self.arrays], axis=-1)
        return joined.transpose(0, 1, 3, 2, 4).reshape(LAYERS, -1, HEADS, joined.shape[-1])[:, :NEEDED]


def fused(channels: int, tokens_first: bool = False, **more: object) -> Memory:
    return Memory([("kv", channels)], tokens_first, **more)  # type: ignore[arg-type]


def apart(keys: int, values: int, tokens_first: bool = False) -> Memory:
    return Memory([("k", keys), ("v", values)], tokens_first)


def both(source: Memory, target: Memory) -> tuple[Layout, Layout]:
    (one,), (other,) = split_fused([source.layout], [target.layout]), split_fused([target.layout], [source.layout])
    return one, other


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize(("keys", "values"), [(8, 8), (6, 2)], ids=["as many values", "fewer values"])
@pytest.mark.parametrize("is_source", [True, False], ids=["from fused", "to fused"])
def test_every_element_arrives_in_its_place(is_source: bool, keys: int, values: int, tokens_first: bool) -> None:
    one, other = fused(keys + values, tokens_first), apart(keys, values, True)
    source, target = (one, other) if is_source else (other, one)
    source.flat[:] = np.random.default_rng(1).normal(size=source.flat.size)
    theirs, ours = both(source, target)
    runs = plan_runs(pair_layouts(theirs, ours), BLOCK_LISTS, BLOCK_LISTS, 0, NEEDED, None)
    moved = source.flat.view(np.uint8), target.flat.view(np.uint8)
    for at, to, size in runs.tolist():
        moved[1][to : to + size] = moved[0][at : at + size]
    assert (target.tokens() == source.tokens()).all()
    assert np.count_nonzero(target.flat) == LAYERS * NEEDED * HEADS * (keys + values)


def test_both_ends_sum_the_same_bytes() -> None:
    source, target = fused(16), apart(8, 8, True)
    source.flat[:] = np.random.default_rng(2).normal(size=source.flat.size)
    layouts = both(source, target)
    (leg,) = assign_legs(layouts[:1], layouts[1:]).legs
    for array, (first, end) in zip(target.arrays, ((0, 8), (8, 16)), strict=True):
        array[:] = source.arrays[0][..., first:end]
    span = Span(0, 0, NEEDED, 0, LAYERS)
    summed = []
    for memory, own, other in ((source, layouts[0], layouts[1]), (target, layouts[1], layouts[0])):
        parts = PiecePlanner(own, LegPart(leg.share, other)).plan(
            BLOCK_LISTS, HandoffKey(TransferId("t")), span, 0, Integrity.FULL
        )
        data = memory.flat.view(np.uint8)
        summed.append(b"".join(data[at : at + size].tobytes() for part in parts for at, size in part.tolist()))
    assert summed[0] == summed[1]
    assert len(summed[0]) == LAYERS * NEEDED * HEADS * 16 * 4


def test_fused_on_both_ends_stays_one_plane() -> None:
    source, target = fused(16), fused(16, True)
    assert both(source, target) == (source.layout, target.layout)


@pytest.mark.parametrize(
    ("source", "field"),
    [
        (fused(12), "planes"),
        (fused(16, kind=MLA), "kind"),
        (fused(16, whole_blocks=True), "whole_blocks"),
    ],
    ids=["other sizes", "a latent", "an order of its own"],
)
def test_what_does_not_fit_is_refused_by_name(source: Memory, field: str) -> None:
    target = apart(8, 8)
    assert split_fused([source.layout], [target.layout]) == (source.layout,)
    with pytest.raises(Incompatible, match=field):
        assign_legs([source.layout], [target.layout])
