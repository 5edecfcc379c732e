"""Layouts to plan with: a compact default, generated ones of every kind, and the oracle that goes element by element."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol, TypeVar

import msgspec
import numpy as np
from hypothesis import strategies as st

from kvbaton.core.checks import LegPart, PiecePlanner, Pieces
from kvbaton.core.handoff import BlockLists, HandoffKey, Integrity, Span
from kvbaton.core.layout import Axis, Group, HeadRange, Layout, Plane, TokenSplit
from kvbaton.core.tensors import dense_tensor, split_layers, tensor_group

__all__ = [
    "Case",
    "Choose",
    "Drawn",
    "GroupModel",
    "PlaneModel",
    "Rolled",
    "Side",
    "cases",
    "compact_group",
    "draw_blocks",
    "draw_group",
    "draw_model",
    "draw_sizes",
    "element_offset",
    "held_tokens",
    "is_needed",
    "layout_of",
    "plan_pieces",
    "reshaped",
]

T = TypeVar("T")

Element = tuple[int, int, int, int, int, int]
"""Group, plane, layer, token (0 for a state), global head, channel."""


def compact_group(
    layers: int = 2, planes: int = 2, blocks: int = 8, block_tokens: int = 4, heads: int = 2, head_size: int = 3
) -> Group:
    """A group without gaps: layers, planes, blocks, tokens, heads, in this order; two bytes per element."""
    tensors = split_layers(dense_tensor((layers, planes, blocks, block_tokens, heads, head_size), "float16", 2))
    names = {1: ("kv",), 2: ("k", "v")}.get(planes) or tuple(f"plane{index}" for index in range(planes))
    axes = ("plane", "block", "token", "head", "channel")
    return tensor_group("full", range(layers), tensors, axes, heads=(HeadRange(0, heads),), total_heads=heads, planes=names)


def reshaped(group: Group, **changes: object) -> Group:
    """The group with these fields of all its planes changed."""
    return msgspec.structs.replace(group, planes=tuple(msgspec.structs.replace(plane, **changes) for plane in group.planes))


def layout_of(*groups: Group) -> Layout:
    """A layout of these groups in a region that just holds them."""
    return Layout(max((group.end for group in groups), default=0), groups)


def element_offset(group: Group, plane: int, layer: int, block: int, token: int, head: int, channel: int) -> int:
    """Where one element lies, straight from the definition in `Plane`; layer and head as this rank counts them."""
    own = group.planes[plane]
    page, within = divmod(token, group.page_tokens) if group.block_tokens else (0, 0)
    at = own.layer_offsets[layer] + block * own.block_stride + page * own.page_stride + within * own.token_stride
    at += head * own.head_stride
    for axis in reversed(own.channels):
        channel, digit = divmod(channel, axis.count)
        at += digit * axis.stride
    return at


def plan_pieces(
    layout: Layout,
    blocks: BlockLists,
    key: HandoffKey,
    span: Span,
    cached_tokens: int,
    integrity: Integrity,
    total_tokens: int | None = None,
    part: LegPart | None = None,
) -> Pieces:
    """What a rank with this layout sums of one span, in one array."""
    parts = PiecePlanner(layout, part).plan(blocks, key, span, cached_tokens, integrity, total_tokens)
    return np.concatenate(parts) if parts else np.empty((0, 2), np.int64)


def held_tokens(split: TokenSplit, block_tokens: int, total: int) -> list[int]:
    """The tokens of a sequence that a rank holds, in order; written down one by one."""
    if split.interleave:
        return [token for token in range(total) if token // split.interleave % split.size == split.rank]
    sizes = [0] * split.size
    for block in range(-(-total // block_tokens)):
        sizes[block % split.size] += 1
    first = sum(sizes[: split.rank]) * block_tokens
    return [token for token in range(first, first + sizes[split.rank] * block_tokens) if token < total]


def is_needed(group: Group, token: int, first: int, end: int, total: int) -> bool:
    """Whether a token has to be moved."""
    return first <= token < end and (not group.window or token >= total - group.window)


@dataclass(frozen=True)
class Side:
    """One rank: its layout, and the blocks of the request in it."""

    layout: Layout
    blocks: tuple[tuple[int, ...], ...]

    def elements(self, first: int, end: int, total: int) -> Iterator[tuple[Element, int]]:
        """Every element that belongs to these tokens, and where it lies."""
        for number, group in enumerate(self.layout.groups):
            for token, block, within in self._tokens(number, group, first, end, total):
                for plane, own in enumerate(group.planes):
                    heads = [head for each in own.heads for head in range(each.start, each.end)]
                    for (index, layer), (place, head), channel in product(
                        enumerate(group.layers), enumerate(heads), range(own.head_size)
                    ):
                        at = element_offset(group, plane, index, block, within, place, channel)
                        yield (number, plane, layer, token, head, channel), at

    def _tokens(self, number: int, group: Group, first: int, end: int, total: int) -> Iterator[tuple[int, int, int]]:
        if group.is_state:
            if end == total:
                yield 0, self.blocks[number][0], 0
            return
        for place, token in enumerate(held_tokens(group.tokens, group.block_tokens, total)):
            if is_needed(group, token, first, end, total):
                yield token, self.blocks[number][place // group.block_tokens], place % group.block_tokens

    def element_bytes(self, element: Element) -> int:
        """How many bytes an element has."""
        return self.layout.groups[element[0]].planes[element[1]].element_bytes


@dataclass(frozen=True)
class Case:
    """Two layouts of the same model, the blocks of one request on both sides, and which tokens to copy."""

    source: Side
    target: Side
    first_token: int
    tokens: int
    total: int

    def copies(self) -> dict[int, int]:
        """The oracle: for every target byte that has to be written, the source byte it comes from, one by one."""
        places = dict(self.source.elements(self.first_token, self.tokens, self.total))
        wanted: dict[int, int] = {}
        for element, here in self.target.elements(self.first_token, self.tokens, self.total):
            if element in places:
                for byte in range(self.target.element_bytes(element)):
                    assert here + byte not in wanted
                    wanted[here + byte] = places[element] + byte
        return wanted


class Choose(Protocol):
    """Who makes the choices of a generated layout."""

    def integer(self, low: int, high: int) -> int:
        """A number between two, both included."""

    def one_of(self, values: Sequence[T]) -> T:
        """One of these."""

    def order(self, values: Sequence[T]) -> list[T]:
        """All of these in any order."""

    def flip(self) -> bool:
        """Either."""


class Drawn:
    """Choices that Hypothesis makes, and can make simpler when something fails."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def one_of(self, values: Sequence[T]) -> T:
        return self._draw(st.sampled_from(values))

    def order(self, values: Sequence[T]) -> list[T]:
        return self._draw(st.permutations(values))

    def flip(self) -> bool:
        return self._draw(st.booleans())


class Rolled:
    """Choices by a seed, for what is too large to be made simpler."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def one_of(self, values: Sequence[T]) -> T:
        return self._random.choice(values)

    def order(self, values: Sequence[T]) -> list[T]:
        return self._random.sample(values, len(values))

    def flip(self) -> bool:
        return self._random.random() < 0.5


@dataclass(frozen=True)
class PlaneModel:
    """One plane of the whole model, whichever rank holds which heads."""

    name: str
    element_bytes: int
    total_heads: int
    head_size: int


@dataclass(frozen=True)
class GroupModel:
    """One group as the model has it; a state where `is_state`."""

    kind: str
    layers: tuple[int, ...]
    planes: tuple[PlaneModel, ...]
    window: int = 0
    is_state: bool = False


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any pair of ranks of the same model, whatever each holds, and any request in them."""
    choose = Drawn(draw)
    models = [draw_model(choose) for _ in range(choose.integer(1, 2))]
    total = choose.integer(0, 12)
    tokens = total if choose.flip() else choose.integer(0, total)
    first_token = choose.integer(0, tokens)
    source, target = (_draw_side(choose, models, total) for _ in range(2))
    return Case(source, target, first_token, tokens, total)


def draw_model(choose: Choose) -> GroupModel:
    """A group of any kind, with as many layers, heads and channels as are enough to go wrong."""
    kind = choose.one_of(["full", "sliding", "mla", "index", "conv", "ssm"])
    layers = tuple(choose.order(range(choose.integer(1, 3))))
    heads, size, width = choose.integer(1, 4), choose.integer(1, 4), choose.one_of([1, 2])
    if kind == "mla":
        return GroupModel(kind, layers, (PlaneModel("latent", width, 1, size),))
    if kind == "index":
        return GroupModel(kind, layers, (PlaneModel("k", 1, 1, size), PlaneModel("scale", width, 1, 1)))
    if kind in ("conv", "ssm"):
        states = (PlaneModel("conv", width, 2 * heads, size), PlaneModel("ssm", 2, heads, choose.integer(1, 3)))
        return GroupModel(kind, layers, states[: choose.integer(1, 2)], is_state=True)
    window = choose.integer(1, 9) if kind == "sliding" else 0
    planes = tuple(PlaneModel(name, width, heads, size) for name in ("k", "v"))
    return GroupModel(kind, layers, planes, window)


def _draw_side(choose: Choose, models: Sequence[GroupModel], total: int) -> Side:
    groups: list[Group] = []
    lists: list[tuple[int, ...]] = []
    end = 0
    for model in models:
        heads = [draw_heads(choose, plane.total_heads) for plane in model.planes]
        layers = tuple(layer for layer in model.layers if choose.integer(0, 4)) or model.layers[:1]
        group, ids = draw_group(
            choose, model, layers, heads, draw_split(choose) if not model.is_state else TokenSplit(), total, end
        )
        end = max(end, group.end)
        groups.append(group)
        lists.append(ids)
    return Side(Layout(end + choose.integer(0, 5), tuple(groups)), tuple(lists))


def draw_heads(choose: Choose, total: int) -> tuple[HeadRange, ...]:
    """All heads, some in one range, or two ranges in any order."""
    first, end = sorted([choose.integer(0, total), choose.integer(0, total)])
    if choose.flip() or first == end:
        return (HeadRange(0, total),)
    middle = choose.integer(first, end)
    parts = [HeadRange(first, middle - first), HeadRange(middle, end - middle)]
    return tuple(choose.order([part for part in parts if part.count]))


def draw_split(choose: Choose) -> TokenSplit:
    """All tokens mostly, or those of one of several context-parallel ranks."""
    size = choose.one_of([1, 1, 1, 2, 3])
    return TokenSplit(choose.integer(0, size - 1), size, choose.integer(0, 3))


def draw_sizes(choose: Choose) -> tuple[int, int]:
    """Tokens per page and pages per block."""
    return choose.integer(1, 4), choose.integer(1, 3) if choose.integer(0, 2) == 0 else 1


def draw_group(
    choose: Choose,
    model: GroupModel,
    layers: tuple[int, ...],
    heads: Sequence[tuple[HeadRange, ...]],
    split: TokenSplit,
    total: int,
    start: int,
    sizes: tuple[int, int] | None = None,
) -> tuple[Group, tuple[int, ...]]:
    """Lay a group out in any way from `start` on, and draw the blocks of a request in it; `sizes` are as of `draw_sizes`."""
    page, pages = sizes or draw_sizes(choose)
    block_tokens = 0 if model.is_state else page * pages
    slots = 1 if model.is_state else -(-len(held_tokens(split, block_tokens, total)) // block_tokens)
    ids, blocks = draw_blocks(choose, slots, exactly=model.is_state)
    counts = {"layer": len(layers), "block": blocks, "page": pages, "token": page}
    if model.is_state:
        counts |= {"page": 1, "token": 1}
    alike = all(plane == model.planes[0] or _sizes(plane) == _sizes(model.planes[0]) for plane in model.planes)
    together = alike and len(set(heads)) == 1 and choose.flip()
    planes = (_together if together else _apart)(choose, model, heads, counts, start)
    group = Group(
        kind=model.kind,
        layers=layers,
        blocks=blocks,
        block_tokens=block_tokens,
        page_tokens=page if not model.is_state else 0,
        planes=planes,
        window=model.window,
        tokens=split,
    )
    return group, ids


def _sizes(plane: PlaneModel) -> tuple[int, int, int]:
    return plane.element_bytes, plane.total_heads, plane.head_size


def _together(
    choose: Choose, model: GroupModel, heads: Sequence[tuple[HeadRange, ...]], counts: dict[str, int], start: int
) -> tuple[Plane, ...]:
    """Planes as one more axis of the same memory: halves of it, of each block, of each token, or of each head."""
    return _placed(choose, model.planes, heads[0], counts | {"plane": len(model.planes)}, start)


def _apart(
    choose: Choose, model: GroupModel, heads: Sequence[tuple[HeadRange, ...]], counts: dict[str, int], start: int
) -> tuple[Plane, ...]:
    """Each plane in memory of its own."""
    planes: list[Plane] = []
    for plane, own in zip(model.planes, heads, strict=True):
        planes += _placed(choose, (plane,), own, counts | {"plane": 1}, start)
        start = max(start, _end(planes[-1], counts))
    return tuple(planes)


def _end(plane: Plane, counts: dict[str, int]) -> int:
    strides = {"block": plane.block_stride, "page": plane.page_stride, "token": plane.token_stride}
    reach = sum((counts[name] - 1) * stride for name, stride in strides.items())
    reach += (plane.head_count - 1) * plane.head_stride + sum((axis.count - 1) * axis.stride for axis in plane.channels)
    return max(plane.layer_offsets, default=0) + reach + plane.element_bytes


def _placed(
    choose: Choose, planes: Sequence[PlaneModel], heads: tuple[HeadRange, ...], counts: dict[str, int], start: int
) -> tuple[Plane, ...]:
    model = planes[0]
    channels = _draw_channels(choose, model.head_size)
    counts = counts | {"head": sum(each.count for each in heads)} | {f"c{index}": n for index, n in enumerate(channels)}
    size, strides = model.element_bytes, {}
    for name in _draw_order(choose, counts, len(channels)):
        strides[name] = size + choose.one_of([0, 0, 0, 0, 1, 7])
        size = strides[name] * max(1, counts[name])
    first = start + choose.integer(0, 3)
    places = choose.order(range(counts["layer"]))
    return tuple(
        Plane(
            name=plane.name,
            dtype=f"u{8 * plane.element_bytes}",
            element_bytes=plane.element_bytes,
            heads=heads,
            total_heads=plane.total_heads,
            channels=tuple(Axis(count, strides[f"c{index}"]) for index, count in enumerate(channels)),
            layer_offsets=tuple(first + place * strides["layer"] + index * strides["plane"] for place in places),
            block_stride=strides["block"],
            page_stride=strides["page"],
            token_stride=strides["token"],
            head_stride=strides["head"],
        )
        for index, plane in enumerate(planes)
    )


def _draw_channels(choose: Choose, head_size: int) -> tuple[int, ...]:
    divisors = [size for size in range(1, head_size + 1) if head_size % size == 0]
    inner = choose.one_of([head_size, head_size, *divisors])
    return (head_size,) if inner == head_size else (head_size // inner, inner)


def _draw_order(choose: Choose, counts: dict[str, int], channels: int) -> list[str]:
    """From the innermost axis outwards: as engines have it, or any order at all."""
    inner = [f"c{index}" for index in reversed(range(channels))]
    known = [
        [*inner, "head", "token", "page", "block", "plane", "layer"],
        [*inner, "head", "token", "page", "plane", "block", "layer"],
        [*inner, "plane", "head", "token", "page", "block", "layer"],
        [*inner, "token", "head", "page", "plane", "block", "layer"],
        [*inner, "plane", "token", "head", "page", "block", "layer"],
        [*inner, "head", "token", "page", "plane", "layer", "block"],
    ]
    kind = choose.integer(0, 8)
    return known[kind] if kind < len(known) else choose.order(list(counts))


def draw_blocks(choose: Choose, slots: int, *, exactly: bool = False) -> tuple[tuple[int, ...], int]:
    """Block ids of a request: any, consecutive, or the same backwards; sometimes more than needed. And how many there are."""
    blocks = choose.integer(max(1, slots), slots + 4)
    kind = choose.one_of(["any", "consecutive", "reversed"])
    count = slots if exactly else choose.integer(slots, blocks)
    if kind == "any":
        return tuple(choose.order(range(blocks))[:count]), blocks
    first = choose.integer(0, blocks - count)
    ids = tuple(range(first, first + count))
    return (ids if kind == "consecutive" else ids[::-1]), blocks
