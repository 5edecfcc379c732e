"""Real drivers over a transport that writes: a push whose source writes, what goes wrong, and that it has to be chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from driver_rig import Side, is_equal, is_poison, key_of, landed, start_handoff

from kvbaton.agent.engine_port import SourceEnded, TargetEnded
from kvbaton.config import HandoffSettings
from kvbaton.core.handoff import Integrity, Mode, Outcome
from kvbaton.transport.faulty import Faults
from mori_stand_in import MoriWorld

WRITES = HandoffSettings(unfenced_writes=True)


@contextmanager
def pair(
    source: HandoffSettings = WRITES, target: HandoffSettings = WRITES, faults: Faults | None = None
) -> Iterator[tuple[Side, Side]]:
    """A source and a target, running; `faults` are the source's."""
    world = MoriWorld()
    with Side(world, faults=faults, settings=source) as writing, Side(world, settings=target) as written:
        yield writing, written


@pytest.mark.parametrize("integrity", list(Integrity))
def test_the_source_writes_and_every_byte_is_right(integrity: Integrity) -> None:
    with pair(target=HandoffSettings(unfenced_writes=True, integrity=integrity)) as (source, target):
        for name in ("first", "second"):
            assert landed(source, target, name, Mode.PUSH).stats.source_writes
            assert is_equal(source, target)
            assert source.wait_for(SourceEnded, key_of(name)).outcome is Outcome.DELIVERED
        assert source.driver.stats().runs_total >= 2
        assert target.driver.stats().runs_total == 0


def test_control_without_the_writes_the_bytes_are_wrong() -> None:
    with pair(faults=Faults(drop_writes=True)) as (source, target):
        landed(source, target, "dropped", Mode.PUSH)
        assert not is_equal(source, target)
        assert is_poison(target.cache.data)


@pytest.mark.parametrize(("target_how", "mode"), [(HandoffSettings(), Mode.PUSH), (WRITES, Mode.PULL)], ids=["off", "pull"])
def test_the_target_reads_where_it_has_not_chosen_writes_and_in_pull(target_how: HandoffSettings, mode: Mode) -> None:
    with pair(target=target_how) as (source, target):
        assert not landed(source, target, "read", mode).stats.source_writes
        assert is_equal(source, target)
        assert source.driver.stats().runs_total == 0


def test_a_source_that_has_not_chosen_it_fails_with_the_setting_and_writes_nothing() -> None:
    with pair(source=HandoffSettings()) as (source, target):
        start_handoff(source, target, "refused", Mode.PUSH)
        assert "set unfenced_writes (--unfenced-writes)" in source.wait_for(SourceEnded, key_of("refused")).reason
        assert "set unfenced_writes (--unfenced-writes)" in target.wait_for(TargetEnded, key_of("refused")).reason
        assert is_poison(target.cache.data)


def test_a_write_that_fails_ends_both_sides_and_gives_every_block_back() -> None:
    with pair(faults=Faults(fail_after=0)) as (source, target):
        start_handoff(source, target, "failing", Mode.PUSH)
        assert "failed on command" in source.wait_for(SourceEnded, key_of("failing")).reason
        assert "failed on command" in target.wait_for(TargetEnded, key_of("failing")).reason
        assert target.driver.stats().quarantined_blocks == 0
        source.transport.set_faults(Faults())
        landed(source, target, "next", Mode.PUSH)
        assert is_equal(source, target)
