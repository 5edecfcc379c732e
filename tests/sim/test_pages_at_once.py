"""A few pages that a target reads in one call: runs go that way, alike without loops in C, and mistakes on it are found."""

from __future__ import annotations

import pytest
from scenario import Flow, make

from kvbaton.core.handoff import Mode
from kvbaton.sim import instance, transport
from kvbaton.sim.drills import script_of_seed
from kvbaton.sim.run import run_script
from kvbaton.sim.transport import SimTransport
from kvbaton.transport.base import LateWrites, PagesMoved, PeerRank
from kvbaton.transport.runs import Pages, load_loops

READS = make(Flow(Mode.PUSH, LateWrites.IMPOSSIBLE))
MOVE = SimTransport.move_pages
_SOURCE_BLOCKS_AT = 4
"""Where the table of pages has how many blocks the source has."""

needs_compiler = pytest.mark.skipif(load_loops() is None, reason="needs a C compiler")


@needs_compiler
def test_what_is_read_of_one_rank_is_moved_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[PagesMoved | None] = []

    def listen(sim: SimTransport, peer: PeerRank, pages: Pages) -> PagesMoved | None:
        moved.append(MOVE(sim, peer, pages))
        return moved[-1]

    monkeypatch.setattr(SimTransport, "move_pages", listen)
    assert not run_script(READS).violations
    assert any(moved)


@needs_compiler
def test_control_pages_of_other_blocks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(sim: SimTransport, peer: PeerRank, pages: Pages) -> PagesMoved | None:
        blocks = pages.table[_SOURCE_BLOCKS_AT]
        return MOVE(sim, peer, pages._replace(sources=tuple((each + 1) % blocks for each in pages.sources)))

    monkeypatch.setattr(SimTransport, "move_pages", elsewhere)
    assert "foreign byte" in {violation.rule for violation in run_script(READS).violations}


@needs_compiler
def test_control_pages_that_are_reported_and_not_moved_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(sim: SimTransport, peer: PeerRank, pages: Pages) -> PagesMoved | None:
        moved = MOVE(sim, peer, pages)
        if moved is not None:
            posted = vars(sim)["_posted"][moved.ticket]
            posted.moved, posted.moves = len(posted.moves), type(posted.moves)()
        return moved

    monkeypatch.setattr(SimTransport, "move_pages", drop)
    assert "foreign byte" in {violation.rule for violation in run_script(READS).violations}


def test_without_loops_a_seed_is_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = [script_of_seed(seed) for seed in range(20)]
    with_loops = [(result.events, result.outcomes) for result in map(run_script, scripts)]
    for module in (instance, transport):
        monkeypatch.setattr(module, "find_loops", lambda: None)
    assert [(result.events, result.outcomes) for result in map(run_script, scripts)] == with_loops
