"""What is known of remote engines, by stage: the first registration counts, and every query names the stage."""

from __future__ import annotations

import pytest

from kvbaton.core.handoff import Incarnation
from kvbaton.core.remotes import RemoteEngines, RemoteStage
from kvbaton.errors import ConfigError, Incompatible

ONE, TWO = Incarnation("one"), Incarnation("two")


def test_without_pipelines_no_stage_has_to_be_named() -> None:
    stage = RemoteStage(4, 8192, 16)
    assert (stage.pp_rank, stage.start_layer, stage.end_layer) == (0, 0, 0)
    engines = RemoteEngines(4, 1, 8)
    engines.register("p", ONE, stage)
    assert engines.stage("p") == stage
    assert engines.ranks_to_read("p") == (1,)


def test_the_first_registration_counts_until_the_incarnation_changes() -> None:
    engines = RemoteEngines(1, 0, 8)
    first, other = RemoteStage(1, 100, 16), RemoteStage(2, 200, 16)
    assert engines.register("p", ONE, first) == first
    assert engines.register("p", ONE, other) == first
    assert engines.register("p", TWO, other) == other
    assert engines.stage("p") == other


def test_stages_are_kept_apart_and_forgotten_together() -> None:
    engines = RemoteEngines(1, 0, 8)
    stages = [RemoteStage(2 - rank, 100, 16, 1, rank, rank * 4, rank * 4 + 4) for rank in range(2)]
    for stage in stages:
        engines.register("p", ONE, stage)
    assert [engines.stage("p", rank) for rank in range(2)] == stages
    assert [engines.ranks_to_read("p", rank) for rank in range(2)] == [(0, 1), (0,)]
    engines.forget("p")
    with pytest.raises(ConfigError, match=r"pp rank 1 of engine p is not known \(known: none\)"):
        engines.stage("p", 1)


def test_an_engine_too_many_drops_the_oldest() -> None:
    engines = RemoteEngines(1, 0, 8, limit=2)
    for name in ("a", "b", "c"):
        engines.register(name, ONE, RemoteStage(1, 1, 1))
    engines.stage("c")
    with pytest.raises(ConfigError, match="engine a"):
        engines.stage("a")


@pytest.mark.parametrize(
    ("ours", "rank", "theirs", "heads", "met"),
    [
        (2, 1, 2, 8, (1,)),
        (2, 1, 4, 8, (2, 3)),
        (4, 3, 2, 8, (1,)),
        (1, 0, 4, 2, (0, 2)),
        (4, 1, 4, 1, (1,)),
        (2, 0, 3, 6, (0, 1)),
    ],
)
def test_which_ranks_are_read_from(ours: int, rank: int, theirs: int, heads: int, met: tuple[int, ...]) -> None:
    engines = RemoteEngines(ours, rank, heads)
    engines.register("p", ONE, RemoteStage(theirs, 1, 1))
    assert engines.ranks_to_read("p") == met
    assert engines.is_replicated("p") == (theirs > heads)


def test_an_impossible_split_is_refused_with_both_numbers() -> None:
    engines = RemoteEngines(1, 0, 6)
    engines.register("p", ONE, RemoteStage(4, 1, 1))
    with pytest.raises(Incompatible, match="'6 heads' here and 'tp4' there"):
        engines.ranks_to_read("p")
