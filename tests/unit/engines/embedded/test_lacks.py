"""Cards that leave something out: what is left of them, and that no peer accepts it as a whole instance."""

from __future__ import annotations

import pytest

from kvbaton.core.card import RankCard
from kvbaton.core.topology import Shape, instance_problem
from kvbaton.engines.embedded.shaped.blueprint import BLUEPRINTS, Cut
from kvbaton.engines.embedded.shaped.drops import check_lacks, without
from kvbaton.engines.embedded.shaped.memory import ShapedCache
from kvbaton.errors import ConfigError


def _cards() -> list[RankCard]:
    caches = [ShapedCache(BLUEPRINTS["tiny-mamba"], 2, 4, cut) for cut in Cut(0, 2, 0, 2).all()]
    return [RankCard(number, cache.layout(), ()) for number, cache in enumerate(caches)]


@pytest.mark.parametrize(
    ("lacks", "problem"),
    [
        ("", ""),
        ("layer:1", "no rank holds layers 1: there is a gap in the layers"),
        ("layer:2", "no rank holds layers 2: there is a gap in the layers"),
        ("rank:3", "3 ranks where shape pp2,tp2 has 4"),
    ],
)
def test_what_is_left_is_seen_to_be_not_whole(lacks: str, problem: str) -> None:
    layouts = [card.layout for card in without(_cards(), lacks)]
    assert instance_problem(Shape(pp=2, tp=2), layouts) == problem


def test_the_rest_of_a_layout_stays_as_it_is() -> None:
    before, after = _cards()[0].layout, without(_cards(), "layer:0")[0].layout
    assert after.layers == (1,)
    assert after.groups[0] == before.groups[0]
    assert not after.problem()


@pytest.mark.parametrize("lacks", ["layer", "layer:", "layer:x", "head:1", "rank:-1"])
def test_what_names_nothing_is_refused(lacks: str) -> None:
    with pytest.raises(ConfigError, match="names nothing"):
        check_lacks(lacks)
