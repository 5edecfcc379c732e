"""Controls of verify: what is named is not moved, everything else is, and no error is reported."""

from __future__ import annotations

import numpy as np
import pytest
from shaped_rig import BLOCK_TOKENS, BLOCKS

from kvbaton.core.pair import pair_layouts
from kvbaton.core.plan import plan_runs
from kvbaton.engines.embedded.shaped.blueprint import BLUEPRINTS, Cut
from kvbaton.engines.embedded.shaped.drops import check_drop, check_has, drop_filter
from kvbaton.engines.embedded.shaped.memory import ShapedCache
from kvbaton.errors import ConfigError

TOKENS = 10
LISTS = (tuple(range(3)), (0,), (0,))


def copied(drop: str) -> tuple[ShapedCache, ShapedCache]:
    """A source, and a target that has got what is left of a hand-off."""
    source, target = (ShapedCache(BLUEPRINTS["tiny-mamba"], BLOCKS, BLOCK_TOKENS, Cut(0, 1, 1, 2)) for _ in range(2))
    source.memory[:] = np.random.default_rng(1).integers(1, 255, source.region_bytes, np.uint8).tobytes()
    pair = pair_layouts(source.layout(), target.layout())
    for at, to, size in drop_filter(target, drop)(plan_runs(pair, LISTS, LISTS, 0, TOKENS)).tolist():
        target.memory[to : to + size] = source.memory[at : at + size]
    return source, target


def landed(drop: str) -> dict[str, set[tuple[int, int]]]:
    """By group, the (layer, head) of which anything has landed."""
    _, target = copied(drop)
    found: dict[str, set[tuple[int, int]]] = {group.kind: set() for group in target.groups}
    for group in target.groups:
        for plane in group.planes:
            values = target.plane(group.kind, plane.name).view(np.uint32)
            heads = [head for each in plane.heads for head in each]
            by_head = np.moveaxis(values, -1 - len(plane.head_shape), 1).reshape(len(group.layers), len(heads), -1)
            found[group.kind] |= {(group.layers[a], heads[b]) for a, b in np.argwhere(by_head.any(axis=2)).tolist()}
    return found


EVERYTHING = {
    "full": {(layer, head) for layer in (1, 3) for head in (2, 3)},
    "conv": {(layer, head) for layer in (0, 2) for head in (4, 5, 6, 7, 9, 11)},
    "ssm": {(layer, head) for layer in (0, 2) for head in (4, 5, 6, 7)},
}


@pytest.mark.parametrize("kind", ["full", "conv", "ssm"])
def test_a_kind_is_left_out(kind: str) -> None:
    assert landed(kind) == EVERYTHING | {kind: set()}


def test_a_layer_is_left_out() -> None:
    assert landed("layer:2") == {kind: {(layer, head) for layer, head in has if layer != 2} for kind, has in EVERYTHING.items()}


def test_a_head_is_left_out() -> None:
    assert landed("head:5") == {kind: {(layer, head) for layer, head in has if head != 5} for kind, has in EVERYTHING.items()}


def test_what_is_not_named_is_moved_as_it_is() -> None:
    source, target = copied("layer:99")
    for group in source.groups:
        for plane in group.planes:
            ours, theirs = (cache.plane(group.kind, plane.name).view(np.uint32) for cache in (target, source))
            np.testing.assert_array_equal(ours[:, 0], theirs[:, 0])


@pytest.mark.parametrize("drop", ["heads", "layer:", "layer:x", "head:-1", "everything"])
def test_what_names_nothing_is_refused(drop: str) -> None:
    with pytest.raises(ConfigError, match="names nothing"):
        check_drop(drop)


@pytest.mark.parametrize(
    ("model", "drop", "words"),
    [
        ("tiny-gqa8", "conv", "has nothing of that kind; it has full"),
        ("tiny-gqa8", "layer:4", "has layers 0 to 3"),
        ("tiny-gqa2", "head:2", "has heads 0 to 1"),
    ],
)
def test_what_the_model_does_not_have_is_refused(model: str, drop: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_has(BLUEPRINTS[model], drop)


@pytest.mark.parametrize("drop", ["", "all", "conv", "ssm", "full", "layer:3", "head:11"])
def test_what_the_model_has_can_be_left_out(drop: str) -> None:
    check_has(BLUEPRINTS["tiny-mamba"], drop)
