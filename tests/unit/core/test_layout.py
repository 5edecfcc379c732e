"""Layouts: sizes, contiguity, bounds and fingerprints."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest
from caches import compact_group, element_offset, layout_of
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.core.layout import Group, Layout

dimensions = st.integers(1, 3)
groups = st.builds(compact_group, dimensions, dimensions, dimensions, dimensions, dimensions, dimensions)


@given(groups)
def test_a_compact_group_fills_its_bytes_exactly_once(group: Group) -> None:
    axes = (len(group.layers), group.planes, group.blocks, group.block_tokens, group.heads)
    starts = [element_offset(group, *at) for at in product(*map(range, axes))]
    taken = sorted(start + byte for start in starts for byte in range(group.head_bytes))
    assert taken == list(range(group.end))


def test_sizes() -> None:
    group = compact_group(heads=3, head_size=5)
    assert group.head_bytes == 10
    assert group.token_bytes == 30


def test_token_contiguity() -> None:
    group = compact_group(heads=2)
    assert group.is_token_contiguous
    assert not msgspec.structs.replace(group, token_stride=group.token_stride + 1).is_token_contiguous
    assert not msgspec.structs.replace(group, head_stride=group.head_stride + 1).is_token_contiguous


def test_the_head_stride_of_a_single_head_does_not_matter() -> None:
    group = compact_group(heads=1)
    assert msgspec.structs.replace(group, head_stride=0).is_token_contiguous


def test_bounds() -> None:
    group = compact_group()
    assert group.is_within(group.end)
    assert not group.is_within(group.end - 1)
    assert not msgspec.structs.replace(group, layer_offsets=(-1, 0)).is_within(2 * group.end)


CHANGES = {
    "kind": "sliding",
    "layers": (0, 7),
    "blocks": 9,
    "block_stride": 100,
    "layer_offsets": (2, 50),
    "dtype": "float32",
    "whole_blocks": True,
}


@pytest.mark.parametrize(("field", "value"), CHANGES.items())
def test_the_fingerprint_sees_every_change(field: str, value: object) -> None:
    group = compact_group()
    layout = layout_of(group)
    changed = Layout(layout.region_bytes, (msgspec.structs.replace(group, **{field: value}),))
    assert layout.fingerprint() == Layout(layout.region_bytes, (compact_group(),)).fingerprint()
    assert changed.fingerprint() != layout.fingerprint()
    assert Layout(layout.region_bytes + 1, layout.groups).fingerprint() != layout.fingerprint()
