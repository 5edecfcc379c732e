"""Turns and events, on a clock that is an argument."""

from __future__ import annotations

import numpy as np

from kvbaton.transport.base import AfterEvent, Ticket
from kvbaton.transport.queued import IDLE_S, BatchJob, Schedule
from kvbaton.transport.runs import RunCursor


def job(ticket: int, link: str, after: AfterEvent | None = None) -> BatchJob[str]:
    return BatchJob(Ticket(ticket), link, RunCursor(np.empty((0, 3), np.uint64)), after)


def turns(schedule: Schedule[str], count: int) -> list[int]:
    found = [schedule.next_turn() for _ in range(count)]
    return [entry.ticket for entry in found if entry is not None]


def test_links_take_turns_and_jobs_keep_their_order() -> None:
    schedule: Schedule[str] = Schedule(1.0)
    jobs = [job(1, "a"), job(2, "a"), job(3, "a"), job(4, "b"), job(5, "c")]
    for entry in jobs:
        schedule.add(entry, 0.0)
    assert turns(schedule, 4) == [1, 4, 5, 1]
    assert schedule.discard(jobs[0])
    assert not schedule.discard(jobs[0])
    assert turns(schedule, 3) == [4, 5, 2]
    assert [entry.ticket for entry in schedule.discard_link("a", waiting=True)] == [2, 3]
    assert turns(schedule, 2) == [4, 5]
    assert schedule.links() == ["b", "c"]


def test_a_job_waits_for_its_event_and_blocks_nobody() -> None:
    schedule: Schedule[str] = Schedule(1.0)
    come = False
    schedule.add(job(1, "a", lambda: come), 0.0)
    schedule.add(job(2, "a"), 0.0)
    assert schedule.check_events(0.0) == []
    assert turns(schedule, 1) == [2]
    come = True
    assert schedule.check_events(0.5) == []
    schedule.discard(job(2, "a"))
    assert turns(schedule, 1) == [1]


def test_events_are_asked_less_often_the_longer_they_take() -> None:
    schedule: Schedule[str] = Schedule(100.0)
    assert schedule.wait_s(0.0) == IDLE_S
    schedule.add(job(1, "a", lambda: False), 0.0)
    assert schedule.wait_s(0.0) == 0.0
    schedule.check_events(0.0)
    early = schedule.wait_s(0.0)
    schedule.check_events(10.0)
    late = schedule.wait_s(10.0)
    assert 0 < early < late <= 0.01


def test_failed_and_overdue_events_are_told_with_the_reason() -> None:
    def broken() -> bool:
        raise RuntimeError("no such stream")

    schedule: Schedule[str] = Schedule(1.0)
    schedule.add(job(1, "a", broken), 0.0)
    schedule.add(job(2, "a", lambda: False), 0.0)
    assert [(entry.ticket, "no such stream" in reason) for entry, reason in schedule.check_events(0.0)] == [(1, True)]
    assert schedule.check_events(0.9) == []
    assert [(entry.ticket, "within 1 s" in reason) for entry, reason in schedule.check_events(1.0)] == [(2, True)]
    assert schedule.wait_s(1.0) == IDLE_S


def test_a_lost_link_keeps_jobs_that_wait_unless_it_is_revoked() -> None:
    schedule: Schedule[str] = Schedule(1.0)
    schedule.add(job(1, "a", lambda: False), 0.0)
    schedule.add(job(2, "a"), 0.0)
    assert [entry.ticket for entry in schedule.discard_link("a", waiting=False)] == [2]
    assert [entry.ticket for entry in schedule.discard_link("a", waiting=True)] == [1]
