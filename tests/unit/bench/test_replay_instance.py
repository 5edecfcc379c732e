"""A replayed instance in this process: orders that come in one batch, as after a pause, each get their answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvbaton.bench.bare.instance import Task
from kvbaton.bench.replay.instance import CancelRequest, ReplayInstance, ReplaySettings, SideOver, SubmitSide
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Mode
from kvbaton.launch.ports import PortPicker

SOURCE = str(ControlAddress.of("127.0.0.1", 9))


@pytest.fixture
def reports() -> list[Any]:
    return []


@pytest.fixture
def instance(reports: list[Any]) -> Iterator[ReplayInstance]:
    instance = ReplayInstance(ReplaySettings(16, 64, port=PortPicker().pick()), reports.append, lambda: None)
    instance.start()
    yield instance
    instance.close()


@pytest.mark.parametrize("source", [SOURCE, ""], ids=["target", "source"])
def test_a_request_that_was_cancelled_and_sent_again_in_one_batch_ends_twice(
    instance: ReplayInstance, reports: list[Any], source: str
) -> None:
    task = Task("same id", Mode.PUSH, 1, 1, 32, 16)
    instance.take(SubmitSide(1, task, source))
    instance.take(CancelRequest(1))
    instance.take(SubmitSide(2, task, source))
    instance.work()
    ends = {report.number: report for report in reports if isinstance(report, SideOver)}
    assert {number: end.outcome for number, end in ends.items()} == {1: "cancelled", 2: "failed"}
    assert all(end.reason for end in ends.values())
    instance.take(SubmitSide(3, task, source))
    instance.work()
    assert instance.gauges(0).blocks_in_use == 2, "when that is reported, the id is free again"
