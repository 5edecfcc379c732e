"""Layouts to plan with: a compact default, and generated ones with odd strides, padding and axis orders."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import msgspec
from hypothesis import strategies as st

from kvbaton.core.layout import Group, Layout

__all__ = ["Case", "cases", "compact_group", "element_offset", "layout_of"]


def compact_group(
    layers: int = 2, planes: int = 2, blocks: int = 8, block_tokens: int = 4, heads: int = 2, head_size: int = 3
) -> Group:
    """A group without gaps: layers, planes, blocks, tokens, heads, in this order; two bytes per element."""
    head_stride = head_size * 2
    token_stride = heads * head_stride
    block_stride = block_tokens * token_stride
    plane_stride = blocks * block_stride
    return Group(
        kind="full",
        layers=tuple(range(layers)),
        planes=planes,
        blocks=blocks,
        block_tokens=block_tokens,
        head_start=0,
        heads=heads,
        total_heads=heads,
        head_size=head_size,
        dtype="float16",
        element_bytes=2,
        layer_offsets=tuple(layer * planes * plane_stride for layer in range(layers)),
        plane_stride=plane_stride,
        block_stride=block_stride,
        token_stride=token_stride,
        head_stride=head_stride,
    )


def layout_of(*groups: Group) -> Layout:
    """A layout of these groups in a region that just holds them."""
    return Layout(max((group.end for group in groups), default=0), groups)


def element_offset(group: Group, layer: int, plane: int, block: int, token: int, head: int) -> int:
    """Where one head of one token lies, straight from the definition in `Group`."""
    at = group.layer_offsets[layer] + plane * group.plane_stride + block * group.block_stride
    return at + token * group.token_stride + head * group.head_stride


@dataclass(frozen=True)
class Case:
    """Two layouts of the same model, the blocks of one request on both sides, and which tokens to copy."""

    source: Layout
    target: Layout
    source_blocks: tuple[tuple[int, ...], ...]
    target_blocks: tuple[tuple[int, ...], ...]
    first_token: int
    tokens: int

    def copies(self) -> dict[int, int]:
        """The oracle: for every target byte that has to be written, the source byte it comes from, one by one."""
        wanted: dict[int, int] = {}
        for index, (source, target) in enumerate(zip(self.source.groups, self.target.groups, strict=True)):
            axes = (range(len(source.layers)), range(source.planes), range(self.first_token, self.tokens), range(source.heads))
            for layer, plane, token, head in product(*axes):
                slot, within = divmod(token, source.block_tokens)
                here = element_offset(target, layer, plane, self.target_blocks[index][slot], within, head)
                there = element_offset(source, layer, plane, self.source_blocks[index][slot], within, head)
                for byte in range(source.head_bytes):
                    assert here + byte not in wanted
                    wanted[here + byte] = there + byte
        return wanted


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any pair of layouts that fit together, and any request in them."""
    block_tokens = draw(st.integers(1, 4))
    tokens = draw(st.integers(0, 12))
    first_token = draw(st.integers(0, tokens))
    slots = -(-tokens // block_tokens)
    sides: tuple[list[Group], list[Group]] = ([], [])
    lists: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = ([], [])
    ends = [0, 0]
    for _ in range(draw(st.integers(1, 2))):
        model = _draw_model(draw, block_tokens)
        for side in (0, 1):
            blocks = draw(st.integers(max(1, slots), slots + 4))
            group = _placed(draw, msgspec.structs.replace(model, blocks=blocks), ends[side])
            ends[side] = group.end
            sides[side].append(group)
            lists[side].append(_draw_blocks(draw, blocks, slots))
    source, target = (Layout(end + draw(st.integers(0, 5)), tuple(groups)) for end, groups in zip(ends, sides, strict=True))
    return Case(source, target, tuple(lists[0]), tuple(lists[1]), first_token, tokens)


def _draw_model(draw: st.DrawFn, block_tokens: int) -> Group:
    numbers = [draw(st.integers(1, 3)) for _ in range(4)]
    layers, planes, heads, head_size = numbers
    group = compact_group(layers, planes, 1, block_tokens, heads, head_size)
    element_bytes = draw(st.sampled_from([1, 2]))
    head_stride = head_size * element_bytes
    return msgspec.structs.replace(
        group, element_bytes=element_bytes, head_stride=head_stride, token_stride=heads * head_stride
    )


def _placed(draw: st.DrawFn, group: Group, start: int) -> Group:
    """Lay the group out with its axes in any order of nesting, padding between all of them, and layers in any order."""
    counts = {
        "layer": len(group.layers),
        "plane_stride": group.planes,
        "block_stride": group.blocks,
        "token_stride": group.block_tokens,
        "head_stride": group.heads,
    }
    size = group.head_bytes
    strides: dict[str, int] = {}
    for name in _axes(draw):
        strides[name] = size + draw(st.sampled_from([0, 0, 0, 1, 7]))
        size = strides[name] * counts[name]
    step, first = strides.pop("layer"), start + draw(st.integers(0, 3))
    places = draw(st.permutations(range(len(group.layers))))
    return msgspec.structs.replace(group, layer_offsets=tuple(first + place * step for place in places), **strides)


def _axes(draw: st.DrawFn) -> list[str]:
    """From the innermost axis outwards; heads within tokens, as most engines have it, half of the time."""
    outer = ["layer", "plane_stride", "block_stride"]
    if draw(st.booleans()):
        return ["head_stride", "token_stride", *draw(st.permutations(outer))]
    return draw(st.permutations(["head_stride", "token_stride", *outer]))


def _draw_blocks(draw: st.DrawFn, blocks: int, slots: int) -> tuple[int, ...]:
    """Block ids of a request: any, consecutive, or the same backwards; sometimes with more blocks than needed."""
    kind = draw(st.sampled_from(["any", "consecutive", "reversed"]))
    count = draw(st.integers(slots, blocks))
    if kind == "any":
        return tuple(draw(st.permutations(range(blocks)))[:count])
    first = draw(st.integers(0, blocks - count))
    ids = tuple(range(first, first + count))
    return ids if kind == "consecutive" else ids[::-1]
